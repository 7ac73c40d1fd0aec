import random

import pytest

from zeroshard.report.series import running_mean, smoothing_radius, thin

Point = tuple[float, float]


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
