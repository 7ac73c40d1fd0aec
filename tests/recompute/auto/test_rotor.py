"""The cheapest backward of a chain: beside all orders there are, for small chains."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from torch._subclasses import FakeTensorMode

from zeroshard.errors import PlanError
from zeroshard.recompute.auto.rotor import (
    BlockCosts,
    ChainItem,
    ChainStep,
    OrderTable,
    OtherWay,
    PassedBlocks,
    SavedBlock,
    cheapest,
    least,
)

Operations = tuple[tuple[ChainStep, int], ...]


def orders(s: int, t: int) -> Iterator[Operations]:
    """All orders of blocks s to t in which what is kept stays until its backward has used it."""
    if s == t:
        yield (ChainStep.SAVE, s), (ChainStep.BACKWARD, s)
        return
    for rest in orders(s + 1, t):
        yield (ChainStep.SAVE, s), *rest, (ChainStep.BACKWARD, s)
    for r in range(s + 1, t + 1):
        ahead = [(ChainStep.KEEP_INPUT, s), *((ChainStep.PASS, block) for block in range(s + 1, r))]
        for late, early in itertools.product(orders(r, t), orders(s, r - 1)):
            yield *ahead, *late, *early


def run(blocks: Sequence[BlockCosts], operations: Operations) -> tuple[float, int]:
    """Seconds and the highest bytes of an order, by carrying it out: what is held is a set of inputs and graphs."""
    inputs, graphs, seconds, peak = {0}, set[int](), 0.0, 0
    made: set[int] = {0}  # inputs that are there, in graphs or by themselves

    def held() -> int:
        alone = sum(blocks[n].entering for n in inputs if n and n - 1 not in graphs)
        return alone + sum(blocks[n].saved for n in graphs)

    for way, n in operations:
        block = blocks[n]
        assert n in made or n - 1 in graphs, "its input is gone"
        if way is ChainStep.BACKWARD:
            peak = max(peak, held() + block.temporary)
            graphs.remove(n)
            inputs.discard(n)
            made = inputs | {0}
            seconds += block.backward
            continue
        seconds += block.forward
        if way is ChainStep.SAVE:
            graphs.add(n)
        elif n + 1 < len(blocks):
            inputs.add(n + 1)
        peak = max(peak, held())
        if way is ChainStep.PASS and n - 1 not in graphs:
            inputs.discard(n)
        made = inputs | {0}
    assert not graphs
    return seconds, peak


def chain(seed: int, count: int) -> list[BlockCosts]:
    draw = random.Random(seed)
    inputs = [draw.randint(1, 6) for _ in range(count + 1)]
    return [
        BlockCosts(draw.randint(1, 9), draw.randint(1, 19), entering, leaving + draw.randint(0, 9), draw.randint(0, 4))
        for entering, leaving in itertools.pairwise(inputs)
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_optimum_is_that_of_all_orders(count: int, seed: int) -> None:
    blocks = chain(seed, count)
    known = [run(blocks, order) for order in orders(0, count - 1)]
    fewest = min(peak for _, peak in known)
    assert least(blocks) == fewest
    for budget in range(fewest, max(peak for _, peak in known) + 2):
        found = cheapest(blocks, budget)
        seconds, peak = run(blocks, found.operations)
        assert peak <= budget and seconds == found.seconds
        assert seconds == min(total for total, highest in known if highest <= budget)
    with pytest.raises(PlanError, match=rf"too small for the activations.*needs {fewest}, .*Raise device_memory"):
        cheapest(blocks, fewest - 1)


def test_with_enough_memory_nothing_is_computed_again_and_with_little_much_is() -> None:
    blocks = [BlockCosts(1, 2, 10, 100) for _ in range(16)]
    assert cheapest(blocks, 10_000).seconds == 48
    tight = cheapest(blocks, least(blocks))
    assert tight.seconds == 16 * 2 + 16 * 17 / 2  # each block from the first input anew
    half = cheapest(blocks, 16 * 50)
    assert 48 < half.seconds < 64  # less than one extra forward


@pytest.mark.parametrize("sizes", [10, 50, 500])
def test_rounding_keeps_within_the_budget(sizes: int) -> None:
    blocks = [BlockCosts(1 + n % 3, 2 + n % 2, 1000 + 37 * n, 9000 + 111 * n) for n in range(24)]
    times = []
    for budget in (60_000, 100_000, 200_000):
        found = cheapest(blocks, budget, sizes)
        seconds, peak = run(blocks, found.operations)
        assert peak <= budget and seconds == pytest.approx(found.seconds)
        times.append(seconds)
    assert times == sorted(times, reverse=True)


def test_a_rehearsal_finds_the_order_of_the_run() -> None:
    """A rehearsal's tensors have no values, and neither had tables that were made of them."""
    blocks = chain(3, 12)
    budget = (least(blocks) + sum(block.saved for block in blocks)) // 2
    with FakeTensorMode():
        rehearsed = cheapest(blocks, budget)
    assert rehearsed == cheapest(blocks, budget)


