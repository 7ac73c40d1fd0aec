import math
import random

import pytest

from zeroshard.report.chart import (
    HUES,
    area,
    byte_unit,
    colour,
    dash,
    line,
    number,
    running_mean,
    smoothing_radius,
    thin,
    time_unit,
)

Point = tuple[float, float]


def test_numbers_are_those_that_json_holds() -> None:
    assert [number(n) for n in (math.nan, math.inf, -math.inf)] == [None] * 3
    assert (number(3.0), number(1 / 3), number(2.0**40)) == (3, 0.333333, 2**40)
    assert type(number(3.0)) is int


def test_a_line_of_one_point_is_a_dot() -> None:
    assert line("a", [1.0], [2.0], "var(--ink)")["mode"] == "markers"
    drawn = line("a", [1.0, 2.0], [2.0, math.nan], "var(--ink)", width=3, dash="dot", visible="legendonly")
    assert (drawn["mode"], drawn["y"], drawn["visible"]) == ("lines", [2, None], "legendonly")
    assert drawn["line"] == {"color": "var(--ink)", "width": 3, "dash": "dot"}


def test_areas_are_stacked_steps() -> None:
    drawn = area("a", [0.0, 1.0], [2.0, 3.0], colour(1))
    assert (drawn["stackgroup"], drawn["line"]["shape"], drawn["fillcolor"]) == ("one", "hv", "var(--hue1)")


def test_lines_beyond_the_colours_differ_in_their_dashes() -> None:
    kinds = {(colour(i), dash(i)) for i in range(4 * HUES)}
    assert len(kinds) == 4 * HUES


@pytest.mark.parametrize(
    ("nbytes", "unit"),
    [(0, (1, "B")), (1023, (1, "B")), (1024, (1024, "KiB")), (5 * 2**20, (2**20, "MiB")), (2**45, (2**30, "GiB"))],
)
def test_units_of_bytes_are_those_of_the_largest(nbytes: float, unit: tuple[float, str]) -> None:
    assert byte_unit(nbytes) == unit


def test_units_of_times_are_those_of_the_largest() -> None:
    assert [time_unit(n)[1] for n in (3.0, 0.5, 1e-4)] == ["s", "ms", "µs"]


def _thin(points: list[Point], buckets: int) -> list[Point]:
    return thin(points, lambda p: p[0], lambda p: p[1], (points[0][0], points[-1][0]), buckets)


def _noise(count: int) -> list[Point]:
    source = random.Random(5)
    return [(float(step), source.gauss(0, 1)) for step in range(1, count + 1)]


def test_few_points_are_all_kept() -> None:
    points = _noise(50)
    assert _thin(points, 50) == points


def test_every_bucket_keeps_its_ends_and_extremes() -> None:
    points = _noise(10_000)
    kept = set(_thin(points, 10))
    for bucket in range(10):
        # steps 1..10000 in ten equal parts of [1, 10000]
        members = [p for p in points if min(int((p[0] - 1) * 10 / 9999), 9) == bucket]
        by_value = sorted(members, key=lambda p: p[1])
        assert {members[0], members[-1], by_value[0], by_value[-1]} <= kept


def test_thinning_keeps_order_and_bounds_the_count() -> None:
    kept = _thin(_noise(10_000), 100)
    assert kept == sorted(kept)
    assert len(kept) <= 4 * 100


def test_a_single_spike_survives() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    assert (54_321.0, 99.0) in _thin(points, 500)


def test_the_running_mean_of_a_straight_line_is_the_line_until_its_window_is_cut() -> None:
    values = [3.0 * i + 2 for i in range(101)]
    means = dict(running_mean(values, 4, 101))
    assert len(means) == 101
    assert all(means[i] == pytest.approx(values[i]) for i in range(97))
    assert means[100] == pytest.approx(sum(values[96:]) / 5)


def test_the_running_mean_is_evaluated_at_no_more_points_than_asked() -> None:
    means = running_mean([1.0] * 5000, 10, 300)
    assert len(means) == 300
    assert (means[0][0], means[-1][0]) == (0, 4999)
    assert {mean for _, mean in means} == {1.0}


def test_a_spike_does_not_spoil_the_means_after_it() -> None:
    means = dict(running_mean([1e300] + [1.0] * 99, 3, 100))
    assert means[50] == 1.0


def test_the_smoothing_radius_grows_with_the_run() -> None:
    assert smoothing_radius(20) == 2
    assert smoothing_radius(600) == 10
