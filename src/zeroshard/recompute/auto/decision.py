"""What is done with each block of a forward, so that its backward is the cheapest within a budget.

[Note: several forwards] Where n forwards come before the first backward (stages of a pipeline), all but one hold what
they keep between forward and backward, k bytes, while one has its backward, at most m bytes; so (n - 1) k + m must fit.
The model's last part, with the loss, is one more block of the chain: it is never computed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from zeroshard.recompute.auto.kept_parts import RESTART, KeptPart, part_of, ways_of
from zeroshard.recompute.auto.meter import BlockMeasures, PassMeasures, alike
from zeroshard.recompute.auto.rotor import (
    BlockCosts,
    ChainItem,
    ChainOrder,
    OrderTable,
    OtherWay,
    PassedBlocks,
    SavedBlock,
    least,
)
from zeroshard.recompute.auto.stored import SPACINGS, BySavers, ahead_of

GRID = 24  # budgets that are tried for one of several forwards
SIZES = 400  # steps of memory


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be done.

    Attributes:
        alone: each block that is computed again is so by itself: others would gather weights once more.
        stores: the choices of the plan's savers.
    """

    alone: bool
    stores: tuple[BySavers, ...] = ()


@dataclass(frozen=True, slots=True)
class PassDecision:
    """What is done in one forward of the model.

    Attributes:
        items: of its blocks in their order.
        seconds: of what is computed again, predicted.
        kept: bytes of its blocks between forward and backward.
        peak: bytes of the blocks at most while the backward runs.
        needs: by the first block of each item, the bytes that the rest of the forward and its backward take besides.
    """

    items: tuple[ChainItem, ...]
    seconds: float
    kept: int
    peak: int
    needs: Mapping[int, int]


