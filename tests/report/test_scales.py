import math
from fractions import Fraction
from itertools import pairwise

import pytest

from zeroshard.report.scales import bytes_axis, covering_axis, fitted_axis, nice_ticks

RANGES = [(0.0, 1.0), (1.97, 8.03), (0.0, 1e-7), (2.2101, 2.2109), (3.0, 3.0), (0.0, 0.0), (-4.0, 9.0), (1.0, 1e5)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_cover_the_range_without_a_spare_one(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low <= ticks[1]
    assert ticks[-1] >= high
    assert len(ticks) == 2 or ticks[-2] < high


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_are_round_multiples_of_one_two_or_five(low: float, high: float) -> None:
    ticks = [Fraction(repr(tick)) for tick in nice_ticks(low, high)]
    steps = {after - before for before, after in pairwise(ticks)}
    assert len(steps) == 1
    step = steps.pop()
    assert all((tick / step).denominator == 1 for tick in ticks)
    leading = step / Fraction(10) ** math.floor(math.log10(step))
    assert leading in (1, 2, 5)


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_there_are_neither_few_nor_many_ticks(low: float, high: float) -> None:
    assert 2 <= len(nice_ticks(low, high)) <= 9


def test_a_covering_axis_maps_its_ends_to_zero_and_one() -> None:
    axis = covering_axis("loss", 1.97, 8.03)
    assert (axis.fraction(axis.low), axis.fraction(axis.high)) == (0.0, 1.0)
    assert 0 < axis.fraction(1.97) < axis.fraction(8.03) < 1


def test_a_fitted_axis_ends_with_the_data_and_keeps_whole_steps_whole() -> None:
    axis = fitted_axis("step", 1, 4, whole=True)
    assert (axis.low, axis.high) == (1, 4)
    assert axis.ticks == ((1.0, "1"), (2.0, "2"), (3.0, "3"), (4.0, "4"))


def test_a_fitted_axis_of_one_step_still_has_a_width() -> None:
    axis = fitted_axis("step", 7, 7, whole=True)
    assert axis.fraction(7) == 0.5
    assert axis.ticks == ((7.0, "7"),)


def test_byte_ticks_are_round_in_their_unit() -> None:
    axis = bytes_axis("bytes", 165 * 2**20)
    assert [label for _, label in axis.ticks] == ["0 MiB", "50 MiB", "100 MiB", "150 MiB", "200 MiB"]
    assert [value for value, _ in axis.ticks] == [n * 2**20 for n in (0, 50, 100, 150, 200)]
    assert bytes_axis("bytes", 0).high == 1
