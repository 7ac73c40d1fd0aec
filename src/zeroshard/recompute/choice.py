"""Answers on activations to the planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.planning.questions import Choice, Description

SHOWN = {"schedule": (), "off": ("no recompute",), "blocks": ("recompute",)}


@dataclass(frozen=True)
class Recomputing(Choice):
    """Recomputation and compression of activations under a plan.

    Attributes:
        recompute: its name in `Activations`.
        device_memory: the device's budget as the plan has it.
        compress: how saved tensors are compressed.
    """

    recompute: str = "schedule"
    device_memory: str | int | None = None
    compress: tuple[str, ...] = ()

    def describe(self, ranks: int | None) -> Description:
        """The recomputation, unless it is that of the schedule, and the compression."""
        compressed = (f"compressed {'+'.join(self.compress)}",) if self.compress else ()
        return Description(settings=SHOWN.get(self.recompute, (f"recompute {self.recompute}",)) + compressed)

    @property
    def in_blocks(self) -> bool:
        """Whether of each block, or of a stage's chunk, its inputs alone are kept until its backward."""
        return self.recompute == "blocks"

    @property
    def alike(self) -> bool:
        """With segments by the square root, or within a budget, a further block costs other than the last."""
        return self.recompute not in ("sqrt", "auto")

    def rehearsed(self, settled: int, meaningless: bool) -> Mapping[str, Any]:
        """Decisions within the budget are those of the run."""
        return {"device_memory": self.device_memory} if self.recompute == "auto" else {}
