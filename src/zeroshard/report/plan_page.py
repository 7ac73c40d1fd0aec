"""One plan of the planner as a page of its own: memory over the step, its timeline, its traffic, its time."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup

from zeroshard.errors import ReportError
from zeroshard.memory.ledger import Event
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.text import MODES, TIME_MODES, categories, found_by, left_out, seconds, shares, short
from zeroshard.report.chart import HUES, Chart
from zeroshard.report.memory_chart import memory_chart, phases_chart
from zeroshard.report.page import chosen_settings, compose
from zeroshard.report.run_records import MemoryEvent, MemoryStep
from zeroshard.report.tables import Cell, Row, Table, bytes_cell, fields_table, measured
from zeroshard.report.timeline_figure import timeline_svg
from zeroshard.report.timeline_png import timeline_png
from zeroshard.report.timeline_section import NAMESPACE, TimelineSection
from zeroshard.report.timeline_trace import timeline_trace
from zeroshard.schedule.simulate import Timeline
from zeroshard.text import format_bytes, format_exact

BESIDE = " The folder of this page has it as a drawing, an image and a trace, which opens in ui.perfetto.dev."


def write_plan(p: Prediction, stem: Path, title: str, notes: tuple[str, ...] = ()) -> list[Path]:
    """Write the page, and of a pipeline its timeline as a drawing, an image and a trace; returns the paths.

    Args:
        stem: path of the files without their endings.
        notes: further remarks for the reader, a sentence each.

    Raises:
        ReportError: a file that cannot be written.
    """
    drawn = [Timeline(short(p.plan, p.ranks), [list(row) for row in p.spans], (f"step {seconds(p.seconds)}",))]
    files: dict[str, Callable[[], bytes]] = {".html": lambda: plan_page(p, title, notes).encode(errors="replace")}
    if p.spans:
        files["-timeline.svg"] = lambda: timeline_svg(drawn).encode()
        files["-timeline.png"] = lambda: timeline_png(drawn)
        files["-timeline.json"] = lambda: timeline_trace(drawn).encode()
    written = {stem.with_name(stem.name + end): draw for end, draw in files.items()}
    for path, draw in written.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draw())
        except OSError as error:
            raise ReportError(
                f"{path} cannot be written ({error.strerror}); name a folder that can be written."
            ) from error
    return list(written)


def plan_page(p: Prediction, title: str, notes: tuple[str, ...] = ()) -> str:
    """The page as text."""
    return compose(
        title=title,
        versions=short(p.plan, p.ranks),
        notes=(*remarks(p), *notes),
        facts=_facts(p),
        course=(),
        loss=None,
        charts=(),
        timeline=plan_timeline(p),
        memory=plan_memory(p),
        memories=None,
        tables=[(table, ()) for table in plan_tables(p)],
        lines=(),
        plan=fields_table(p.plan.as_dict()),
        chosen=fields_table(chosen_settings(p.plan.as_dict())),
        starts=(),
        corpus={},
        sample="",
    )


def remarks(p: Prediction) -> tuple[str, ...]:
    """Remarks on the numbers of a plan, a sentence each."""
    return (*p.notes, *(left.sentence for left in left_out(p) if p.events))


def plan_memory(p: Prediction) -> Chart | None:
    """Memory over the step, or at the peak of each phase where few blocks were rehearsed; None without either."""
    held = categories([p])
    events = [
        MemoryEvent(event.t, event.label or _moved(before, event), tuple(event.nbytes.get(c, 0) for c in held))
        for before, event in pairwise((*p.events[:1], *p.events))
    ]
    if events:
        return memory_chart(MemoryStep(p.rank, tuple(held), tuple(events)), _allowed(p), p.capacity_bytes)
    return phases_chart(p.phases, held) if p.phases else None


def plan_tables(p: Prediction) -> list[Table]:
    """The bytes on the fullest rank, the time of the step by cause, and the traffic; those that have rows."""
    return [table for table in (_memory(p, categories([p])), _time(p), _wire(p)) if table.rows]


def _moved(before: Event, event: Event) -> str:
    """The category with the largest change."""
    return max(event.nbytes, key=lambda name: abs(event.nbytes[name] - before.nbytes.get(name, 0)), default="")


def _facts(p: Prediction) -> tuple[tuple[str, str], ...]:
    return (
        ("Ranks", format_exact(p.ranks)),
        ("Rows per data rank and step", format_exact(p.batch)),
        ("Fits", "yes" if p.fits else "no"),
        (f"Peak, on rank {p.rank}", format_bytes(p.peak_bytes)),
        ("Capacity", format_bytes(p.capacity_bytes)),
        ("Step", seconds(p.seconds)),
        ("Tokens per second", format_exact(round(p.tokens_per_second))),
        ("Bound by", p.bound),
    )


def plan_timeline(p: Prediction, beside: str = BESIDE) -> TimelineSection | None:
    """The timeline of a pipeline; None of other plans.

    Args:
        beside: a sentence about files, after the caption.
    """
    if not p.spans:
        return None
    drawing = timeline_svg([Timeline(short(p.plan, p.ranks), [list(row) for row in p.spans])])
    caption = f"Predicted.{beside}"
    # the drawing has escaped all text and attributes
    return TimelineSection("Timeline of one step", Markup(drawing.replace(NAMESPACE, "", 1)), caption)


def _memory(p: Prediction, held: list[str]) -> Table:
    highest = {c: max([p.memory.get(c, 0), *(event.nbytes.get(c, 0) for event in p.events)]) for c in held}
    rows = [
        Row(c, (bytes_cell(p.memory.get(c, 0)), bytes_cell(highest[c])), f"hue{i % HUES}")
        for i, c in enumerate(held)
        if highest[c]
    ]
    whole = Row("All", (bytes_cell(p.peak_bytes), Cell("")))
    note = f"How it was found ({found_by(p.mode)}): {MODES[p.mode]}."
    return Table("Bytes on this rank", ("Category", "At the peak", "At its own highest"), tuple(rows), (whole,), note)


def _time(p: Prediction) -> Table:
    ordered = {cause: p.causes[cause] for cause in shares(p)}
    note = f"How it was found ({found_by(p.time_mode)}): {TIME_MODES[p.time_mode]}."
    return _shared(
        "Time of one step by cause", ("Cause", "Time", "Share"), ordered, lambda t: measured(t, seconds(t)), note
    )


def _wire(p: Prediction) -> Table:
    heads = ("Purpose", "Bytes", "Share")
    note = "Of this rank, by the paper's count: an all-gather counts its result."
    return _shared("On the wire in one step", heads, p.wire_bytes, bytes_cell, note)


def _shared(
    title: str, heads: tuple[str, ...], parts: Mapping[str, float], cell: Callable[[float], Cell], note: str
) -> Table:
    whole = sum(parts.values())
    rows = [Row(name, (cell(part), measured(part, f"{part / whole:.1%}"))) for name, part in parts.items() if part]
    return Table(title, heads, tuple(rows), (Row("All", (cell(whole), Cell(""))),), note)


def _allowed(p: Prediction) -> float:
    """The budget that the plan sets for the device; 0 without one."""
    return p.plan.device_budget or 0
