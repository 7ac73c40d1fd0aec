"""Traffic: the wire volume of one step by purpose, formula against measured; and time exposed by offload, by cause."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from markupsafe import Markup

from zeroshard.report.chart import (
    WIDE,
    Canvas,
    ChartAxis,
    Figure,
    Frame,
    LegendEntry,
    both_widths,
    covering_axis,
    fitted_axis,
    thin,
)
from zeroshard.report.run_folder import TrafficRecord, TrainingPoint
from zeroshard.text import format_count, format_duration, format_exact

_ROW = 54.0
_BAR = 12.0
_VALUE_ROOM = 84.0


def traffic_figure(rows: tuple[TrafficRecord, ...]) -> Figure | None:
    """The chart, or None without measured or expected traffic."""
    sizes = [n for row in rows for n in (row.planned_elements, row.measured_elements) if math.isfinite(n) and n > 0]
    if not sizes:
        return None
    caption = "Elements on the wire in one step by purpose, formula against measured."
    return Figure(
        drawings=both_widths(partial(_draw_bars, rows, max(sizes), caption)),
        legend=(LegendEntry("area", "planned", "formula"), LegendEntry("area", "measured", "measured")),
        caption=caption,
    )


def _draw_bars(rows: tuple[TrafficRecord, ...], largest: float, caption: str, frame: Frame) -> Markup:
    frame = replace(frame, height=_ROW * len(rows), left=2.0, right=_VALUE_ROOM)
    canvas = Canvas(frame, caption)
    for i, row in enumerate(rows):
        head = i * _ROW + 13
        canvas.text((frame.left, head), row.purpose, "name")
        for nth, (style, n) in enumerate((("planned", row.planned_elements), ("measured", row.measured_elements))):
            top = head + 6 + nth * (_BAR + 2)
            length = (frame.x(1) - frame.x(0)) * max(n, 0.0) / largest if math.isfinite(n) else 0.0
            canvas.rect((frame.left, top), length, _BAR, style)
            canvas.text((frame.left + length + 6, top + _BAR - 2), format_count(n), "tick")
    return canvas.to_markup()


_BUCKETS = 360
_CAUSES = {  # and their colours, which are the same in chart and table, from the foot of the stack up
    "gradients down": "hue1",
    "update": "hue3",
    "parameters up": "hue0",
    "activations down": "hue4",
    "activations up": "hue2",
    "disk": "hue5",
}
_OTHER = "hue7"


def causes_of(points: Sequence[TrainingPoint]) -> dict[str, str]:
    """The causes of waits, with their colour classes, from the bottom of the stack up."""
    found = {cause: None for point in points for cause, seconds in point.exposed.items() if seconds > 0}
    known = [cause for cause in _CAUSES if cause in found]
    return {
        cause: _CAUSES.get(cause, _OTHER) for cause in [*known, *(cause for cause in found if cause not in _CAUSES)]
    }


def exposed_figure(points: Sequence[TrainingPoint]) -> Figure | None:
    """The chart, or None if no step waited."""
    causes = causes_of(points)
    if not causes:
        return None
    span = (float(points[0].step), points[-1].step + 1.0)
    kept = thin(points, lambda p: p.step, _total, span, _BUCKETS)
    longest = max(points, key=_total)
    caption = (
        f"Time that each step waited for offload, by cause; at most {format_duration(_total(longest))},"
        f" in step {format_exact(longest.step)}."
    )
    axis = _steps(span, WIDE)
    return Figure(
        drawings=both_widths(partial(_draw_bands, kept, causes, span, caption)),
        legend=tuple(LegendEntry("area", style, cause) for cause, style in reversed(causes.items())),
        caption=caption,
        readouts=tuple((round(axis.fraction(point.step), 5), _readout(point, causes)) for point in kept),
        holds=True,
    )


def _total(point: TrainingPoint) -> float:
    return sum(point.exposed.values())


def _steps(span: tuple[float, float], frame: Frame) -> ChartAxis:
    return fitted_axis("step", *span, frame.x_ticks, whole=True)


def _readout(point: TrainingPoint, causes: dict[str, str]) -> str:
    parts = [f"{cause} {format_duration(point.exposed.get(cause, 0.0))}" for cause in reversed(causes)]
    return "\n".join([f"step {format_exact(point.step)}", f"all {format_duration(_total(point))}", *parts])


def _draw_bands(
    kept: Sequence[TrainingPoint], causes: dict[str, str], span: tuple[float, float], caption: str, frame: Frame
) -> Markup:
    canvas = Canvas(frame, caption)
    x = _steps(span, frame)
    y = covering_axis("ms exposed", 0.0, 1e3 * max(map(_total, kept)))
    canvas.axes(x, y)
    edges = [*(frame.x(x.fraction(point.step)) for point in kept), frame.x(1)]
    tops = [list(accumulate(1e3 * point.exposed.get(cause, 0.0) for cause in causes)) for point in kept]
    canvas.bands(edges, tops, y, list(causes.values()))
    return canvas.to_markup()
