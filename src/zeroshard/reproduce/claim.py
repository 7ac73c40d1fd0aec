"""A claim: what a paper says, and a function that computes our number for it now."""

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
        what: it is of.
        published: as it is printed, or a formula's value as a fraction.
        ours: computed now.
        exact: whether ours must be equal, and not only print as the same digits.
        note: how ours came about, where it says more than the claim.
    """

    what: str
    published: str
    ours: Fraction | float | str
    exact: bool = False
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Ours less the published one; None where they are no numbers."""
        if isinstance(self.ours, str):
            return None
        return float(self.ours - Fraction(self.published)) if self.exact else float(self.ours) - float(self.published)

    @property
    def agrees(self) -> bool:
        """Whether ours is the published one: equal, or rounded or cut to as many digits as are printed."""
        if isinstance(self.ours, str):
            return self.ours == self.published
        if self.exact:
            return self.ours == Fraction(self.published)
        printed, ours = Decimal(self.published), Decimal(float(self.ours))
        return printed in (ours.quantize(printed, ROUND_HALF_UP), ours.quantize(printed, ROUND_DOWN))


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it is checked.

    Attributes:
        name: to ask for it.
        title: in one line.
        source: paper, and where in it.
        unit: of all its readings.
        how: ours are obtained, in a few sentences.
        compute: ours, now; told what to call when it goes on to the next.
    """

    name: str
    title: str
    source: str
    unit: str
    how: str
    compute: Callable[[Say], Iterable[Reading]]


@dataclass(frozen=True)
class Waiting:
    """A claim whose subject is not built yet.

    Attributes:
        waits_for: what must be built first, in one sentence.
    """

    name: str
    title: str
    source: str
    waits_for: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "built": False,
            "waits_for": self.waits_for,
        }


@dataclass(frozen=True)
class Outcome:
    """A claim, checked.

    Attributes:
        seconds: that it took.
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
        claim = self.claim
        about = {"name": claim.name, "title": claim.title, "source": claim.source, "unit": claim.unit, "how": claim.how}
        return about | {
            "built": True,
            "reproduced": self.reproduced,
            "seconds": self.seconds,
            "numbers": [
                {
                    "what": r.what,
                    "published": r.published,
                    "ours": r.ours if isinstance(r.ours, str) else float(r.ours),
                    "difference": r.difference,
                    "agrees": r.agrees,
                    "note": r.note,
                }
                for r in self.readings
            ],
        }


def check(claim: Claim, say: Say = lambda text: None) -> Outcome:
    """Compute a claim's numbers now.

    Args:
        say: told what is being computed.

    Raises:
        ZeroshardError: what the engine or the partitioner refuses.
    """
    began = time.perf_counter()
    readings = tuple(claim.compute(say))
    return Outcome(claim, readings, time.perf_counter() - began)
