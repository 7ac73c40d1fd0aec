import json
import math
from pathlib import Path
from typing import Any

import pytest

from zeroshard.errors import ReportError
from zeroshard.report.run_folder import read_run
from zeroshard.schedule.actions import Action, Kind

from .run_files import memory, memory_row, summary, timelines, training_line, validation_line, write_run


def test_a_complete_run_is_read_without_notes(tmp_path: Path) -> None:
    lines = [training_line(1, 8.0), training_line(2, 7.5), validation_line(2, 7.75)]
    run = read_run(write_run(tmp_path, lines, summary(), memory([(0.0, "begin", (4, 2, 1))])))
    assert [(p.step, p.bits_per_byte) for p in run.training] == [(1, 8.0), (2, 7.5)]
    assert [(p.step, p.bits_per_byte) for p in run.validation] == [(2, 7.75)]
    assert run.summary.parameters == 1_234_567
    assert run.memory is not None
    assert run.memory.events[0].total == 7
    assert run.notes == ()


def test_a_truncated_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    run = write_run(tmp_path, [training_line(1, 8.0)], summary(), memory([(0.0, "begin", (1, 1, 1))]))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "bits_per_byte": 7.5, "note": "caf\xc3')
    read = read_run(run)
    assert [p.step for p in read.training] == [1]
    assert any("1 unreadable line left out" in note for note in read.notes)


def test_not_a_number_infinity_null_and_other_types_are_unknown(tmp_path: Path) -> None:
    lines = [
        training_line(1, math.nan, grad_norm=math.inf),
        training_line(2, None, grad_norm=None),
        training_line(3, 7.0, grad_norm="large", rss_bytes=True),
    ]
    points = read_run(write_run(tmp_path, lines)).training
    assert math.isnan(points[0].bits_per_byte)
    assert points[0].grad_norm == math.inf
    assert math.isnan(points[1].bits_per_byte)
    assert math.isnan(points[1].grad_norm)
    assert math.isnan(points[2].grad_norm)
    assert math.isnan(points[2].rss_bytes)


def test_a_resumed_run_counts_the_last_record_of_a_step(tmp_path: Path) -> None:
    lines = [training_line(1, 8.0), training_line(2, 7.0), training_line(2, 6.0), training_line(3, 5.0)]
    run = read_run(write_run(tmp_path, lines))
    assert [p.bits_per_byte for p in run.training] == [8.0, 6.0, 5.0]
    assert any("1 step records" in note for note in run.notes)


def test_a_run_that_died_says_what_is_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [training_line(41, 3.0), training_line(42, 3.0)]))
    assert run.memory is None
    assert math.isnan(run.summary.parameters)
    assert any("no summary.json" in note and "step 42" in note for note in run.notes)
    assert any("no memory.json" in note for note in run.notes)


def test_a_cut_summary_is_a_note_and_no_failure(tmp_path: Path) -> None:
    run = write_run(tmp_path, [training_line(1, 3.0)])
    (run / "summary.json").write_text('{"title": "cut', encoding="utf-8")
    read = read_run(run)
    assert read.summary.title == ""
    assert any(note.startswith("summary.json cannot be read") for note in read.notes)


def test_memory_events_come_in_order_of_time_and_missing_categories_hold_nothing(tmp_path: Path) -> None:
    record = memory([(0.2, "later", (1, 2, 3)), (0.1, "sooner", (4, 5, 6))])
    record["events"].append({"t": 0.3, "label": "odd", "bytes": {"gradients": 7, "extra": 8}})
    record["events"].append({"t": None, "label": "timeless", "bytes": {}})
    step = read_run(write_run(tmp_path, [training_line(1, 3.0)], memory=record)).memory
    assert step is not None
    assert [event.label for event in step.events] == ["sooner", "later", "odd"]
    assert step.categories == ("parameters", "gradients", "activations", "extra")
    assert step.events[2].nbytes == (0, 7, 0, 8)


def test_what_offload_cost_is_read_by_cause(tmp_path: Path) -> None:
    odd = {"update": 0.25, "gradients down": "long", "disk": -1, "parameters up": math.nan, "novel": 0}
    lines = [
        training_line(1, 8.0),
        training_line(2, 7.0, exposed_seconds=odd, guesses_taken=4, guesses_undone=None),
        training_line(3, 6.0, exposed_seconds=None),
    ]
    points = read_run(write_run(tmp_path, lines)).training
    assert [point.exposed for point in points] == [{}, {"update": 0.25, "novel": 0.0}, {}]
    assert [(point.taken, point.undone) for point in points] == [(0, 0), (4, 0), (0, 0)]


def test_rows_of_memory_are_of_the_device_unless_they_say_otherwise(tmp_path: Path) -> None:
    rows = [memory_row("gradients", 8, 0, 8), memory_row("gradients", 8, 4088, 4096, tier="host")]
    run = read_run(write_run(tmp_path, [training_line(1, 8.0)], summary(memory=rows)))
    assert [(row.tier, row.measured_bytes) for row in run.summary.memory] == [("device", 8), ("host", 4096)]


