"""Blocks that are computed again and keep a part: results of operations, and the last tensors that they save.

Results of operations are given back to the recomputation, which needs a dispatch mode. The last saved tensors need
none: a recomputation ends with the last tensor that it is asked for, so what leads to kept ones alone is not computed.
Of a block with dropout at its end that is the product before it, for as many bytes as the factors of the dropout have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from zeroshard.errors import BudgetExceeded
from zeroshard.recompute.auto.meter import BlockMeasures, OperationCosts, SavedTail, keepable
from zeroshard.recompute.auto.remade import Recipe
from zeroshard.recompute.auto.rotor import ChainItem, OtherWay, SavedBlock
from zeroshard.recompute.auto.stored import BySavers
from zeroshard.recompute.operations import OperationsMode, Treatment
from zeroshard.recompute.segments import Region

DISPATCH = 1e-5  # seconds that an operation takes longer where results are kept: two ways through Python
RESTART = 5e-4  # seconds that a block takes longer, in both of its forwards, where it is computed again
FEW = 2e-5  # seconds; what takes less is not worth to be kept


@dataclass(frozen=True, slots=True)
class KeptPart:
    """What is kept of a block that is not kept whole.

    Attributes:
        operations: the numbers of those whose results are kept.
        first: the number of the first tensor that is kept with all that are saved after it; None if none is.
        remade: how those of them are made that are let go nevertheless.
        by: the savers that store what is kept, if any do.
    """

    operations: tuple[int, ...] = ()
    first: int | None = None
    remade: tuple[Recipe, ...] = ()
    by: BySavers | None = None

    @property
    def computed(self) -> bool:
        """Whether the block is computed again."""
        return self.first != 0

    def recipe(self, number: int) -> Recipe | None:
        """How a saved tensor is made again; None if it is not."""
        return next((recipe for recipe in self.remade if recipe.number == number), None)


def part_of(item: ChainItem | None) -> KeptPart | None:
    """What is kept of a block in part; None of one that is kept whole, or of which the input alone is kept."""
    part = item.way.choice if isinstance(item, SavedBlock) and item.way is not None else None
    return part if isinstance(part, KeptPart) else None


class ChosenOperations(OperationsMode):
    """Keeps the results of the operations that a region's choice names."""

    def __init__(self, region: Region, known: dict[Any, Treatment]) -> None:
        super().__init__(region, keepable, known)
        self._numbers, self._number = frozenset[int](region.choice.operations), 0

    def _kept(self, func: Any, args: Any, kwargs: Any) -> Any:
        number, self._number = self._number, self._number + 1
        if number in self._numbers and not self._region.dropped:
            try:
                return super()._kept(func, args, kwargs)
            except BudgetExceeded:
                self._region.drop_saved()
        return func(*args, **kwargs)


def ways_of(block: BlockMeasures) -> list[OtherWay]:
    """How a block may be kept in part: by bytes, each way faster than all that take fewer."""
    whole = SavedTail(0, 0, block.again, block.calls, len(block.operations))
    found: list[OtherWay] = []
    for tail in lower_hull([whole, *block.tails]):
        known = {each.number: each for each in block.operations if each.number < tail.operations}
        for numbers in ((), *results_to_keep([*known.values()])):
            chosen = [known[number] for number in numbers]
            spared = sum(each.seconds for each in chosen) - bool(chosen) * DISPATCH * (block.calls + tail.calls)
            held = block.leaving + block.sums + tail.nbytes + sum(each.nbytes for each in chosen)
            peak = block.saved + block.copied + block.sums + sum(each.beside for each in chosen)
            part = KeptPart(numbers, None if tail is whole else tail.first)
            found.append(OtherWay(held, peak, block.seconds + RESTART + tail.seconds - spared, part))
    found += _remade_ways(block)
    found.sort(key=lambda way: (way.held, way.seconds))
    pairs = zip(found, accumulate((way.seconds for way in found), min), strict=True)
    return [way for way, seconds in pairs if way.seconds == seconds and way.held < block.saved]


def _remade_ways(block: BlockMeasures) -> Iterator[OtherWay]:
    """The block kept but for tensors that are made again, those first that free the most bytes for their seconds."""
    held, seconds, recipes = block.saved, block.seconds + RESTART, list[Recipe]()
    for each in sorted(block.remade, key=lambda costs: costs.seconds / costs.nbytes):
        held, seconds, recipes = held - each.nbytes, seconds + each.seconds, [*recipes, *each.recipes]
        yield OtherWay(held, block.saved + block.copied, seconds, KeptPart((), 0, tuple(recipes)))


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


def results_to_keep(operations: Sequence[OperationCosts], sizes: int = 64, ways: int = 6) -> list[tuple[int, ...]]:
    """For growing numbers of bytes, the operations whose kept results spare the most seconds: an exact knapsack.

    Args:
        sizes: steps of memory; bytes are rounded up to them.
        ways: choices at most.

    Returns:
        numbers of operations, the fewest bytes first; none that another one beats in both.
    """
    items = [each for each in operations if each.seconds >= FEW]
    total = sum(each.nbytes for each in items)
    step = max(1, total // sizes)
    best: list[tuple[float, tuple[OperationCosts, ...]]] = [(0.0, ())] * (sizes + len(items) + 2)
    for each in items:
        need = -(-each.nbytes // step)
        for room in range(len(best) - 1, need - 1, -1):
            seconds, chosen = best[room - need]
            if seconds + each.seconds > best[room][0]:
                best[room] = (seconds + each.seconds, (*chosen, each))
    found: list[tuple[float, tuple[OperationCosts, ...]]] = []
    for seconds, chosen in best:
        if chosen and (not found or seconds > found[-1][0]):
            found.append((seconds, chosen))
    every = max(1, -(-len(found) // ways))
    return [tuple(each.number for each in chosen) for _, chosen in found[::every]]
