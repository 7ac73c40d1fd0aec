"""Offers: the kinds of plans that a technique has for a number of machines, for a search to try out."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

NEAR = 1.05  # times the shortest expected step: limit of the plans that are looked at


class Looked(Protocol):
    """A search's result for one plan."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits."""

    @property
    def seconds(self) -> float:
        """Seconds of one step."""


Seen = TypeVar("Seen", bound=Looked)
Rehearse = Callable[[int], Seen | None]  # at so many microbatches; None where the engine refuses them


@dataclass(frozen=True, slots=True)
class Site:
    """The model to be trained, and its devices.

    Attributes:
        ranks: all of them.
        per_node: of one node.
        rows: of one step, all ranks together.
        blocks: counts those of the model.
    """

    ranks: int
    per_node: int
    rows: int
    blocks: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Divided:
    """Ranks of a model-parallel group, which work on the same data.

    Attributes:
        settings: fields of the plan that set it.
        together: ranks per group.
        site: the devices, each group counted as one rank.
    """

    settings: Mapping[str, Any]
    together: int
    site: Site


@dataclass(frozen=True, slots=True)
class Refused:
    """Settings that no plan on this site can have, the reason, and the way out."""

    settings: Mapping[str, Any]
    why: str
    way_out: str = ""


@dataclass(frozen=True)
class Fewest:
    """Search order where fewer microbatches are faster: the fewest that fit.

    Attributes:
        ascending: begin with the fewest, where no estimate says how many are likely.
    """

    ascending: bool = False

    def near(self, fitting: Sequence[Seen]) -> Sequence[Seen]:
        """Of first estimates that fit, by their microbatches, the one that is expected to be found."""
        return fitting[:1]

    def ahead(self, counts: Sequence[int], likely: Sequence[int]) -> Sequence[int]:
        """The numbers that will probably be looked at; without likely ones, as if the fewest fitted."""
        if not likely:
            return list(dict.fromkeys([*counts[-1:], *counts[:1]]))
        at = counts.index(likely[0])
        return [counts[at], *counts[max(0, at - 1) : at]]

    def find(self, rehearse: Rehearse[Seen], counts: Sequence[int], likely: Sequence[int]) -> Seen | None:
        """By bisection from those expected, as memory falls with their number; one needs no sum of gradients besides.

        None fits where the finest that was looked at is returned, and does not.
        """
        start = 0 if self.ascending else len(counts) - 1
        at, low, high = counts.index(likely[0]) if likely else start, 0, len(counts)
        best: Seen | None = None
        looked: list[int] = []
        while low < high:
            looked.append(counts[at])
            last = rehearse(counts[at])
            if last is None:
                return best
            if last.fits or best is None or not best.fits:
                best = last
            low, high = (low, at) if last.fits else (at + 1, high)
            at = high - 1 if likely else (low + high) // 2
            likely = []
        if best is not None and not best.fits and counts[0] == 1 and 1 not in looked:
            alone = rehearse(1)
            return alone if alone is not None and alone.fits else best
        return best


class Coarsest(Fewest):
    """Search order where leaner settings are faster than more microbatches: the fewest, whether they fit or not."""

    def ahead(self, counts: Sequence[int], likely: Sequence[int]) -> Sequence[int]:
        """The fewest."""
        return counts[:1]

    def find(self, rehearse: Rehearse[Seen], counts: Sequence[int], likely: Sequence[int]) -> Seen | None:
        """The fewest."""
        return rehearse(counts[0])


class Fastest:
    """Search order where more microbatches save idle time and small ones compute slower: the fastest."""

    def near(self, fitting: Sequence[Seen]) -> Sequence[Seen]:
        """Of first estimates that fit, those that are expected to be about as fast as the fastest."""
        order = sorted(fitting, key=lambda one: one.seconds)
        return [one for one in order if one.seconds <= NEAR * order[0].seconds]

    def ahead(self, counts: Sequence[int], likely: Sequence[int]) -> Sequence[int]:
        """The likely ones, or else the finest."""
        return likely or counts[-1:]

    def find(self, rehearse: Rehearse[Seen], counts: Sequence[int], likely: Sequence[int]) -> Seen | None:
        """The fastest of those that are expected to be; else of finer ones, or the finest, which does not fit."""
        looked = [rehearse(count) for count in likely]
        found = [one for one in looked if one is not None]
        fitting = [one for one in found if one.fits]
        if fitting:
            return min(fitting, key=lambda one: one.seconds)
        if likely and not found:  # refused for another reason than its size
            return None
        last: Seen | None = None
        for count in [m for m in counts if m > max(likely, default=0)] if likely else counts[-1:]:
            last = rehearse(count)
            if last is None or last.fits:
                return last
        return last or found[-1]


@dataclass(frozen=True)
class Offer:
    """One kind of plans.

    Attributes:
        settings: fields of the plan.
        data_ranks: among which rows are shared out.
        counts: numbers of microbatches that can be, ascending.
        order: which of them is looked for.
        usual: microbatches from which on more make a plan little faster, so that they are for plans that do not fit.
        without_counts: why none can be, and the way out.
        leaner: further settings for plans that do not fit.
        lean_order: which numbers of microbatches are looked for with them; `order` by default.
        faster: further settings for plans that do, of so many microbatches.
        most_faster: number of these settings, at most.
    """

    settings: Mapping[str, Any]
    data_ranks: int
    counts: Sequence[int]
    order: Fewest | Fastest = field(default_factory=Fewest)
    usual: float = math.inf
    without_counts: tuple[str, str] = ("", "")
    leaner: Mapping[str, Any] = field(default_factory=dict)
    lean_order: Fewest | Fastest | None = None
    faster: Callable[[int, Site], Iterable[Mapping[str, Any]]] = lambda microbatches, site: ()
    most_faster: int = 0


def divisors(number: int) -> list[int]:
    """The whole numbers that divide it, ascending."""
    return [k for k in range(1, number + 1) if number % k == 0]
