import math
import random
import re
import xml.etree.ElementTree as ET
from fractions import Fraction
from itertools import pairwise

import pytest

from zeroshard.report.chart import (
    NARROW,
    WIDE,
    Canvas,
    band_path,
    bytes_axis,
    covering_axis,
    crosses_path,
    dots_path,
    fitted_axis,
    line_path,
    nice_ticks,
    running_mean,
    smoothing_radius,
    thin,
)


def _numbers(words: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", words)]


def test_a_canvas_is_an_image_with_an_escaped_title() -> None:
    canvas = Canvas(WIDE, "a < b & c")
    canvas.text((1, 2), "<script>", "tick")
    markup = str(canvas.to_markup())
    root = ET.fromstring(markup)
    assert root.get("role") == "img"
    assert root[0].tag == "title"
    assert root[0].text == "a < b & c"
    assert "<script>" not in markup


def test_axes_label_every_tick_inside_the_drawing() -> None:
    x, y = fitted_axis("step", 1, 600, NARROW.x_ticks), covering_axis("loss", 2, 8)
    canvas = Canvas(NARROW, "axes")
    canvas.axes(x, y)
    texts = {text.text: text for text in canvas.root.iter("text")}
    assert {label for _, label in (*x.ticks, *y.ticks)} | {"step", "loss"} == set(texts)
    assert all(0 <= float(text.get("x", "-1")) <= NARROW.width for text in texts.values())
    assert all(0 <= float(text.get("y", "-1")) <= NARROW.height for text in texts.values())


def test_lines_and_dots() -> None:
    assert line_path([(0, 1), (2.04, 3.06)]) == "M0 1L2 3.1"
    assert line_path([(4, 5)]) == dots_path([(4, 5)]) == "M4 5h0"
    assert line_path([]) == ""
    assert crosses_path([(10, 10)]) == "M7 7l6 6m-6 0l6 -6"


def test_a_band_encloses_the_area_between_its_edges() -> None:
    # 10 wide and 4 high, then 20 wide and 7 high
    path = band_path([0, 10, 30], lower=[100, 90], upper=[96, 83])
    x, y = _numbers(path.split("V")[0])
    area = 0.0
    for command, value in re.findall(r"([VH])([\d.]+)", path):
        if command == "V":
            y = float(value)
        else:
            area += (float(value) - x) * -y
            x = float(value)
    assert area == 10 * 4 + 20 * 7


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
