import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from zeroshard.report.loss_figure import loss_figure
from zeroshard.report.memory_figure import memory_figure
from zeroshard.report.run_folder import MemoryEvent, MemoryStep, TrafficRecord, TrainingPoint, read_run
from zeroshard.report.traffic_figure import exposed_figure, traffic_figure

from .run_files import training_line, validation_line, write_run

MIB = 2**20


def _step(totals: list[tuple[float, float, float]]) -> MemoryStep:
    events = tuple(MemoryEvent(i / 1000, f"event {i}", nbytes) for i, nbytes in enumerate(totals))
    return MemoryStep(0, ("parameters", "gradients", "activations"), events)


def _first_heights(path: str) -> tuple[float, float]:
    """Foot and top of a band in its first interval, in pixels."""
    found = re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)H", path)
    assert found is not None
    return float(found[1]), float(found[2])


def test_the_bands_stack_to_the_total() -> None:
    # the axis of 100 MiB ends at 100 MiB, so pixels are shares of the plot's height
    step = _step([(50 * MIB, 20 * MIB, 30 * MIB), (50 * MIB, 0, 0)])
    for drawing in memory_figure(step).drawings:
        root = ET.fromstring(str(drawing))
        bands = [_first_heights(path.get("d", "")) for path in root.iter("path")]
        axis_feet = [float(line.get("y1", "0")) for line in root.iter("line") if line.get("class") == "grid"]
        height = max(axis_feet) - min(axis_feet)
        assert [foot - top for foot, top in bands] == pytest.approx([0.5 * height, 0.2 * height, 0.3 * height], abs=0.1)
        assert [top for _, top in bands[:-1]] == [foot for foot, _ in bands[1:]]
        assert bands[0][0] == max(axis_feet)
        assert bands[-1][1] == min(axis_feet)


def test_the_memory_caption_names_the_peak_and_the_legend_each_category() -> None:
    figure = memory_figure(_step([(MIB, 0, 0), (MIB, 2 * MIB, 3 * MIB), (MIB, 0, 0)]))
    assert "peak 6.00 MiB at 1.00 ms (event 1)" in figure.caption
    assert [entry.text for entry in figure.legend] == [
        "activations, up to 3.00 MiB",
        "gradients, up to 2.00 MiB",
        "parameters, up to 1.00 MiB",
    ]


def test_the_largest_changes_are_numbered_in_order_of_time() -> None:
    heights = [0] * 100
    heights[10:40] = [5 * MIB] * 30
    heights[70:100] = [2 * MIB] * 30
    figure = memory_figure(_step([(MIB, height, 0) for height in heights]))
    assert figure.marked == (
        (1, "10.00 ms  event 10  +5.00 MiB"),
        (2, "40.00 ms  event 40  −5.00 MiB"),
        (3, "70.00 ms  event 70  +2.00 MiB"),
    )


def test_each_memory_readout_lists_the_event_and_all_categories() -> None:
    figure = memory_figure(_step([(MIB, 0, 0), (MIB, 2 * MIB, 0)]))
    place, text = figure.readouts[1]
    assert text.split("\n") == [
        "1.00 ms  event 1  +2.00 MiB",
        "total 3.00 MiB",
        "activations 0 B",
        "gradients 2.00 MiB",
        "parameters 1.00 MiB",
    ]
    assert place == pytest.approx(1 / 1.02, abs=1e-4)


def test_one_event_alone_is_drawn() -> None:
    figure = memory_figure(_step([(0, 0, 0)]))
    assert figure.marked == ()
    assert all(ET.fromstring(str(drawing)).findall("path") for drawing in figure.drawings)


def test_losses_that_are_not_finite_are_marked_and_not_drawn(tmp_path: Path) -> None:
    lines = [training_line(step, math.nan if step in (3, 4) else 4.0) for step in range(1, 31)]
    figure = loss_figure(read_run(write_run(tmp_path, [*lines, validation_line(30, math.inf)])))
    assert figure is not None
    assert [entry.text for entry in figure.legend][-1] == "loss not finite (2 steps)"
    for drawing in figure.drawings:
        paths = {path.get("class"): path.get("d", "") for path in ET.fromstring(str(drawing)).iter("path")}
        assert set(paths) == {"raw", "smooth", "lost"}
        assert paths["raw"].count("M") + paths["raw"].count("L") == 28
        assert "nan" not in str(drawing)
        assert "inf" not in str(drawing)
    assert (round(2 / 29, 5), "step 3\ntraining loss not finite") in figure.readouts