class PassChain:
    """The blocks of one forward as a chain under given rules.

    Args:
        measures: of its blocks.
        forwards: how many such forwards come before the first backward.
    """

    def __init__(self, measures: PassMeasures, rules: Rules, forwards: int = 1) -> None:
        self._measures, self._rules, self._forwards = measures, rules, max(1, forwards)
        self._count = len(measures.blocks)
        blocks = alike(measures.blocks)
        ways: dict[tuple[Any, ...], tuple[OtherWay, ...]] = {}
        for each in blocks:
            kind = _kind(each)
            ways[kind] = ways[kind] if kind in ways else tuple(ways_of(each))
        sums = [0, *(each.sums for each in blocks)]  # which a block that is computed again holds for itself
        self._costs = [
            BlockCosts(
                each.seconds, 0.0, (each.entering if n else 0) + sums[n], each.saved + each.copied, each.sums,
                ways[_kind(each)], RESTART,
            )
            for n, each in enumerate(blocks)
        ]  # fmt: skip
        self._costs.append(BlockCosts(0.0, 0.0, sums[-1], measures.after))
        self._blocks = blocks

    @property
    def outside(self) -> int:
        """Bytes of each forward beside what its blocks keep."""
        return self._measures.before + sum(each.kept for each in self._measures.blocks)

    @property
    def least(self) -> int:
        """The fewest bytes in which the forwards and backwards can run."""
        return self._total(self._least_order())

    @property
    def enough(self) -> int:
        """The bytes in which they can run with each block by itself, all of which may take as much as the largest."""
        inputs = self._count * max((cost.entering for cost in self._costs), default=0)
        block = max(cost.saved + cost.temporary for cost in self._costs)
        return max(self.least, self._forwards * (self.outside + inputs) + block)

    @property
    def frugal(self) -> PassDecision:
        """The decision that takes the fewest bytes."""
        return self._decision(self._least_order())

    def decide(self, budget: int) -> PassDecision | None:
        """The fastest decision within a budget for all forwards; None if it is too small."""
        saved = ChainOrder(0.0, tuple(SavedBlock(n) for n in range(self._count + 1)))
        if self._total(saved) <= budget:
            return self._decision(saved)
        frugal = self._least_order()
        if self._total(frugal) > budget:
            return None
        room = min(budget - self._forwards * self.outside, self._peak(saved.items))
        found = [self._decision(frugal)]
        for costs in self._variants():
            table = OrderTable(costs, room, SIZES, self._rules.alone)
            for steps in [table.steps] if self._forwards == 1 else self._grid(table.steps):
                orders = [table.order(steps), None if self._rules.alone else self._whole(table, steps)]
                fitting = (order for order in orders if order is not None and self._total(order) <= budget)
                found += map(self._decision, fitting)
        return min(found, key=lambda decision: (decision.seconds, decision.peak))

    def again(self, room: int) -> tuple[ChainItem, ...] | None:
        """The cheapest order in which all blocks are computed again within `room` bytes; None if it is too small."""
        costs = [replace(cost, ways=()) for cost in self._costs[: self._count]]  # which are for first forwards
        if least(costs) > room:
            return None
        return OrderTable(costs, room, SIZES).again(self._count - 1, min(SIZES, room)) or one_at_a_time(self._count)

    @property
    def least_again(self) -> int:
        """The least `room` of `again`."""
        return least(self._costs[: self._count])

    def _whole(self, table: OrderTable, steps: int) -> ChainOrder | None:
        """All blocks computed again within so many steps of memory."""
        again = table.again(self._count - 1, steps)
        return ChainOrder(0.0, (PassedBlocks(0, self._count - 1, again), SavedBlock(self._count))) if again else None

    def _variants(self) -> Iterator[list[BlockCosts]]:
        """The costs with none stored, or one of so many; where copies do not run beside the computation, any may be."""
        yield self._costs
        stored = [each for block in self._blocks for each in block.stored if each is not None]
        beside = any(each.down > each.own for each in stored)
        for spacing in SPACINGS if beside else SPACINGS[: bool(stored)]:
            yield [*(self._with_stored(n, spacing) for n in range(self._count)), self._costs[-1]]

    def _with_stored(self, number: int, spacing: int) -> BlockCosts:
        cost, block = self._costs[number], self._blocks[number]
        ahead, ways = ahead_of([each.seconds for each in self._blocks], number, spacing), list(cost.ways)
        for stored, by in zip(block.stored, self._rules.stores, strict=True):
            if stored is not None and ahead is not None and stored.held + block.leaving < block.saved:
                held, peak = stored.held + block.leaving + block.sums, stored.held + cost.saved + cost.temporary
                ways.append(OtherWay(held, peak, block.seconds + stored.seconds(ahead), KeptPart(first=0, by=by)))
        return replace(cost, ways=tuple(ways))

    def _grid(self, steps: int) -> list[int]:
        return sorted({max(1, steps * n // GRID) for n in range(1, GRID + 1)}, reverse=True)

    def _least_order(self) -> ChainOrder:
        blocks: list[ChainItem]
        if self._rules.alone:
            blocks = [PassedBlocks(n, n, (SavedBlock(n),)) for n in range(self._count)]
        else:
            blocks = [PassedBlocks(0, self._count - 1, one_at_a_time(self._count))] if self._count else []
        return ChainOrder(0.0, (*blocks, SavedBlock(self._count)))

    def _total(self, order: ChainOrder) -> int:
        """Bytes of all forwards at most."""
        return self._forwards * self.outside + (self._forwards - 1) * self._kept(order.items) + self._peak(order.items)

    def _decision(self, order: ChainOrder) -> PassDecision:
        seconds = self._again(order.items, first=True) + self._first_read(order.items)
        needs, most, beside = {}, 0, 0
        for item in reversed(order.items):
            most = max(self._peak([item]), self._held(item) + most)
            first, last = (item.block, item.block) if isinstance(item, SavedBlock) else (item.first, item.last)
            beside += sum(each.kept for each in self._measures.blocks[first : last + 1])
            needs[first] = most + beside
        return PassDecision(order.items[:-1], seconds, self._kept(order.items), most, needs)

    def _first_read(self, items: Sequence[ChainItem]) -> float:
        """Seconds of reading the last block that is stored, which the backward meets first: nothing runs beside it."""
        for item in reversed(items):
            part = part_of(item)
            if isinstance(item, SavedBlock) and part is not None and part.by is not None:
                costs = self._blocks[item.block].stored[part.by.number]
                return 0.0 if costs is None else costs.up
        return 0.0

    def _held(self, item: ChainItem) -> int:
        """Bytes of an item between its forward and its backward."""
        if isinstance(item, PassedBlocks):
            return self._costs[item.last + 1].entering
        return self._costs[item.block].saved if item.way is None else item.way.held

    def _kept(self, items: Sequence[ChainItem]) -> int:
        return sum(map(self._held, items))

    def _peak(self, items: Sequence[ChainItem], held: int = 0) -> int:
        """Bytes at most, with `held` bytes beside; as the recursion of `rotor` has them."""
        most = held
        for item in items:
            if isinstance(item, PassedBlocks):
                inputs = [self._costs[n].entering if n > item.first else 0 for n in range(item.first, item.last + 2)]
                most = max(most, held + max(before + after for before, after in pairwise(inputs)))
                most = max(most, self._peak(item.again, held))
            else:
                cost = self._costs[item.block]
                most = max(most, held + (cost.saved + cost.temporary if item.way is None else item.way.peak))
            held += self._held(item)
            most = max(most, held)
        return most

    def _again(self, items: Sequence[ChainItem], first: bool = False) -> float:
        """Seconds of what is computed beside the forward."""
        seconds = 0.0
        for item in items:
            if isinstance(item, PassedBlocks):
                passed = self._costs[item.first : item.last + 1]
                seconds += self._again(item.again) + sum(cost.restart for cost in passed)
                seconds += 0.0 if first else sum(cost.forward for cost in passed)
            elif item.way is not None:
                seconds += item.way.seconds - self._costs[item.block].forward
            elif not first:
                seconds += self._costs[item.block].forward
        return seconds


def _kind(block: BlockMeasures) -> Any:
    """What the ways to keep a block in part depend on."""
    sizes = block.saved, block.leaving, block.sums, block.copied
    return *sizes, block.operations, block.tails, block.remade


def one_at_a_time(count: int) -> tuple[ChainItem, ...]:
    """Each block computed anew from the first input."""
    items: tuple[ChainItem, ...] = (SavedBlock(0),) if count else ()
    for last in range(1, count):
        items = (PassedBlocks(0, last - 1, items), SavedBlock(last))
    return items
