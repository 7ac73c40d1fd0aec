import json
import re
import xml.etree.ElementTree as ET
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine.models import batch, build
from offload.offloaded import ADAMW, executing

import zeroshard as zs
from zeroshard.report.offload_timeline import (
    COLOURS,
    QUEUE_NAMES,
    CauseFill,
    OffloadTimeline,
    QueueSpan,
    offload_trace,
    place_queues,
    read_offload_timeline,
    write_offload_timeline,
)
from zeroshard.report.page import write_report
from zeroshard.report.run_charts import _CAUSES, _OTHER
from zeroshard.report.timeline_figure import LEFT, RIGHT, WIDEST, _luminance
from zeroshard.traffic import BETWEEN_TIERS, COMPUTE, DISK, QUEUES, UPDATE
from zeroshard.train.trace import OffloadTrace

from .run_files import summary, training_line, write_run

SVG = "{http://www.w3.org/2000/svg}"
SPANS = [
    ["forward", "compute", 0.0, 0.010],
    ["backward", "compute", 0.010, 0.030],
    ["h.1[float32]", "gradients down", 0.018, 0.020],
    ["h.1[float32]", "update", 0.020, 0.026],
    ["h.1[float32]", "parameters up", 0.031, 0.031],  # in no time
    ["activations", "activations down", 0.004, 0.006],
    ["early", "update", -0.010, 0.002],  # under way when the first step began
    ["before", "update", -0.010, -0.002],
    ["strange", "nothing we know", 0.001, 0.002],
]
EXPOSED = {"update": 0.002, "gradients down": 0.006, "parameters up": 0.0}


def content(**fields: Any) -> dict[str, Any]:
    return {"rank": 3, "ends": [0.032, 0.064], "exposed": EXPOSED, "spans": SPANS, **fields}


def write(folder: Path, text: str) -> Path:
    run = write_run(folder, [training_line(1, 2.0)], summary(plan={"zero": 2, "offload": "optimizer"}))
    (run / "timeline-offload.json").write_text(text, encoding="utf-8")
    return run


def read(folder: Path, **fields: Any) -> OffloadTimeline:
    timeline, notes = read_offload_timeline(write(folder, json.dumps(content(**fields))))
    assert timeline is not None and notes == ()
    return timeline


def test_spans_are_read_and_cut_to_the_steps(tmp_path: Path) -> None:
    timeline = read(tmp_path)
    assert (timeline.rank, timeline.ends) == (3, (0.032, 0.064))
    assert timeline.exposed == {"update": 0.002, "gradients down": 0.006}
    assert [span.label for span in timeline.spans if span.cause == "update"] == ["h.1[float32]", "early"]
    assert timeline.spans[-1] == QueueSpan("early", "update", 0.0, 0.002)
    assert {queue: len(row) for queue, row in timeline.rows()} == {"compute": 2, "down": 2, "up": 1, "host": 2}


@pytest.mark.parametrize(
    "text, why",
    [
        ("[]", "no steps, or no spans"),
        ('{"ends": [1]', "delimiter"),
        (json.dumps(content(ends=[])), "no steps"),
        (json.dumps(content(ends=[2, 1])), r"end at \[2, 1\]"),
        (json.dumps(content(ends=["1"])), "end at"),
        (json.dumps(content(spans=3)), "no spans"),
        (json.dumps(content(spans=[["a", "update", 2, 1]])), "a runs from 2 to 1"),
        (json.dumps(content(spans=[["a", "update", 2]])), "not enough values"),
        (json.dumps(content(spans=[["a", "update", "2", 1]])), "not supported"),
    ],
)
def test_a_damaged_file_is_a_note_on_the_page(tmp_path: Path, text: str, why: str) -> None:
    run = write(tmp_path, text)
    timeline, (note,) = read_offload_timeline(run)
    assert timeline is None
    assert note.startswith("timeline-offload.json is damaged (") and re.search(why, note)
    assert "timeline-offload.json is damaged" in write_report(run).read_text()


def test_every_lane_has_its_row_and_every_span_its_box(tmp_path: Path) -> None:
    picture = place_queues(read(tmp_path))
    names = [label.text for label in picture.labels if label.anchor == "end"]
    assert names == ["compute", "down", "up", "updates", "ms"]
    assert all(above[1] + above[3] < below[1] for above, below in pairwise(picture.tracks))
    pixel = 0.064 / (picture.width - LEFT - RIGHT)
    rows = {name: queue[1] + queue[3] / 2 for name, queue in zip(names, picture.tracks, strict=False)}
    for label, cause, start, end in SPANS[:6]:
        row = {"compute": "compute", "update": "updates"}.get(cause, cause.rpartition(" ")[2])
        kind = label if cause == "compute" else cause
        found = [place for (fill, _), places in picture.boxes.items() if fill == CauseFill(kind) for place in places]
        x, y, wide = found[0]
        assert y == rows[row]
        assert x == pytest.approx(LEFT + start / pixel, abs=0.51)
        assert wide == pytest.approx(max(0.6, (end - start) / pixel), abs=1.01) and wide > 0
    ends = [line[0] for line in picture.lines if line[0] == line[2] and line[3] - line[1] > 100]
    assert ends == pytest.approx([LEFT + 0.032 / pixel, LEFT + 0.064 / pixel])


def test_boxes_are_named_as_far_as_there_is_room() -> None:
    def inside(seconds: float) -> list[str]:
        spans = (QueueSpan("blocks.12[float32]", "update", 0.0, seconds), QueueSpan("forward", "compute", 0.0, 1.0))
        picture = place_queues(OffloadTimeline(0, (1.0,), {}, spans))
        return [label.text for label in picture.labels if label.style == CauseFill("update")]

    assert [inside(seconds) for seconds in (0.1, 0.03, 0.01)] == [["blocks.12"], ["12"], []]


