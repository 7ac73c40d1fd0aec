"""Planned bytes and traffic of a part, by the formulas of the papers; the ledger and comm measure them."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from zeroshard.memory import in_pages
from zeroshard.memory.ledger import Category
from zeroshard.traffic import Purpose
from zeroshard.units import Index


@dataclass(frozen=True, slots=True)
class Planned:
    """Bytes of one category on one tier.

    Attributes:
        nbytes: of elements in use; a fraction where the ranks do not divide them.
        padding: of padding.
    """

    tier: str
    category: Category
    nbytes: Fraction
    padding: Fraction


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step on a unit.

    Attributes:
        microbatches: forwards and backwards.
        gathers: of weights that are gathered for use.
        updates: of each weight.
        reductions: of the gradients, in each update.
    """

    microbatches: int
    gathers: int
    updates: int
    reductions: int


Wire = Iterator[tuple[Purpose, int]]  # elements that a step moves


def on_device(index: Index, category: Category, nbytes: int, rank: int | None = None) -> Planned:
    """A buffer over a flat of `nbytes` per element, or over the slice of a rank."""
    kept, padding = (Fraction(index.numel), Fraction(index.padding)) if rank is None else index.share(rank)
    return Planned("device", category, kept * nbytes, padding * nbytes)


def on_lower_tier(index: Index, tier: str, category: Category, nbytes: int, paged: bool = True) -> Planned:
    """A slice of a flat on a tier below the device, `nbytes` in all, in whole pages unless torch makes it."""
    kept = Fraction(nbytes * index.numel, max(index.padded_numel, 1))
    return Planned(tier, category, kept, (in_pages(nbytes) if paged else nbytes) - kept)
