"""A claim: the numbers of a paper, and a function that computes ours."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """One published number and ours.

    Attributes:
        what: name of the case.
        published: as printed, or a formula's value as a fraction; empty where the paper prints none.
        ours: as computed.
        exact: whether ours must be equal, instead of equal in the printed digits.
        note: a remark on ours.
        within: share of the published number by which ours may differ, where ours is a model of a measured one.
    """

    what: str
    published: str
    ours: Fraction | float | str
    exact: bool = False
    note: str = ""
    within: float = 0.0

    @property
    def difference(self) -> float | None:
        """Ours minus the published one; None if they are texts, or none is published."""
        if isinstance(self.ours, str) or not self.published:
            return None
        return float(self.ours - Fraction(self.published)) if self.exact else float(self.ours) - float(self.published)

    @property
    def agrees(self) -> bool:
        """Whether ours equals the published one, exactly or rounded or cut to the printed digits, or is near it.

        Always true where none is published.
        """
        if isinstance(self.ours, str) or not self.published:
            return not self.published or self.ours == self.published
        if self.within:
            return abs(float(self.ours) / float(self.published) - 1) <= self.within
        if self.exact:
            return self.ours == Fraction(self.published)
        printed, ours = Decimal(self.published), Decimal(float(self.ours))
        return printed in (ours.quantize(printed, ROUND_HALF_UP), ours.quantize(printed, ROUND_DOWN))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        names = ("what", "published", "ours", "difference", "agrees", "within", "note")
        return {name: getattr(self, name) for name in names} | {
            "ours": self.ours if isinstance(self.ours, str) else float(self.ours)
        }


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and how it is checked.

    Attributes:
        name: on the command line.
        title: one line.
        source: the paper, and the place in it.
        unit: of all readings.
        how: the method of ours, in a few sentences.
        compute: gives the readings; calls its argument with the name of each case before it computes it.
    """

    name: str
    title: str
    source: str
    unit: str
    how: str
    compute: Callable[[Say], Iterable[Reading]]


@dataclass(frozen=True)
class Outcome:
    """The result of checking a claim.

    Attributes:
        seconds: duration of the check.
    """

    claim: Claim
    readings: tuple[Reading, ...]
    seconds: float

    @property
    def reproduced(self) -> bool:
        """Whether every number is the published one."""
        return all(reading.agrees for reading in self.readings)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        about = {name: getattr(self.claim, name) for name in ("name", "title", "source", "unit", "how")}
        return about | {
            "reproduced": self.reproduced,
            "seconds": self.seconds,
            "numbers": [reading.as_dict() for reading in self.readings],
        }


def check(claim: Claim, say: Say = lambda text: None) -> Outcome:
    """Compute a claim's numbers now.

    Args:
        say: called with the name of each case before it is computed.

    Raises:
        ZeroshardError: the engine or the partitioner refused a case.
    """
    began = time.perf_counter()
    readings = tuple(claim.compute(say))
    return Outcome(claim, readings, time.perf_counter() - began)