@pytest.mark.parametrize("dark", [False, True])
def test_names_can_be_read_on_every_colour(dark: bool) -> None:
    for kind in COLOURS:
        fill = CauseFill(kind)
        low, high = sorted((_luminance(fill.fill(dark)), _luminance(fill.ink(dark))))
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA


def test_every_cause_has_the_colour_of_the_chart_of_exposed_seconds() -> None:
    assert set(COLOURS) == {"forward", "backward", UPDATE, DISK, *BETWEEN_TIERS}
    assert set(QUEUE_NAMES) == {COMPUTE, *QUEUES.values()}
    style = resources.files("zeroshard.report").joinpath("style.css").read_text()
    hues = dict[str, list[str]]()
    for hue, colour in re.findall(r"--(hue\d): (#\w{6});", style):
        hues.setdefault(hue, []).append(colour)
    causes = COLOURS.keys() - {"forward", "backward"}
    assert {cause: list(COLOURS[cause]) for cause in causes} == {
        c: hues[f"hue{_CAUSES.get(c, _OTHER)}"] for c in causes
    }


def test_the_trace_has_a_thread_for_each_lane(tmp_path: Path) -> None:
    events = json.loads(offload_trace(read(tmp_path)))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {0: "compute", 1: "down", 2: "up", 3: "updates"}
    found = [(threads[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert ("compute", "backward", "compute", 10_000, 20_000) in found
    assert ("updates", "h.1[float32]", "update", 20_000, 6_000) in found
    assert len(found) == 7
    assert [event["ts"] for event in events if event["ph"] == "i"] == [32_000, 64_000]


def test_the_page_shows_it_and_says_what_was_exposed(tmp_path: Path) -> None:
    evil = "</style></svg><script>alert(1)</script>"
    run = write(tmp_path, json.dumps(content(spans=[*SPANS, [evil, "update", 0.033, 0.060]])))
    page = write_report(run).read_text()
    assert "<h2>Timeline of 2 steps: compute, copies and host jobs</h2>" in page
    assert "<script>alert" not in page
    assert "with 8.00 ms exposed (gradients down 6.00 ms, update 2.00 ms)" in page
    assert "On a GPU, computes and copies stand where the host handed them out" in page
    root = ET.parse(run / "timeline-offload.svg").getroot()
    assert root.tag == f"{SVG}svg" and root.findtext(f"{SVG}title") == "rank 3: 2 steps, offloaded"
    used = {name for element in root.iter() for name in (element.get("class") or "").split()}
    light, dark = (root.findtext(f"{SVG}style") or "").split("@media (prefers-color-scheme:dark)")
    for theme in (light, dark):
        assert used - {"box", "name", "tip"} - set(re.findall(r"\.([\w-]+)", theme)) == set()
    tips = [path.findtext(f"{SVG}title") for path in root.iter(f"{SVG}path") if path.get("class") == "tip"]
    assert "h.1[float32]: update, 6.00 ms from 20.00 ms on" in tips and len(tips) == 8
    assert json.loads((run / "timeline-offload-trace.json").read_text())["traceEvents"]


def test_a_large_timeline_is_small_enough_to_show(tmp_path: Path) -> None:
    spans = tuple(QueueSpan(f"h.{n}", "update", n / 20_000, (n + 1) / 20_000) for n in range(20_000))
    section = write_offload_timeline(tmp_path, OffloadTimeline(0, (1.0,), {}, spans))
    assert len(section.drawing) < 25 * 20_000
    assert ET.fromstring(section.drawing).get("width") == f"{WIDEST:g}"


def test_a_step_without_a_task_is_drawn(tmp_path: Path) -> None:
    section = write_offload_timeline(tmp_path, OffloadTimeline(0, (1.0,), {}, ()))
    assert section.title.startswith("Timeline of one step")
    assert "0.00 ms exposed:" in section.caption


def test_what_an_engine_does_becomes_a_timeline(tmp_path: Path) -> None:
    with executing("worker"):
        engine = zs.Engine(build("Plain", seed=0), ADAMW, zs.Plan(offload="optimizer", precision="bf16"))
    engine.train_step((batch(0, 0, 1, 8), 0))
    trace = OffloadTrace(engine)
    for step in (1, 2):
        with trace.step():
            engine.train_step((batch(step, 0, 1, 8), step))
        engine.flush()
    trace.write(write(tmp_path, "{}"))
    timeline, notes = read_offload_timeline(tmp_path)
    assert timeline is not None and notes == ()
    computes = [span.label for span in timeline.spans if span.cause == "compute"]
    assert computes == ["forward", "backward"] * 2
    downs = [span.label for span in timeline.spans if span.cause == "gradients down"]
    assert downs[: len(downs) // 2] == downs[len(downs) // 2 :]
    assert sorted(downs) == sorted(2 * [f"{unit}[bfloat16]" for unit in engine.units])
    assert [queue for queue, _ in timeline.rows()] == ["compute", "down", "up", "host"]
    assert timeline.exposed.keys() <= {"gradients down", "parameters up", "update"}


def test_where_nothing_is_offloaded_actions_alone_are_traced() -> None:
    engine = zs.Engine(build("Plain", seed=0), ADAMW, zs.Plan(microbatches=2))
    with engine.trace() as trace:
        engine.train_step((batch(0, 0, 1, 8), 0))
    assert [str(action) for action, _, _ in trace.actions] == ["F0.0@0", "B0.0@0", "F0.1@0", "B0.1@0", "UPDATE0@0"]
    assert all(start <= end for _, start, end in trace.actions) and trace.tasks == []
