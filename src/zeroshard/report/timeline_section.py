"""The timeline of a pipeline in a run folder: three files, and the section of the page that shows it."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from zeroshard.report.run_records import Timelines
from zeroshard.report.timeline_figure import time_unit, timeline_svg
from zeroshard.report.timeline_png import timeline_png
from zeroshard.report.timeline_trace import timeline_trace
from zeroshard.text import format_decimal

SVG, PNG, TRACE = "timeline.svg", "timeline.png", "timeline-trace.json"
NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'  # needed in a file, not in HTML


@dataclass(frozen=True, slots=True)
class TimelineSection:
    """Heading, drawing and caption."""

    title: str
    drawing: Markup
    caption: str


def write_timelines(folder: Path, timelines: Timelines) -> TimelineSection:
    """Write the drawing as SVG and PNG and the trace into a run folder; returns its section of the page."""
    svg = timeline_svg(timelines.drawn)
    (folder / SVG).write_text(svg, encoding="utf-8", errors="replace")
    (folder / PNG).write_bytes(timeline_png(timelines.drawn))
    (folder / TRACE).write_text(timeline_trace(timelines.drawn), encoding="utf-8", errors="replace")
    # the file escapes all text and attributes
    drawing = Markup(svg.replace(NAMESPACE, "", 1))
    title = f"Timeline of {'a few steps' if _goes_on(timelines) else 'one step'}: measured and simulated"
    return TimelineSection(title, drawing, _caption(timelines))


def _goes_on(timelines: Timelines) -> bool:
    """Whether the timelines show several steps of a schedule that never flushes, where versions change."""
    return any(action.version for timeline in timelines.drawn for spans in timeline.spans for action, _, _ in spans)


def _caption(timelines: Timelines) -> str:
    measured, simulated = timelines.measured_seconds, timelines.simulated_seconds
    deviation = 100 * (simulated / measured - 1)
    percent = f"{'+' if deviation > 0 else ''}{format_decimal(deviation, 1)} %"
    steps = "The steps run from an empty pipeline to an empty one. " if _goes_on(timelines) else ""
    return (
        f"Measured {_time(measured)}. Simulated, from the median time of each kind of action and with messages that "
        f"take no time, {_time(simulated)}: a deviation of {percent}. {steps}The folder of this page has "
        f"{SVG}, {PNG} and {TRACE}, which opens in ui.perfetto.dev."
    )


def _time(seconds: float) -> str:
    unit, factor = time_unit(seconds)
    return f"{format_decimal(seconds * factor, 3 if unit == 's' else 1)} {unit}"
