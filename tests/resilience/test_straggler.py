"""F10: a slow rank is told soon and once, and noise is never taken for one."""

import random

import pytest

from zeroshard.resilience.straggler import Straggler, Stragglers

BASE = 0.1  # seconds


def noisy(draw: random.Random) -> float:
    """Seconds of a step: spread by half, and every twentieth up to a hundred times as long."""
    value = BASE * draw.lognormvariate(0, 0.4)
    return value * draw.paretovariate(1.0) if draw.random() < 0.05 else value


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_no_false_alarm_in_500_noisy_steps(ranks: int, seed: int) -> None:
    draw, watch = random.Random(seed), Stragglers(ranks)
    steps = [[noisy(draw) for _ in range(ranks)] for _ in range(500)]
    assert max(map(max, steps)) > 10 * BASE
    assert [watch.step(seconds) for seconds in steps] == [[]] * 500


@pytest.mark.parametrize("begin", [0, 100])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_three_times_as_slow_is_told_within_20_steps_and_once(ranks: int, seed: int, begin: int) -> None:
    draw, watch, slow = random.Random(seed), Stragglers(ranks), seed % ranks
    found: list[tuple[int, Straggler]] = []
    for step in range(begin + 200):
        seconds = [noisy(draw) * (3 if rank == slow and step >= begin else 1) for rank in range(ranks)]
        found += [(step, straggler) for straggler in watch.step(seconds)]
    ((step, straggler),) = found
    assert begin <= step < begin + 20
    assert straggler.rank == slow and watch.slow == [slow]
    assert straggler.seconds > 2 * straggler.others > 0


def test_it_is_told_again_only_after_it_recovered() -> None:
    watch = Stragglers(3)
    told = []
    for step in range(200):
        slow = 0.25 if step < 50 else 0.17 if step < 100 else 0.1 if step < 150 else 0.25
        told += [(step, s.rank) for s in watch.step([0.1, 0.1, slow])]
    assert [rank for _, rank in told] == [2, 2]
    assert told[0][0] == 14 and 150 < told[1][0] < 170


def test_small_differences_do_not_count_however_large_the_ratio() -> None:
    watch = Stragglers(2)
    assert not any(watch.step([0.001, 0.02]) for _ in range(50))
    watch = Stragglers(2, least_seconds=0.01)
    assert str(next(s for _ in range(50) for s in watch.step([0.001, 0.02]))) == (
        "rank 1 is slow: it is busy for 0.02 s a step, the other ranks for 0.001 s"
    )


def test_a_rank_alone_is_never_slow_and_lists_must_fit() -> None:
    assert not any(Stragglers(1).step([float(n)]) for n in range(50))
    with pytest.raises(ValueError, match="shorter"):
        Stragglers(2).step([1.0])
