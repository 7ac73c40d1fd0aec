import json
import math
from pathlib import Path

from zeroshard.report.chart import Chart, Trace
from zeroshard.report.run_charts import course_charts, exposed_chart, loss_chart, ranks_charts, traffic_chart
from zeroshard.report.run_folder import read_run
from zeroshard.report.run_records import TrafficRecord, TrainingPoint

from .run_files import training_line, validation_line, write_run


def _by_name(chart: Chart | None) -> dict[str, Trace]:
    assert chart is not None
    return {trace["name"]: trace for trace in chart.traces}


def test_losses_that_are_not_finite_are_marked_and_leave_no_line(tmp_path: Path) -> None:
    lines = [training_line(step, math.nan if step in (3, 4) else 4.0) for step in range(1, 31)]
    chart = loss_chart(read_run(write_run(tmp_path, [*lines, validation_line(30, math.inf)])))
    traces = _by_name(chart)
    assert list(traces) == ["training, each step", "training, mean of ±2 steps", "loss not finite (2 steps)"]
    assert len(traces["training, each step"]["x"]) == 28
    assert traces["loss not finite (2 steps)"]["x"] == [3, 4]
    assert "NaN" not in json.dumps(chart.as_json() if chart else None)


def test_a_run_without_one_finite_loss_has_no_curve(tmp_path: Path) -> None:
    assert loss_chart(read_run(write_run(tmp_path, [training_line(1, math.nan)]))) is None


def test_the_loss_chart_tells_training_and_validation(tmp_path: Path) -> None:
    lines = [training_line(1, 8.0), training_line(2, 7.0), validation_line(1, 8.5), validation_line(2, 7.25)]
    chart = loss_chart(read_run(write_run(tmp_path, lines)))
    traces = _by_name(chart)
    assert (traces["training, each step"]["y"], traces["validation"]["y"]) == ([8, 7], [8.5, 7.25])
    assert (
        chart is not None
        and chart.logarithmic
        and chart.caption
        == ("Training bits per byte from 8.000 at step 1 to 7.000 at step 2; lowest validation 7.250 at step 2.")
    )


def test_further_charts_are_those_with_numbers(tmp_path: Path) -> None:
    lines = [training_line(step, 4.0, learning_rate=step / 10, mfu=None) for step in (1, 2)]
    found = dict(course_charts(read_run(write_run(tmp_path, lines))))
    assert list(found) == ["Learning rate", "Gradient norm", "Speed"]
    assert found["Learning rate"].traces[0]["y"] == [0.1, 0.2]
    with_mfu = [training_line(step, 4.0, mfu=0.375) for step in (1, 2)]
    chart = dict(course_charts(read_run(write_run(tmp_path, with_mfu))))["MFU"]
    assert chart.traces[0]["y"] == [0.375, 0.375] and chart.layout["yaxis"]["tickformat"] == ".1%"


def test_every_rank_has_its_line(tmp_path: Path) -> None:
    each = [
        {"busy_seconds": [0.5, step / 10], "rss_bytes": [2**20, 3 * 2**20], "exposed_seconds": ["x", 1]}
        for step in (1, 2)
    ]
    lines = [training_line(step, 4.0, ranks=ranks) for step, ranks in enumerate(each, 1)]
    found = dict(ranks_charts(read_run(write_run(tmp_path, lines))))
    assert list(found) == ["Busy time of each rank", "Resident memory of each rank"]
    assert {t["name"]: t["y"] for t in found["Busy time of each rank"].traces} == {
        "rank 0": [500, 500],
        "rank 1": [100, 200],
    }
    assert found["Resident memory of each rank"].traces[1]["y"] == [3, 3]


def test_many_ranks_are_shown_by_their_quantiles(tmp_path: Path) -> None:
    lines = [training_line(1, 4.0, ranks={"quantiles": True, "busy_seconds": [3.0, 4.0, 9.0]})]
    ((_, chart),) = ranks_charts(read_run(write_run(tmp_path, lines)))
    assert [(trace["name"], trace["y"]) for trace in chart.traces] == [
        ("least", [3]),
        ("median", [4]),
        ("greatest", [9]),
    ]


def test_a_run_of_one_rank_has_no_charts_of_ranks(tmp_path: Path) -> None:
    assert ranks_charts(read_run(write_run(tmp_path, [training_line(1, 4.0)]))) == []


def test_bars_are_the_elements_of_formula_and_measurement() -> None:
    rows = (TrafficRecord("reduce", 1000, 500, 0, 1), TrafficRecord("agree", math.nan, 250, 0, 1))
    traces = _by_name(traffic_chart(rows))
    assert (traces["formula"]["x"], traces["measured"]["x"]) == ([1000, None], [500, 250])
    assert traces["formula"]["y"] == ["reduce", "agree"]
    assert traffic_chart((TrafficRecord("reduce", 0, 0, 0, 0),)) is None


def _points(exposed: list[dict[str, float]]) -> list[TrainingPoint]:
    return [TrainingPoint(step, 1.0, 1.0, 1.0, 1.0, 1.0, False, causes) for step, causes in enumerate(exposed, 1)]


def test_exposed_time_is_stacked_by_cause_in_a_fixed_order() -> None:
    points = _points([{"disk": 0.002, "novel": 0.001, "update": 0.003, "gradients down": 0.004}, {"update": 0.001}, {}])
    chart = exposed_chart(points)
    assert [(name, trace["y"]) for name, trace in _by_name(chart).items()] == [
        ("gradients down", [4, 0, 0]), ("update", [3, 1, 0]), ("disk", [2, 0, 0]), ("novel", [1, 0, 0]),
    ]  # fmt: skip
    assert chart is not None and chart.caption.endswith("at most 10.00 ms, in step 1.")
    assert len({trace["fillcolor"] for trace in chart.traces}) == 4
    assert exposed_chart(_points([{}, {"update": 0.0}])) is None


def test_a_thousand_steps_keep_the_longest() -> None:
    chart = exposed_chart(_points([{"update": 0.5 if step == 777 else 0.001} for step in range(1, 1001)]))
    update = _by_name(chart)["update"]
    assert update["y"][update["x"].index(777)] == 500