def test_a_run_without_one_finite_loss_has_no_curve(tmp_path: Path) -> None:
    assert loss_figure(read_run(write_run(tmp_path, [training_line(1, math.nan)]))) is None


def test_the_loss_caption_and_readouts_tell_training_and_validation(tmp_path: Path) -> None:
    lines = [training_line(1, 8.0), training_line(2, 7.0), validation_line(1, 8.5), validation_line(2, 7.25)]
    figure = loss_figure(read_run(write_run(tmp_path, lines)))
    assert figure is not None
    assert figure.caption == (
        "Training bits per byte from 8.000 at step 1 to 7.000 at step 2; lowest validation 7.250 at step 2."
    )
    assert figure.readouts == (
        (0.0, "step 1\ntraining 8.0000\nvalidation 8.5000"),
        (1.0, "step 2\ntraining 7.0000\nvalidation 7.2500"),
    )


def test_bars_are_as_long_as_their_elements() -> None:
    rows = (TrafficRecord("reduce", 1000, 500, 0, 1), TrafficRecord("agree", math.nan, 250, 0, 1))
    figure = traffic_figure(rows)
    assert figure is not None
    for drawing in figure.drawings:
        widths = [float(rect.get("width", "0")) for rect in ET.fromstring(str(drawing)).iter("rect")]
        assert widths == pytest.approx([widths[0], widths[0] / 2, 0, widths[0] / 4], abs=0.1)


def test_no_traffic_has_no_chart() -> None:
    assert traffic_figure((TrafficRecord("reduce", 0, 0, 0, 0),)) is None


def _points(exposed: list[dict[str, float]]) -> list[TrainingPoint]:
    return [TrainingPoint(step, 1.0, 1.0, 1.0, 1.0, 1.0, False, causes) for step, causes in enumerate(exposed, 1)]


def test_exposed_time_is_stacked_by_cause_in_a_fixed_order() -> None:
    # the axis of 10 ms ends at 10 ms, so pixels are shares of the plot's height
    points = _points([{"disk": 0.002, "novel": 0.001, "update": 0.003, "gradients down": 0.004}, {"update": 0.001}, {}])
    figure = exposed_figure(points)
    assert figure is not None
    for drawing in figure.drawings:
        root = ET.fromstring(str(drawing))
        bands = [_first_heights(path.get("d", "")) for path in root.iter("path")]
        grid = [float(line.get("y1", "0")) for line in root.iter("line") if line.get("class") == "grid"]
        height = max(grid) - min(grid)
        assert [foot - top for foot, top in bands] == pytest.approx([n * height for n in (0.4, 0.3, 0.2, 0.1)], abs=0.1)
        assert (bands[0][0], bands[-1][1]) == (max(grid), min(grid))
    assert [entry.text for entry in figure.legend] == ["novel", "disk", "update", "gradients down"]
    assert len({entry.style for entry in figure.legend}) == 4
    assert figure.caption.endswith("at most 10.00 ms, in step 1.")
    assert figure.readouts[1] == (
        round(1 / 3, 5),
        "step 2\nall 1.00 ms\nnovel 0.00 ms\ndisk 0.00 ms\nupdate 1.00 ms\ngradients down 0.00 ms",
    )


def test_a_run_that_never_stood_still_has_no_chart_of_it() -> None:
    assert exposed_figure(_points([{}, {"update": 0.0}])) is None


def test_a_thousand_steps_keep_the_longest() -> None:
    exposed = [{"update": 0.5 if step == 777 else 0.001} for step in range(1, 1001)]
    figure = exposed_figure(_points(exposed))
    assert figure is not None
    assert any(text.startswith("step 777\nall 500.00 ms") for _, text in figure.readouts)
