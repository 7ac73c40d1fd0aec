"""The verdict of a verification: a table of comparisons, and the first difference with its cause."""

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

COLUMNS = 100
NOTES = 3  # that are shown


@dataclass(frozen=True, slots=True)
class Compared:
    """One line of the table.

    Attributes:
        what: is compared.
        count: how many numbers or tensors.
        worst: the largest relative error.
        where: its place.
        tolerance: the relative error up to which they count as equal.
    """

    what: str
    count: int
    worst: float
    where: str
    tolerance: float


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference between the run under the plan and the plain loop.

    Attributes:
        step: from 0.
        what: differs, such as "forward" or "gradient".
        module: in which it comes up, by its path; the model's class for what belongs to all of it.
        tensor: that differs, such as a parameter.
        error: relative.
        cause: in one sentence.
        collective: that is responsible, with the unit that it is of; None where none is.
        others: how many other tensors of this kind differ in the same step.
    """

    step: int
    what: str
    module: str
    tensor: str
    error: float
    cause: str
    collective: str | None = None
    others: int = 0


@dataclass(frozen=True)
class Verification:
    """The result of a verification; it prints as one screen.

    Attributes:
        title: the model, the plan, the ranks and the steps.
        first: the first difference; None where there is none.
        table: the comparisons.
        notes: further remarks.
        seconds: duration.
    """

    title: str
    first: FirstDifference | None
    table: tuple[Compared, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the run under the plan equals that of the plain loop."""
        return self.first is None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        return screen(self)


def screen(found: Verification) -> str:
    """At most one screen: 24 lines of 100 columns, where titles and notes are short."""
    lines = _wrapped(found.title)
    if found.first is None:
        lines += ["", "The run under the plan is that of the plain loop in one process."]
    else:
        lines += ["", *_difference(found.first)]
    width = max((len(row.where) for row in found.table), default=0)
    width = min(max(width, len("where")), 52)
    lines += ["", f"{'compared':<16} {'number':>7} {'worst error':>12} {'allowed':>9}  where"]
    for row in found.table:
        mark = "" if row.worst <= row.tolerance else "  <"
        where = row.where if len(row.where) <= width else "..." + row.where[3 - width :]
        lines.append(
            f"{row.what:<16} {row.count:>7,} {_number(row.worst):>12} {_number(row.tolerance):>9}  {where}{mark}"
        )
    for note in found.notes[:NOTES]:
        lines += _wrapped(f"note: {note}", "      ")
    lines.append(f"{found.seconds:.1f} s")
    return "\n".join(lines)


def _difference(first: FirstDifference) -> list[str]:
    when = "before the first step" if first.step < 0 else f"in step {first.step}"
    also = f" (and {first.others:,} more)" if first.others else ""
    return [
        f"First difference {when}: {first.what}",
        *_wrapped(f"  module      {first.module}", " " * 14),
        *_wrapped(f"  collective  {first.collective or 'none'}", " " * 14),
        *_wrapped(f"  differs     {first.tensor}{also}, relative error {_number(first.error)}", " " * 14),
        *_wrapped(f"  cause       {first.cause}", " " * 14),
    ]


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"
