"""The chart of all plans: a point for each, told apart by shape, on scales that suit the range."""

from dataclasses import replace

from zeroshard.report.chart import Chart, Trace
from zeroshard.report.plans_chart import PlanPoint, plans_chart

GIB = 2**30
POINTS = [
    PlanPoint("plan-1", "Plan 1", "fits", 0.5, 10 * GIB),
    PlanPoint("plan-2", "Plan 2", "changed", 1.0, 12 * GIB),
    PlanPoint("plan-3", "Plan 3", "unfit", 0.25, 24 * GIB),
]


def _traces(chart: Chart) -> dict[str, Trace]:
    return {trace["name"]: trace for trace in chart.traces}


def test_points_lie_at_their_numbers_and_lead_to_their_plans() -> None:
    chart = plans_chart(POINTS, 20.0 * GIB, None)
    kinds = list(_traces(chart).values())
    assert [(k["x"], k["y"], k["customdata"]) for k in kinds] == [
        ([500], [10], ["plan-1"]), ([1000], [12], ["plan-2"]), ([250], [24], ["plan-3"]),
    ]  # fmt: skip
    assert kinds[1]["text"] == ["Plan 2<br>12.00 GiB, 1.00 s per step"]
    assert chart.layout["shapes"][0]["y0"] == 20
    assert "20.00 GiB" in chart.caption


def test_shapes_tell_points_apart_and_a_ring_marks_the_recommended() -> None:
    traces = _traces(plans_chart(POINTS, 20.0 * GIB, "plan-1"))
    assert len({trace["marker"]["symbol"] for trace in traces.values()}) == 4
    ring = traces["recommended: plan 1"]
    assert (ring["x"], ring["y"]) == ([500], [10])
    assert "recommended: plan 1" not in _traces(plans_chart(POINTS, 20.0 * GIB, None))


def test_a_wide_range_is_logarithmic() -> None:
    near = plans_chart(POINTS, 20.0 * GIB, None).layout
    assert "type" not in near["xaxis"] and near["yaxis"]["rangemode"] == "tozero"
    far = plans_chart([*POINTS, replace(POINTS[0], target="plan-4", seconds=64.0)], 20.0 * GIB, None).layout
    assert plans_chart([replace(POINTS[0], peak_bytes=GIB)], 20.0 * GIB, None).begins_logarithmic
    assert far["xaxis"]["type"] == "log" and "type" not in far["yaxis"]
    shown = dict(zip(far["xaxis"]["tickvals"], far["xaxis"]["ticktext"], strict=True))
    assert {0.2: "0.2", 1: "1", 50: "50"}.items() <= shown.items()


def test_near_times_are_drawn_apart() -> None:
    near = [replace(POINTS[0], target=f"plan-{n}", seconds=0.004 + n * 1e-5) for n in range(1, 5)]
    assert "rangemode" not in plans_chart(near, 20.0 * GIB, None).layout["xaxis"]
