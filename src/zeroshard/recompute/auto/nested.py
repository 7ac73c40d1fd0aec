"""Segments that are computed again in a given order, which may compute a block more than twice (1911.13214).

The order says of each region whether a recomputation fills its slots or passes through it. A stretch of regions that
was passed keeps the input of its first one, and is computed again in an order of its own when a slot in it is asked
for. What is asked for decides what is computed: backwards in any order find their tensors.
"""

from collections.abc import Callable

from zeroshard.recompute.auto.rotor import ChainItem, PassedBlocks, SavedBlock
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.segments import BlockSegment
from zeroshard.saved.kept import Kept

Key = tuple[int, int]  # a region, and a leaf of its output


class NestedSegment(BlockSegment):
    """Regions that are computed again in a given order.

    Args:
        context, weights, count: as for `BlockSegment`.
        order: called when the first slot is asked for, with the segment; gives the order of its regions, by number.
    """

    often = True

    def __init__(
        self,
        context: RecomputeContext,
        weights: set[int],
        count: Callable[[], None],
        order: "Callable[[NestedSegment], tuple[ChainItem, ...]]",
    ) -> None:
        super().__init__(context, weights, count)
        self._order = order
        self._passed: list[PassedBlocks] = []  # stretches whose input is there, the whole segment first
        self._inputs: dict[int, dict[Key, Kept]] = {}  # what stretches take from before them, by their first region

    def compute_again(self, number: int) -> None:
        """Compute stretches around a region again until its slots are filled."""
        if not self._passed:
            self._passed.append(PassedBlocks(0, len(self._regions) - 1, self._order(self)))
        filled = False
        while not filled:
            stretch = min(
                (each for each in self._passed if each.first <= number <= each.last), key=lambda s: s.last - s.first
            )
            self._compute(stretch)
            filled = any(isinstance(item, SavedBlock) and item.block == number for item in stretch.again)

    def _compute(self, stretch: PassedBlocks) -> None:
        """Compute the regions of a stretch again, in its order."""
        made = dict(self._inputs.get(stretch.first, {}))
        for item in stretch.again:
            if isinstance(item, SavedBlock):
                self._region(item.block, stretch.last, made, fill=True)
                continue
            self._inputs[item.first] = self._taken(item.first, item.last, made)
            self._passed.append(item)
            for number in range(item.first, item.last + 1):
                self._region(number, stretch.last, made, fill=False)
        first = stretch.again[0]
        if len(self._passed) > 1 and stretch is not self._passed[0]:
            self._passed = [each for each in self._passed if each is not stretch]
        if isinstance(first, SavedBlock):
            self._inputs.pop(stretch.first, None)

    def _region(self, number: int, last: int, made: dict[Key, Kept], fill: bool) -> None:
        """Compute a region again; `made` has then what is needed of it and of earlier ones, up to the region `last`."""
        region = self._regions[number]
        needed = self._links(number + 1, last)
        whole = any(key[0] == number for key in needed)
        if whole or (fill and region.waiting):
            with self._context.gathered(region.call.unit):
                leaves = region.compute(self._context, lambda r, leaf: made[r, leaf].tensor(), whole, fill)
            self._count()
            made |= {(r, leaf): self._context.hold(leaves[leaf]) for r, leaf in needed if r == number}
        for key in made.keys() - needed:
            del made[key]

    def _links(self, first: int, last: int) -> set[Key]:
        """What regions from `first` to `last` take from others."""
        return {key for region in self._regions[first : last + 1] for key in region.links}

    def _taken(self, first: int, last: int, made: dict[Key, Kept]) -> dict[Key, Kept]:
        """What they take from regions before them."""
        return {key: made[key] for key in self._links(first, last) if key[0] < first}
