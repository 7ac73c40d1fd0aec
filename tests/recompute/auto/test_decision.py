"""The ways to keep the blocks of a chain: beside all that there are, for small chains."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from torch._subclasses import FakeTensorMode

from zeroshard.recompute.auto.decision import PassChain, PassDecision, Rules, WayTable
from zeroshard.recompute.auto.meter import BlockMeasures, PassMeasures, SavedTail
from zeroshard.recompute.auto.ways import INPUT, WHOLE, BlockWay, KeptPart


def run(ways: Sequence[BlockWay], after: int) -> tuple[float, int]:
    """Seconds and the most bytes of a forward and its backward, by carrying them out."""
    held, stack = 0, []
    for way in ways:
        stack.append((held, way))
        held += way.held
    peak = held + after
    for before, way in reversed(stack):
        peak = max(peak, before + way.peak)
    return sum(way.seconds for way in ways), peak


def chain(seed: int, count: int) -> list[list[BlockWay]]:
    draw, found = random.Random(seed), []
    for _ in range(count):
        saved, leaving = draw.randint(6, 15), draw.randint(1, 4)
        held = draw.randint(leaving, saved)
        ways = [BlockWay(saved, saved + draw.randint(0, 3), 0.0, WHOLE)]
        ways.append(BlockWay(held, max(held, saved - draw.randint(0, 3)), draw.randint(1, 6), KeptPart(3)))
        found.append([*ways, BlockWay(leaving, saved + draw.randint(0, 3), draw.randint(4, 9), INPUT)])
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_fastest_of_all_ways_is_found(count: int, seed: int) -> None:
    ways, after = chain(seed, count), seed % 5
    known = [run(chosen, after) for chosen in itertools.product(*ways)]
    for budget in range(min(peak for _, peak in known) - 1, max(peak for _, peak in known) + 2):
        table = WayTable(ways, after, budget)
        found = table.fastest(table.steps)
        fitting = [seconds for seconds, peak in known if peak <= budget]
        assert (found is None) == (not fitting)
        if found is not None:
            seconds, peak = run(found, after)
            assert peak <= budget and seconds == min(fitting)


@pytest.mark.parametrize("sizes", [50, 100, 500])
def test_rounding_keeps_within_the_budget(sizes: int) -> None:
    ways = [
        [BlockWay(9000 + 9 * n, 9200 + 9 * n, 0.0, WHOLE), BlockWay(1000 + 37 * n, 9300 + 9 * n, 1 + n % 3, INPUT)]
        for n in range(24)
    ]
    times = []
    for budget in (100_000, 150_000, 200_000):
        table = WayTable(ways, 50, budget, sizes)
        found = table.fastest(table.steps)
        assert found is not None and run(found, 50)[1] <= budget
        times.append(run(found, 50)[0])
    assert times == sorted(times, reverse=True)


def blocks(seed: int, count: int) -> Iterator[BlockMeasures]:
    draw = random.Random(seed)
    for n in range(count):
        saved, leaving = draw.randint(2000, 4000), draw.randint(100, 300)
        tails = (SavedTail(5, saved // 4, draw.random(), 7),)
        seconds = 1 + draw.random()
        yield BlockMeasures(f"{n}", seconds, draw.randint(100, 300), saved, leaving, seconds, 9, tails=tails)


@pytest.mark.parametrize("forwards", [1, 3])
def test_decisions_keep_within_the_budget_of_all_forwards(forwards: int) -> None:
    measures = PassMeasures([*blocks(1, 12)], 500, 700)
    passes = PassChain(measures, Rules(False), forwards)
    highest = PassChain(measures, Rules(False), forwards).decide(10**9)
    assert highest is not None and all(way.part.whole for way in highest.ways) and highest.seconds == 0
    assert passes.decide(passes.least - 1) is None
    times = []
    for part in range(9):
        budget = passes.least + (total(highest, measures, forwards) - passes.least) * part // 8
        found = passes.decide(budget)
        assert found is not None and total(found, measures, forwards) <= budget
        times.append(found.seconds)
    assert times == sorted(times, reverse=True) and times[-1] == 0
    assert passes.least <= passes.enough


def total(decision: PassDecision, measures: PassMeasures, forwards: int) -> int:
    """Bytes of all forwards: all but one hold what they keep."""
    return forwards * measures.before + (forwards - 1) * (decision.kept + measures.after) + decision.peak


def test_a_rehearsal_decides_as_the_run() -> None:
    """A rehearsal's tensors have no values, and neither had tables that were made of them."""
    passes = PassChain(PassMeasures([*blocks(3, 12)], 0, 100), Rules(False))
    budget = passes.least * 2
    with FakeTensorMode():
        rehearsed = passes.decide(budget)
    assert rehearsed == passes.decide(budget)
