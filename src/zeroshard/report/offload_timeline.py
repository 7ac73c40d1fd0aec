"""The timeline of offloaded steps: one row per queue, one box per copy, host job, forward and backward.

`train --trace` keeps the spans in the run folder; here they become a drawing, a trace in the Trace Event Format, and
a caption with the seconds that the main thread waited, by cause.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from zeroshard.report.run_folder import Record
from zeroshard.report.timeline_figure import (
    BETWEEN,
    HEAD,
    LEFT,
    NARROWEST,
    RIGHT,
    TIPS,
    TOP,
    WIDEST,
    Fill,
    Labels,
    Picture,
    picture_svg,
    place_axis,
)
from zeroshard.report.timeline_section import NAMESPACE, TimelineSection
from zeroshard.report.timeline_trace import metadata, trace_of
from zeroshard.text import format_duration
from zeroshard.traffic import COMPUTE, DISK, QUEUES, UPDATE

DATA, SVG, TRACE = "timeline-offload.json", "timeline-offload.svg", "timeline-offload-trace.json"
ROW = 30.0
BOX = 26.0  # width in pixels of a box of median length
THINNEST = 0.6  # width in pixels of a box of almost no time
SIZE, LETTER = 10.5, 0.56  # text in boxes: height in pixels, and a letter's mean width relative to it
QUEUE_NAMES = {COMPUTE: "compute", "down": "down", "up": "up", "host": "updates", "disk": "disk"}
FORWARD, BACKWARD = "forward", "backward"
# Light and dark: computes are grey, causes have their colours of the chart of exposed seconds.
COLOURS = {
    FORWARD: ("#8d98a3", "#7d8893"),
    BACKWARD: ("#5d6873", "#a9b3bd"),
    "gradients down": ("#c0701a", "#d08a3c"),
    "activations down": ("#2c8aa1", "#4fa5b8"),
    "parameters up": ("#4a7fc1", "#5b8fd6"),
    "activations up": ("#3b9157", "#5aa873"),
    "parameters up to evaluate": ("#7d67b8", "#9a87cf"),
    UPDATE: ("#b0588e", "#c279a8"),
    DISK: ("#857d6d", "#968f83"),
}


@dataclass(frozen=True, slots=True)
class QueueSpan:
    """A task from `start` to `end`, in seconds since the first step began; both lie within the steps."""

    label: str
    cause: str
    start: float
    end: float

    @property
    def queue(self) -> str:
        """Its row."""
        return str(COMPUTE if self.cause == COMPUTE else QUEUES.get(self.cause, self.cause))

    @property
    def kind(self) -> str:
        """Its colour's key in `COLOURS`."""
        return self.label if self.cause == COMPUTE else self.cause


@dataclass(frozen=True, slots=True)
class OffloadTimeline:
    """Some steps of one rank.

    Attributes:
        ends: of the steps, in seconds since the first began.
        exposed: seconds that the main thread waited in them, by cause.
    """

    rank: int
    ends: tuple[float, ...]
    exposed: dict[str, float]
    spans: tuple[QueueSpan, ...]

    @property
    def steps(self) -> str:
        """The number of steps, as text."""
        return "one step" if len(self.ends) == 1 else f"{len(self.ends)} steps"

    def rows(self) -> Iterator[tuple[str, list[QueueSpan]]]:
        """The queues with spans, each with its spans."""
        for queue in QUEUE_NAMES:
            if row := [span for span in self.spans if span.queue == queue]:
                yield queue, row


@dataclass(frozen=True)
class CauseFill(Fill):
    """Colour of a cause, of forwards or of backwards."""

    kind: str

    @property
    def name(self) -> str:
        """A name for a style sheet."""
        return self.kind.replace(" ", "-")

    def fill(self, dark: bool) -> str:
        """The colour, as #rrggbb."""
        return COLOURS[self.kind][dark]


