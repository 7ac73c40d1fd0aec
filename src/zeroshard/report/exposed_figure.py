"""The time that each step waited for offload: stacked causes over the steps."""

from collections.abc import Sequence
from itertools import accumulate

from markupsafe import Markup

from zeroshard.report.figure import Figure, LegendEntry
from zeroshard.report.run_folder import TrainingPoint
from zeroshard.report.scales import ChartAxis, covering_axis, fitted_axis
from zeroshard.report.series import thin
from zeroshard.report.svg import NARROW, WIDE, Canvas, Frame, band_path
from zeroshard.text import format_duration, format_exact

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
    """The causes for which any step waited, with their colour classes, from the foot of the stack up."""
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
        drawings=tuple(_draw(kept, causes, span, caption, frame) for frame in (WIDE, NARROW)),
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


def _draw(
    kept: Sequence[TrainingPoint], causes: dict[str, str], span: tuple[float, float], caption: str, frame: Frame
) -> Markup:
    canvas = Canvas(frame, caption)
    x = _steps(span, frame)
    y = covering_axis("ms exposed", 0.0, 1e3 * max(map(_total, kept)))
    canvas.axes(x, y)
    edges = [*(frame.x(x.fraction(point.step)) for point in kept), frame.x(1)]
    tops = [list(accumulate(1e3 * point.exposed.get(cause, 0.0) for cause in causes)) for point in kept]
    lower = [frame.y(0)] * len(kept)
    for i, style in enumerate(causes.values()):
        upper = [frame.y(y.fraction(heights[i])) for heights in tops]
        canvas.path(band_path(edges, lower, upper), f"band {style}")
        lower = upper
    return canvas.to_markup()
