"""Tables of `engine.memory()` and `engine.traffic()`: rows that print, convert to dicts, and show in notebooks."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from html import escape
from typing import Any, Generic, TypeVar

from zeroshard.text import format_bytes


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


class RowTable(Generic[Row]):
    """Rows that print as a table and convert to dicts."""

    rows: list[Row]
    title: str

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain values; fractions become floats."""
        return [{k: float(v) if isinstance(v, Fraction) else v for k, v in asdict(row).items()} for row in self.rows]

    @property
    def note(self) -> str:
        """A line below the rows; empty for none."""
        return ""

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def _cells(self) -> list[list[str]]:
        """The header, and each row, as text."""
        dicts = [self._shown(row) for row in self.as_dicts()]
        return [[key.replace("_", " ") for key in dicts[0]], *([_text(v) for v in row.values()] for row in dicts)]

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        header, *rows = self._cells()
        title = f"<caption>{escape(self.title)}</caption>"
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for name, *numbers in cells:
            right = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *right]))
        return "\n".join([self.title, *lines, *([self.note] if self.note else [])])


class MemoryTable(RowTable[MemoryRow]):
    """Bytes per rank: planned by the formula, padding, measured by the ledger.

    All categories of the device, and of the tiers below it those that were ever held; the last line says what the
    device holds in all.

    Args:
        budget: bytes that the device may hold, or has; None where it is not known.
    """

    def __init__(self, rows: list[MemoryRow], budget: int | None = None) -> None:
        self.rows, self._budget = rows, budget
        self.title = "bytes on this rank"

    @property
    def total(self) -> int:
        """Bytes on the device now."""
        return sum(row.measured_bytes for row in self.rows if row.tier == "device")

    def __getitem__(self, key: str | tuple[str, str]) -> MemoryRow:
        """The row of a category on the device, or of (category, tier)."""
        wanted = (key, "device") if isinstance(key, str) else key
        return next(row for row in self.rows if (row.category, row.tier) == wanted)

    @property
    def note(self) -> str:
        """The device's total, and its share of the budget or of the device's memory."""
        share = f", {self.total / self._budget:.1%} of {format_bytes(self._budget)}" if self._budget else ""
        return f"total on the device: {self.total:,} bytes ({format_bytes(self.total)}{share})"

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        """The tier beside the category, where it is not the device."""
        tier = row.pop("tier")
        return row if tier == "device" else {**row, "category": f"{row['category']}, {tier}"}


class TrafficTable(RowTable[TrafficRow]):
    """Elements and bytes on the wire in the last step: formula and measured."""

    def __init__(self, rows: list[TrafficRow]) -> None:
        self.rows = rows
        self.title = "on the wire in the last step"

    def __getitem__(self, purpose: str) -> TrafficRow:
        return next(row for row in self.rows if row.purpose == purpose)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
