"""The heat map of experts over the steps, and its table."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from zeroshard.report import write_report
from zeroshard.report.experts_figure import BOUNDS, LEGEND, experts_figure
from zeroshard.report.run_folder import ExpertLoad, TrainingPoint, read_run
from zeroshard.report.tables import experts_table

from .run_files import summary, training_line, write_run


def _point(step: int, **layers: ExpertLoad) -> TrainingPoint:
    return TrainingPoint(step, 2.0, 1.0, 100.0, step, 1.0, False, loads=layers)


def _styles(drawing: str) -> list[str]:
    return [rect.attrib["class"] for rect in ET.fromstring(drawing).iter("rect")]


def test_each_expert_and_run_of_steps_has_the_colour_of_its_share() -> None:
    loads = (0.0, 10.0, 10.0, 60.0)  # of a mean of 20
    figure = experts_figure([_point(1, a=ExpertLoad(loads, 0.25, 1.0)), _point(2, a=ExpertLoad((20.0,) * 4, 0.0, 1.0))])
    assert figure is not None
    for drawing in figure.drawings:
        assert _styles(drawing) == ["heat0", "heat3", "heat3", "heat6", *["heat4"] * 4]
    assert figure.readouts == ((0.0, "step 1\na: most 3.00, least 0.00 of the mean"),
                               (0.5, "step 2\na: most 1.00, least 1.00 of the mean"))  # fmt: skip
    assert len(LEGEND) == len(BOUNDS) + 1 == len(figure.legend)


def test_many_steps_are_drawn_as_means_of_runs() -> None:
    points = [_point(n, a=ExpertLoad((2.0, 0.0) if n % 4 < 2 else (0.0, 2.0), 0.0, 0.5)) for n in range(640)]
    figure = experts_figure(points)
    assert figure is not None and len(figure.readouts) == 160
    assert set(_styles(figure.drawings[0])) == {"heat4"}  # each run of four steps is balanced


def test_table_has_means_over_the_last_tenth() -> None:
    first = [_point(n, a=ExpertLoad((9.0, 0.0, 0.0), 0.5, 2.0)) for n in range(1, 19)]
    last = [_point(19, a=ExpertLoad((2.0, 1.0, 0.0), 0.1, 1.0)), _point(20, a=ExpertLoad((1.0, 2.0, 0.0), 0.3, 0.5))]
    table = experts_table([*first, *last])
    assert table is not None
    assert [cell.text for cell in table.rows[0].cells] == ["2.00", "0.00", "1 of 3", "20.00 %", "0.750"]
    assert "steps 19 to 20" in table.note


def test_runs_without_experts_have_neither() -> None:
    assert experts_figure([_point(1)]) is None and experts_table([_point(1)]) is None


def test_page_shows_loads_of_the_metrics_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    good: dict[str, Any] = {"load": [3, 1], "dropped": 0.0, "entropy": 0.6}
    layers = [{"blocks.1.mlp": good}, {"blocks.1.mlp": {"load": ["x", 1]}}, {"blocks.1.mlp": {"load": None}}, {}]
    lines = [training_line(step, 2.0, experts=each) for step, each in enumerate(layers, 1)]
    run = write_run(tmp_path, lines, summary())
    read = read_run(run).training
    assert [point.loads for point in read] == [{"blocks.1.mlp": ExpertLoad((3.0, 1.0), 0.0, 0.6)}, {}, {}, {}]
    html = write_report(run).read_text()
    assert "<h2>Experts</h2>" in html and "blocks.1.mlp" in html and "1.50" in html
    assert json.dumps("step 1\nblocks.1.mlp: most 1.50, least 0.50 of the mean")[1:-1] in html
