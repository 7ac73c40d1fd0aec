"""Ways to keep a block between its forward and its backward: whole, in part, stored by savers, or its input alone.

A block kept in part keeps the last tensors that it saves: its recomputation ends with the last tensor asked for, so
operations that lead to kept tensors alone are not computed again. Of a block with dropout at its end that is the
product before it, for as many bytes as the factors of the dropout have. Or it keeps all but tensors that one cheap
operation makes again (`remade`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroshard.recompute.auto.meter import BlockMeasures, SavedTail
from zeroshard.recompute.auto.remade import Recipe
from zeroshard.recompute.auto.stored import BySavers

RESTART = 5e-4  # seconds that a block takes longer, in both of its forwards, where it is computed again


@dataclass(frozen=True, slots=True)
class KeptPart:
    """The part of a block that is kept.

    Attributes:
        first: number of the first saved tensor that is kept with all after it; None if the input alone is kept.
        remade: how those of them are made again that are freed nevertheless.
        by: the savers that store the part, if any do.
    """

    first: int | None = None
    remade: tuple[Recipe, ...] = ()
    by: BySavers | None = None

    @property
    def whole(self) -> bool:
        """Whether all is kept as autograd keeps it."""
        return self.first == 0 and not self.remade and self.by is None

    @property
    def computed(self) -> bool:
        """Whether the block is computed again."""
        return self.first != 0

    def recipe(self, number: int) -> Recipe | None:
        """The recipe of a saved tensor; None if it is kept."""
        return next((recipe for recipe in self.remade if recipe.number == number), None)


WHOLE, INPUT = KeptPart(0), KeptPart()


@dataclass(frozen=True, slots=True)
class BlockWay:
    """A way to keep a block.

    Attributes:
        held: bytes until the backward beside the block's input, its output among them.
        peak: bytes when its backward begins.
        seconds: of computing, copying and making tensors again beside its forward.
        part: of the block that is kept.
    """

    held: int
    peak: int
    seconds: float
    part: KeptPart


def parts_of(block: BlockMeasures) -> list[BlockWay]:
    """Ways to keep a block in part: by bytes, each way faster than all that take fewer."""
    found = [*_tails(block), *_remade(block)]
    found.sort(key=lambda way: (way.held, way.seconds))
    pairs = zip(found, accumulate((way.seconds for way in found), min), strict=True)
    return [way for way, seconds in pairs if way.seconds == seconds and way.held < block.saved]


def _tails(block: BlockMeasures) -> Iterator[BlockWay]:
    """The block computed again up to its kept tail."""
    empty = SavedTail(0, 0, block.again, block.calls)
    for tail in lower_hull([empty, *block.tails]):
        held, peak = block.leaving + block.sums + tail.nbytes, block.saved + block.copied + block.sums
        if tail is not empty:
            yield BlockWay(held, peak, RESTART + tail.seconds, KeptPart(tail.first))


def _remade(block: BlockMeasures) -> Iterator[BlockWay]:
    """The block kept but for tensors that are made again, those first that free the most bytes for their seconds."""
    held, seconds, recipes = block.saved, RESTART, list[Recipe]()
    for each in sorted(block.remade, key=lambda costs: costs.seconds / costs.nbytes):
        held, seconds, recipes = held - each.nbytes, seconds + each.seconds, [*recipes, *each.recipes]
        yield BlockWay(held, block.saved + block.copied, seconds, KeptPart(0, tuple(recipes)))


def lower_hull(tails: Sequence[SavedTail]) -> list[SavedTail]:
    """The tails that spare the most seconds for their bytes: corners of the convex hull below all, shortest first."""
    hull: list[SavedTail] = []
    for each in sorted(tails, key=lambda tail: (tail.nbytes, tail.seconds)):
        if hull and each.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-1], each):
            hull.pop()
        hull.append(each)
    return hull


def _rate(shorter: SavedTail, longer: SavedTail) -> float:
    """Seconds that a longer tail spares for each further byte."""
    return (shorter.seconds - longer.seconds) / max(1, longer.nbytes - shorter.nbytes)
