"""The cut into parts, against every cut there is."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.pipeline.partition.balance import balance

TIMES = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def parts_of(times: list[int], firsts: list[int]) -> list[list[int]]:
    return [times[first:last] for first, last in pairwise([*firsts, len(times)])]


def cost(times: list[int], firsts: list[int]) -> tuple[int, int]:
    sums = [sum(part) for part in parts_of(times, firsts)]
    return max(sums), sum(s * s for s in sums)


@settings(derandomize=True, deadline=None)
@given(TIMES, st.integers(1, 5), st.integers(1, 3))
def test_no_cut_is_better(times: list[int], parts: int, least: int) -> None:
    cuts = [
        [0, *inner]
        for inner in combinations(range(1, len(times)), parts - 1)
        if all(len(part) >= least for part in parts_of(times, [0, *inner]))
    ]
    if not cuts:
        with pytest.raises(PlanError, match=f"{len(times)} layers do not make {parts} parts"):
            balance(times, parts, least)
        return
    firsts = balance(times, parts, least)
    assert firsts in cuts
    assert cost(times, firsts) == min(cost(times, cut) for cut in cuts)


def test_what_the_slowest_part_leaves_open_is_spread_evenly() -> None:
    assert balance([10, 1, 1, 1, 1], 3) == [0, 1, 3]
    assert balance([1] * 8, 4) == [0, 2, 4, 6]


def test_layers_that_take_no_time() -> None:
    assert len(balance([0.0] * 5, 3)) == 3
    assert balance([0.0, 0.0, 0.1], 1) == [0]


def test_the_slowest_part_is_found_among_fractions_that_do_not_add_up() -> None:
    times = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3]
    assert balance(times, 2) == [0, 3]


@pytest.mark.parametrize(
    "times, parts, least, words",
    [
        ([1.0, 2.0], 3, 1, "at most 2 parts"),
        ([1.0] * 5, 3, 2, "at most 2 parts"),
        ([1.0], 0, 1, "into 0 parts"),
        ([1.0], 1, 0, "of 0 or more"),
        ([1.0, -2.0], 1, 1, "Layer 1 takes -2"),
        ([1.0, float("nan")], 1, 1, "Layer 1 takes nan"),
        ([float("inf")], 1, 1, "Layer 0 takes inf"),
    ],
)
def test_what_cannot_be_cut_is_refused(times: list[float], parts: int, least: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        balance(times, parts, least)
