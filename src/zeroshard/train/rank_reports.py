"""Reports of every rank on each step and on the whole run: loss, busy seconds, memory, waits for offload."""

import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import psutil

MOST_RANKS = 64  # whose values a line of metrics lists; of more, the least, the median and the greatest


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's report on a step, packed into a few bytes that travel with the agreement on the loss.

    Attributes:
        loss: in nats per token; NaN on ranks without it.
        busy_seconds: of the step, without waits for other ranks.
        stop: the signal by which the rank was asked to stop; 0 for none.
        rss_bytes: resident memory of the process.
        memory_bytes: on the device by the ledger, after the step.
        exposed_seconds: in which the step waited for offload.
    """

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<ddBQQd")
    QUANTITIES: ClassVar[Sequence[str]] = ("busy_seconds", "rss_bytes", "memory_bytes", "exposed_seconds")

    loss: float
    busy_seconds: float
    stop: int
    rss_bytes: int
    memory_bytes: int
    exposed_seconds: float

    def pack(self) -> bytes:
        """The report in `LAYOUT`."""
        held = self.rss_bytes, self.memory_bytes
        return self.LAYOUT.pack(self.loss, self.busy_seconds, self.stop, held[0], held[1], self.exposed_seconds)

    @classmethod
    def unpack(cls, packed: bytes) -> "RankReport":
        """The report of some bytes."""
        loss, busy, stop, resident, held, exposed = cls.LAYOUT.unpack(packed)
        return cls(loss, busy, stop, resident, held, exposed)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def of_ranks(reports: Sequence[RankReport]) -> dict[str, Any]:
    """The values of all ranks for a line of metrics; empty for a single rank.

    Of more than `MOST_RANKS` ranks, each quantity has its least, median and greatest value, and `quantiles` is true.
    """
    if len(reports) < 2:
        return {}
    columns: dict[str, list[float]] = {
        name: [getattr(report, name) for report in reports] for name in RankReport.QUANTITIES
    }
    columns = {name: values for name, values in columns.items() if any(values)}
    if len(reports) > MOST_RANKS:
        quantiles = {name: [min(values), median(values), max(values)] for name, values in columns.items()}
        return {"ranks": {"quantiles": True, **quantiles}}
    return {"ranks": columns}


def rank_facts(rank: int, peak_bytes: int | None, waited: Mapping[str, Any]) -> dict[str, Any]:
    """Host, memory and exposed seconds of a rank, for the summary of the run.

    Args:
        peak_bytes: the most on its device in the recorded step; None without one.
        waited: its exposed seconds by cause, under `exposed_seconds`, where something is offloaded.
    """
    exposed = sum(waited.get("exposed_seconds", {}).values())
    held = {"peak_bytes": peak_bytes, "rss_bytes": resident_bytes()}
    return {"rank": rank, "host": platform.node(), **held, "exposed_seconds": exposed}