def read_offload_timeline(run: Path) -> tuple[OffloadTimeline | None, tuple[str, ...]]:
    """The offload timeline of a run folder, None if it has none, and notes on a damaged file."""
    path = run / DATA
    if not path.is_file():
        return None, ()
    try:
        return _timeline(Record(json.loads(path.read_text(encoding="utf-8", errors="replace")))), ()
    except (ValueError, TypeError) as error:
        return None, (f"{DATA} is damaged ({error}). The report goes without it.",)


def write_offload_timeline(folder: Path, timeline: OffloadTimeline) -> TimelineSection:
    """Write the drawing and the trace into a run folder; returns its section of the page."""
    svg = picture_svg(place_queues(timeline))
    (folder / SVG).write_text(svg, encoding="utf-8", errors="replace")
    (folder / TRACE).write_text(offload_trace(timeline), encoding="utf-8", errors="replace")
    title = f"Timeline of {timeline.steps}: compute, copies and host jobs"
    return TimelineSection(title, Markup(svg.replace(NAMESPACE, "", 1)), _caption(timeline))


def place_queues(timeline: OffloadTimeline) -> Picture:
    """Lay out the drawing: a row per queue, the main thread's first, a line at the end of each step, and a legend."""
    end = timeline.ends[-1]
    lengths = sorted(span.end - span.start for span in timeline.spans if span.end > span.start)
    usual = lengths[len(lengths) // 2] if lengths else end
    width = min(max(LEFT + RIGHT + BOX * end / usual, NARROWEST), WIDEST)
    name = f"rank {timeline.rank}: {timeline.steps}"
    picture = Picture(width, 0, f"{name}, offloaded")
    scale = (width - LEFT - RIGHT) / end
    notes = "  \N{MIDDLE DOT}  ".join(_notes(timeline))
    picture.labels.append(Labels(LEFT, TOP + 14, name, "name", 13))
    picture.labels.append(Labels(LEFT + 18 + 7.8 * len(name), TOP + 14, notes, "quiet", 12))
    top = y = TOP + HEAD
    for queue, row in timeline.rows():
        picture.tracks.append((LEFT, y, end * scale, ROW - 4))
        picture.labels.append(Labels(LEFT - 8, y + ROW / 2 + 2, QUEUE_NAMES[queue], "quiet", 11.5, "end"))
        for span in row:
            _place(picture, span, y, scale)
        if len(timeline.spans) <= TIPS:
            picture.tips += [(LEFT + s.start * scale, y, (s.end - s.start) * scale, ROW - 4, _tip(s)) for s in row]
        y += ROW
    picture.lines += [(LEFT + each * scale, top - 4, LEFT + each * scale, y + 2) for each in timeline.ends]
    place_axis(picture, y + 2, end)
    picture.height = _legend(picture, y + BETWEEN + 38) + 20
    return picture


def offload_trace(timeline: OffloadTimeline) -> str:
    """A process for the rank, a thread per queue, a slice per span, in microseconds (the Trace Event Format)."""
    events = [metadata(0, 0, "process_name", name=f"rank {timeline.rank}")]
    for tid, (queue, row) in enumerate(timeline.rows()):
        events += [metadata(0, tid, "thread_name", name=QUEUE_NAMES[queue])]
        events += [metadata(0, tid, "thread_sort_index", sort_index=tid)]
        for span in row:
            place = {"tid": tid, "ts": _micro(span.start), "dur": _micro(span.end - span.start)}
            events.append(json.dumps({"ph": "X", "pid": 0, **place, "name": span.label, "cat": span.cause}))
    for number, end in enumerate(timeline.ends, 1):
        mark = {"ph": "i", "pid": 0, "tid": 0, "ts": _micro(end), "s": "p", "name": f"end of step {number}"}
        events.append(json.dumps(mark))
    return trace_of(events)


def _timeline(record: Record) -> OffloadTimeline:
    """The timeline of a record; raises ValueError or TypeError if it is damaged."""
    ends, spans = record.fields.get("ends"), record.fields.get("spans")
    if not isinstance(ends, list) or not isinstance(spans, list) or not ends:
        raise TypeError("it holds no steps, or no spans")
    if not all(isinstance(e, int | float) and 0 < e < math.inf for e in ends) or ends != sorted(ends):
        raise ValueError(f"its steps end at {ends}")
    exposed = record.record("exposed")
    seconds = {cause: n for cause in exposed.fields if 0 < (n := exposed.number(cause)) < math.inf}
    kept = (span for each in spans if (span := _span(each, ends[-1])) is not None)
    rank = record.number("rank")
    return OffloadTimeline(int(rank) if math.isfinite(rank) else 0, tuple(ends), seconds, tuple(kept))


def _span(fields: Sequence[Any], last: float) -> QueueSpan | None:
    """A span cut to the steps; None if it lies outside of them, or is of no known cause."""
    label, cause, start, end = fields
    if not -math.inf < start <= end < math.inf:
        raise ValueError(f"{label} runs from {start} to {end}")
    span = QueueSpan(str(label), str(cause), max(0.0, start), min(last, end))
    return span if span.kind in COLOURS and span.start <= span.end else None


def _place(picture: Picture, span: QueueSpan, y: float, scale: float) -> None:
    """Draw a span with the part of its name that fits."""
    fill, middle, wide = CauseFill(span.kind), y + (ROW - 4) / 2, max(THINNEST, (span.end - span.start) * scale)
    gap = 1 if wide > 12 else 0
    left = LEFT + span.start * scale
    picture.boxes.setdefault((fill, ROW - 4), []).append((left + gap / 2, middle, wide - gap))
    name = span.label.partition("[")[0]  # without the dtype of the buffer
    fitting = [text for text in (name, name.rpartition(".")[2]) if LETTER * SIZE * len(text) <= wide - 6]
    if fitting:
        picture.labels.append(Labels(left + wide / 2, middle + 0.36 * SIZE, fitting[0], fill, SIZE, "middle"))


def _tip(span: QueueSpan) -> str:
    name = span.label if span.cause == COMPUTE else f"{span.label}: {span.cause}"
    return f"{name}, {format_duration(span.end - span.start)} from {format_duration(span.start)} on"


def _legend(picture: Picture, y: float) -> float:
    """Place the legend of the colours; returns its lowest baseline."""
    shown = {fill for fill, _ in picture.boxes}
    fills: Sequence[Fill | None] = [*(f for kind in COLOURS if (f := CauseFill(kind)) in shown), None]
    x = LEFT
    for fill in fills:
        name = "idle" if fill is None else fill.kind if isinstance(fill, CauseFill) else fill.name
        if x + 22 + 6.6 * len(name) > picture.width - RIGHT:
            x, y = LEFT, y + 20
        picture.swatches.append((x, y - 10, 12, 12, fill))
        picture.labels.append(Labels(x + 17, y, name, "quiet", 12))
        x += 35 + 6.6 * len(name)
    return y


def _notes(timeline: OffloadTimeline) -> tuple[str, str]:
    return format_duration(timeline.ends[-1]), f"{format_duration(sum(timeline.exposed.values()))} exposed"


def _caption(timeline: OffloadTimeline) -> str:
    """Seconds of the steps, exposed seconds by cause, and the method of timing."""
    parts = sorted(timeline.exposed.items(), key=lambda item: -item[1])
    whole, exposed = _notes(timeline)
    causes = ", ".join(f"{cause} {format_duration(seconds)}" for cause, seconds in parts)
    return (
        f"{timeline.steps.capitalize()} of rank {timeline.rank}, which took {whole}, with {exposed}"
        f"{f' ({causes})' if causes else ''}: the time that the main thread waited for offload; the rest "
        f"was hidden behind compute. Lines are where steps end. On a GPU, computes and copies stand where the host "
        f"handed them out, not where they ran. The folder of this page has {SVG} and {TRACE}, which opens in "
        f"ui.perfetto.dev."
    )


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