@pytest.mark.whole
def test_two_hundred_blocks_are_planned() -> None:
    blocks = [BlockCosts(1, 2, 10, 100) for _ in range(200)]
    found = cheapest(blocks, 3000)
    assert len([1 for way, _ in found.operations if way is ChainStep.BACKWARD]) == 200
    assert 600 < found.seconds < 1000


def chain_of_ways(seed: int, count: int) -> list[BlockCosts]:
    """Blocks with two other ways each to keep them."""
    draw, blocks = random.Random(seed), chain(seed, count)
    leaving = [*(block.entering for block in blocks[1:]), 1]
    return [
        replace(
            block,
            ways=tuple(
                OtherWay(held, max(held, block.saved + draw.randint(0, 2)), block.forward + block.backward + extra)
                for held, extra in ((out + draw.randint(0, 3), draw.randint(1, 5)), (out + 4, draw.randint(0, 2)))
            ),
        )
        for block, out in zip(blocks, leaving, strict=True)
    ]


def trees(blocks: Sequence[BlockCosts], s: int, t: int, first: bool) -> Iterator[tuple[ChainItem, ...]]:
    """Everything that can be done with blocks s to t; in the `first` forward they may be kept in other ways."""
    if s > t:
        yield ()
        return
    for way in (None, *(blocks[s].ways if first else ())):
        yield from ((SavedBlock(s, way), *rest) for rest in trees(blocks, s + 1, t, first))
    for r in range(s + 1, t + 1):
        for late, early in itertools.product(trees(blocks, r, t, first), trees(blocks, s, r - 1, False)):
            yield PassedBlocks(s, r - 1, early), *late


def costs(blocks: Sequence[BlockCosts], items: Sequence[ChainItem], held: int = 0) -> tuple[float, int]:
    """Seconds and the most bytes of what is done, with `held` bytes beside it."""
    seconds, peak, later = 0.0, held, list[tuple[Sequence[ChainItem], int]]()
    for item in items:
        if isinstance(item, SavedBlock):
            block, way = blocks[item.block], item.way
            seconds += block.forward + block.backward if way is None else way.seconds
            peak = max(peak, held + (block.saved + block.temporary if way is None else way.peak))
            held += block.saved if way is None else way.held
            continue
        later.append((item.again, held))
        inputs = [0, *(blocks[n].entering for n in range(item.first + 1, item.last + 2) if n < len(blocks))]
        peak = max(peak, held + max(map(sum, itertools.pairwise(inputs)), default=0))
        seconds += sum(blocks[n].forward for n in range(item.first, item.last + 1))
        held += inputs[-1]
    for again, beside in later:
        more, most = costs(blocks, again, beside)
        seconds, peak = seconds + more, max(peak, most)
    return seconds, peak


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_other_ways_to_keep_a_block_enter_the_optimum(count: int, seed: int) -> None:
    blocks = chain_of_ways(seed, count)
    known = [(costs(blocks, items), items) for items in trees(blocks, 0, count - 1, True)]
    fewest = min(peak for (_, peak), _ in known)
    for budget in range(fewest, max(peak for (_, peak), _ in known) + 1):
        found = cheapest(blocks, budget)
        seconds, peak = costs(blocks, found.items)
        assert peak <= budget and seconds == found.seconds
        assert seconds == min(total for (total, highest), _ in known if highest <= budget)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_are_computed_again_one_by_one(seed: int) -> None:
    blocks = chain_of_ways(seed, 4)
    known = [
        costs(blocks, items)
        for items in trees(blocks, 0, 3, True)
        if all(isinstance(item, SavedBlock) or item.first == item.last for item in items)
    ]
    fewest = min(peak for _, peak in known)
    for budget in range(fewest, max(peak for _, peak in known) + 1):
        table = OrderTable(blocks, budget, alone=True)
        found = table.order(table.steps)
        assert found is not None
        assert costs(blocks, found.items)[0] == min(total for total, highest in known if highest <= budget)