def _with_timeline(folder: Path, text: str) -> Path:
    run = write_run(folder, [training_line(1, 3.0)], summary(), memory([(0.0, "begin", (1, 1, 1))]))
    (run / "timeline.json").write_text(text, encoding="utf-8")
    return run


def test_timelines_are_read_as_actions(tmp_path: Path) -> None:
    run = read_run(_with_timeline(tmp_path, json.dumps(timelines())))
    assert run.notes == ()
    assert run.timelines is not None
    assert (run.timelines.measured_seconds, run.timelines.simulated_seconds) == (5e-3, 4e-3)
    measured, simulated = run.timelines.drawn
    assert (measured.name, measured.notes) == ("as measured", ("a note",))
    assert measured.spans[1] == [
        (Action(Kind.FORWARD, 1, 0), 2e-3, 3e-3),
        (Action(Kind.BACKWARD, 1, 0), 3e-3, 4e-3),
    ]
    assert len(simulated.spans) == 2


def test_a_run_without_a_timeline_has_no_note_of_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [training_line(1, 3.0)], summary(), memory([(0.0, "begin", (1, 1, 1))])))
    assert run.timelines is None
    assert run.notes == ()


def test_a_timeline_that_was_cut_off_is_a_note(tmp_path: Path) -> None:
    run = read_run(_with_timeline(tmp_path, json.dumps(timelines())[:-40]))
    assert run.timelines is None
    (note,) = run.notes
    assert note.startswith("timeline.json cannot be read (")


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"measured_seconds": None}, "no times"),
        ({"simulated_seconds": math.nan}, "no times"),
        ({"measured_seconds": 0}, "no times"),
        ({"timelines": 3}, "no actions"),
        ({"timelines": []}, "no actions"),
        ({"timelines": [{"name": "empty", "notes": [], "spans": [[], []]}]}, "no actions"),
        ({"timelines": [{"name": "bare"}]}, "no spans"),
        ({"timelines": [{"name": "", "notes": [], "spans": [[["X0.0@0", 0, 1]]]}]}, "is no action"),
        ({"timelines": [{"name": "", "notes": [], "spans": [[["F0.0@0", 0]]]}]}, "missing"),
        ({"timelines": [{"name": "", "notes": [], "spans": [[["F0.0@0", 2, 1]]]}]}, "runs from 2 to 1"),
        ({"timelines": [{"name": "", "notes": [], "spans": [[["F0.0@0", 0, math.inf]]]}]}, "to inf"),
        ({"timelines": [{"name": "", "notes": [], "spans": [[["F0.0@0", "0", 1]]]}]}, "not supported"),
    ],
)
def test_a_damaged_timeline_is_a_note(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    run = read_run(_with_timeline(tmp_path, json.dumps(timelines(**fields))))
    assert run.timelines is None
    (note,) = run.notes
    assert note.startswith("timeline.json is damaged (") and why in note


@pytest.mark.parametrize("text", ["[]", "{}", "null", "7"])
def test_a_file_that_holds_something_else_is_a_damaged_timeline(tmp_path: Path, text: str) -> None:
    run = read_run(_with_timeline(tmp_path, text))
    assert run.timelines is None
    assert [note.split(" (")[0] for note in run.notes] == ["timeline.json is damaged"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nowhere is not there.*give the folder"):
        read_run(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("", encoding="utf-8")
    with pytest.raises(ReportError, match="run is a file, not a folder"):
        read_run(tmp_path / "run")


def test_a_folder_without_metrics_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(ReportError, match=r"holds no metrics\.jsonl \(it holds: model\.pt\).*give the folder"):
        read_run(tmp_path)


def test_metrics_without_a_training_line_say_what_was_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, [validation_line(1, 3.0), '{"step": 1, "lo'])
    with pytest.raises(ReportError, match=r"no training line \(1 readable lines, 1 unreadable\).*one step"):
        read_run(run)


@pytest.mark.parametrize(
    "text, rows, notes",
    [
        ('{"predicted": {}}', None, 0),  # the run ended before it could compare
        ('{"rows": [{"part": "memory", "name": "peak", "predicted": 4}], "warnings": 3}', 1, 0),
        ('{"rows": [', None, 1),
    ],
)
def test_a_prediction_is_read_as_far_as_it_goes(tmp_path: Path, text: str, rows: int | None, notes: int) -> None:
    folder = write_run(tmp_path, [training_line(1, 8.0)], summary(), memory([(0.0, "begin", (1, 1, 1))]))
    (folder / "prediction.json").write_text(text)
    run = read_run(folder)
    assert (None if run.forecast is None else len(run.forecast.rows)) == rows
    assert len(run.notes) == notes
    if run.forecast is not None:
        assert math.isnan(run.forecast.rows[0].measured) and run.forecast.warnings == ()
