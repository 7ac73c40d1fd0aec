"""The plan's formulas beside the measurements of the ledger and comm: `engine.memory()` and `engine.traffic()`."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Generic, TypeVar

from zeroshard.comm.collectives import Count, Purpose
from zeroshard.memory.ledger import MODEL_STATES, Category, Ledger
from zeroshard.parts.part import Parts
from zeroshard.parts.planned import Planned, Work

TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one category on one tier of this rank.

    Attributes:
        tier: "device", "host" or "disk".
        planned_bytes: by the paper's formula for Ψ parameters; None where there is none. A fraction where N does not
            divide Ψ.
        padding_bytes: by the same formula for the padding elements; below the device also the rest of the last page
            of each piece.
        measured_bytes: on the ledger now.
        peak_bytes: the most it held.
    """

    category: str
    tier: str
    planned_bytes: Fraction | None
    padding_bytes: Fraction | None
    measured_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Traffic of the last step for one purpose, by the paper's count (an all-gather of Ψ elements counts Ψ)."""

    purpose: str
    planned_elements: int | None
    measured_elements: int
    padding_elements: int
    measured_bytes: int
    sent_bytes: int
    calls: int
    seconds: float


Row = TypeVar("Row", bound=MemoryRow | TrafficRow)


class _Table(Generic[Row]):
    """Rows that print as a table and convert to dicts."""

    rows: list[Row]
    title: str

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain values; fractions become floats."""
        return [{k: float(v) if isinstance(v, Fraction) else v for k, v in asdict(row).items()} for row in self.rows]

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        dicts = [self._shown(row) for row in self.as_dicts()]
        cells = [[key.replace("_", " ") for key in dicts[0]], *([_text(v) for v in row.values()] for row in dicts)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for name, *numbers in cells:
            right = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return "\n".join([self.title, *lines])


class MemoryTable(_Table[MemoryRow]):
    """Bytes per rank: planned by the formula, padding, measured by the ledger.

    All categories of the device, and of the tiers below it those that were ever held.
    """

    def __init__(self, rows: list[MemoryRow]) -> None:
        self.rows = rows
        self.title = "bytes on this rank"

    def __getitem__(self, key: str | tuple[str, str]) -> MemoryRow:
        """The row of a category on the device, or of (category, tier)."""
        wanted = (key, "device") if isinstance(key, str) else key
        return next(row for row in self.rows if (row.category, row.tier) == wanted)

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        """The tier beside the category, where it is not the device."""
        tier = row.pop("tier")
        return row if tier == "device" else {**row, "category": f"{row['category']}, {tier}"}


class TrafficTable(_Table[TrafficRow]):
    """Elements and bytes on the wire in the last step: formula and measured."""

    def __init__(self, rows: list[TrafficRow]) -> None:
        self.rows = rows
        self.title = "on the wire in the last step"

    def __getitem__(self, purpose: str) -> TrafficRow:
        return next(row for row in self.rows if row.purpose == purpose)


def memory_table(parts: Parts, ledger: Ledger, more: Iterable[Planned]) -> MemoryTable:
    """The formula and the ledger, tier by tier and category by category; memory that ranks share counts in equal parts.

    Args:
        more: planned bytes besides those of the parts.
    """
    planned: dict[tuple[str, Category], tuple[Fraction, Fraction]] = {
        (tier, category): (Fraction(0), Fraction(0)) for tier in TIERS for category in MODEL_STATES
    }
    for each in (*(each for part in parts.all for each in part.planned()), *more):
        nbytes, padding = planned[each.tier, each.category]
        planned[each.tier, each.category] = (nbytes + each.nbytes, padding + each.padding)
    rows = []
    for tier, category in itertools.product(TIERS, Category):
        account = ledger.account(category, tier)
        formula, extra = planned.get((tier, category), (None, None))
        if tier == "device" or formula or account.peak:
            rows.append(MemoryRow(str(category), tier, formula, extra, account.current, account.peak))
    return MemoryTable(rows)


def planned_bytes(parts: Parts, more: Iterable[Planned]) -> dict[Category, int]:
    """Bytes of model states on the device by the formula, with padding, by category; `more` as for `memory_table`."""
    found: dict[Category, Fraction] = {}
    for each in (*(each for part in parts.all for each in part.planned()), *more):
        if each.tier == "device":
            found[each.category] = found.get(each.category, Fraction(0)) + each.nbytes + each.padding
    return {category: ceil(nbytes) for category, nbytes in found.items()}


def traffic_table(
    parts: Parts, work_on: Callable[[int], Work], counts: Mapping[Purpose, Count], messages: Mapping[Purpose, int]
) -> TrafficTable:
    """The formula and comm's counts of the last step, purpose by purpose.

    Args:
        work_on: a unit in the step.
        messages: planned elements between pipeline stages.
    """
    planned = dict.fromkeys((Purpose.GATHER_PARAMETERS, Purpose.REDUCE_GRADIENTS, Purpose.GATHER_GRADIENTS), 0)
    planned |= messages
    for purpose, elements in (each for part in parts.all for each in part.wire(work_on(part.flat.unit.number))):
        planned[purpose] = planned.get(purpose, 0) + elements
    rows = []
    for purpose in Purpose:
        count = counts.get(purpose, Count())
        formula = planned.get(purpose, count.planned)
        if formula is not None or count.calls:
            row = TrafficRow(
                str(purpose),
                formula,
                measured_elements=count.elements,
                padding_elements=count.padding,
                measured_bytes=count.nbytes,
                sent_bytes=count.sent_nbytes,
                calls=count.calls,
                seconds=count.seconds,
            )
            rows.append(row)
    return TrafficTable(rows)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
