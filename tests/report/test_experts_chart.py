"""The charts of experts over the steps, and their table."""

from pathlib import Path
from typing import Any

from zeroshard.report import write_report
from zeroshard.report.experts_chart import BOUNDS, balance_charts, heat_chart
from zeroshard.report.run_folder import read_run
from zeroshard.report.run_records import ExpertLoad, TrainingPoint
from zeroshard.report.tables import experts_table

from .run_files import summary, training_line, write_run


def _point(step: int, **layers: ExpertLoad) -> TrainingPoint:
    return TrainingPoint(step, 2.0, 1.0, 100.0, step, 1.0, False, loads=layers)


def test_each_expert_and_column_has_the_colour_of_its_share() -> None:
    loads = (0.0, 10.0, 10.0, 60.0)  # of a mean of 20
    chart = heat_chart([_point(1, a=ExpertLoad(loads, 0.25, 1.0)), _point(2, a=ExpertLoad((20.0,) * 4, 0.0, 1.0))])
    assert chart is not None and chart.shaded
    (heat,) = chart.traces
    assert heat["marker"]["color"] == [0, 3, 3, 6, 4, 4, 4, 4]
    assert [row[:2] for row in heat["customdata"]] == [[step, expert] for step in (1, 2) for expert in range(4)]
    assert [row[2] for row in heat["customdata"]] == [0, 0.5, 0.5, 3, 1, 1, 1, 1]
    assert (heat["base"][:4], heat["x"][0], heat["width"]) == ([-0.5, 0.5, 1.5, 2.5], 1.5, 1.0)
    assert heat["marker"]["cmax"] - heat["marker"]["cmin"] == len(BOUNDS) + 1


def test_a_menu_chooses_among_layers() -> None:
    chart = heat_chart([_point(1, a=ExpertLoad((1.0, 1.0), 0.0, 1.0), b=ExpertLoad((1.0, 2.0), 0.0, 1.0))])
    assert chart is not None and [trace["visible"] for trace in chart.traces] == [True, False]
    assert chart.choices == ("a", "b")


def test_the_balance_has_the_fullest_and_the_emptiest_and_the_dropped() -> None:
    points = [_point(n, a=ExpertLoad((3.0, 1.0), drop, 1.0)) for n, drop in ((1, 0.0), (2, 0.25))]
    loads, dropped = balance_charts(points)
    assert [(trace["name"], trace["y"], trace["line"]["color"]) for trace in loads.traces] == [
        ("a", [1.5, 1.5], "var(--hue0)"), ("a", [0.5, 0.5], "var(--hue0)"),
    ]  # fmt: skip
    assert dropped.traces[0]["y"] == [0, 0.25]
    assert len(balance_charts(points[:1])) == 1  # nothing was dropped


def test_many_steps_are_drawn_as_means_of_runs() -> None:
    points = [_point(n, a=ExpertLoad((2.0, 0.0) if n % 4 < 2 else (0.0, 2.0), 0.0, 0.5)) for n in range(640)]
    chart = heat_chart(points)
    assert chart is not None and len(chart.traces[0]["x"]) == 2 * 80
    assert {*chart.traces[0]["marker"]["color"]} == {4}  # each run of eight steps is balanced


def test_table_has_means_over_the_last_tenth() -> None:
    first = [_point(n, a=ExpertLoad((9.0, 0.0, 0.0), 0.5, 2.0)) for n in range(1, 19)]
    last = [_point(19, a=ExpertLoad((2.0, 1.0, 0.0), 0.1, 1.0)), _point(20, a=ExpertLoad((1.0, 2.0, 0.0), 0.3, 0.5))]
    table = experts_table([*first, *last])
    assert table is not None
    assert [cell.text for cell in table.rows[0].cells] == ["2.00", "0.00", "1 of 3", "20.00 %", "0.750"]
    assert "steps 19 to 20" in table.note


def test_runs_without_experts_have_neither() -> None:
    assert heat_chart([_point(1)]) is None and balance_charts([_point(1)]) == [] and experts_table([_point(1)]) is None


def test_page_shows_loads_of_the_metrics_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    good: dict[str, Any] = {"load": [3, 1], "dropped": 0.0, "entropy": 0.6}
    layers = [{"blocks.1.mlp": good}, {"blocks.1.mlp": {"load": ["x", 1]}}, {"blocks.1.mlp": {"load": None}}, {}]
    lines = [training_line(step, 2.0, experts=each) for step, each in enumerate(layers, 1)]
    run = write_run(tmp_path, lines, summary())
    read = read_run(run).training
    assert [point.loads for point in read] == [{"blocks.1.mlp": ExpertLoad((3.0, 1.0), 0.0, 0.6)}, {}, {}, {}]
    html = write_report(run).read_text()
    assert "<h2>Experts</h2>" in html and "blocks.1.mlp" in html and "1.50" in html
    assert "[1, 0, 1.5]" in html and "[1, 1, 0.5]" in html
