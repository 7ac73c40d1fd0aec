"""The learning curve: training bits per byte of each step, their running mean, and the validation points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from zeroshard.report.chart import (
    Canvas,
    ChartAxis,
    Figure,
    Frame,
    LegendEntry,
    Point,
    both_widths,
    covering_axis,
    crosses_path,
    dots_path,
    fitted_axis,
    line_path,
    running_mean,
    smoothing_radius,
    thin,
)
from zeroshard.report.run_folder import RunRecord, TrainingPoint, ValidationPoint
from zeroshard.text import format_decimal, format_exact

_BUCKETS = 900
_SMOOTH_FROM = 20
_DENSE = 40


@dataclass(frozen=True, slots=True)
class _Curves:
    """The points of the curves, (step, bits per byte), thinned to the resolution of the drawing."""

    raw: list[Point]
    smooth: list[Point]
    validation: list[Point]
    lost_steps: list[float]
    steps: tuple[float, float]
    values: tuple[float, float]
    caption: str


def loss_figure(run: RunRecord) -> Figure | None:
    """The chart, or None when no step has a finite training loss."""
    training, validation = _points(run.training), _points(run.validation)
    if not training:
        return None
    lost = [float(point.step) for point in run.training if not math.isfinite(point.bits_per_byte)]
    steps = [point.step for point in run.training] + [point.step for point in run.validation]
    span = (float(min(steps)), float(max(steps)))
    values = [value for _, value in (*training, *validation)]
    curves = _Curves(
        raw=_thinned(training, span),
        smooth=_smooth(training),
        validation=_thinned(validation, span),
        lost_steps=[step for step, _ in _thinned([(step, 0.0) for step in lost], span)],
        steps=span,
        values=(min(values), max(values)),
        caption=_caption(training, validation),
    )
    return Figure(
        drawings=both_widths(partial(_draw, curves)),
        legend=_legend(curves, len(training), len(lost)),
        caption=curves.caption,
        readouts=_readouts(curves),
    )


def _points(points: Sequence[TrainingPoint | ValidationPoint]) -> list[Point]:
    return [(float(point.step), point.bits_per_byte) for point in points if math.isfinite(point.bits_per_byte)]


def _thinned(points: list[Point], span: tuple[float, float]) -> list[Point]:
    return thin(points, lambda point: point[0], lambda point: point[1], span, _BUCKETS)


def _smooth(training: list[Point]) -> list[Point]:
    if len(training) < _SMOOTH_FROM:
        return []
    means = running_mean([value for _, value in training], smoothing_radius(len(training)), _BUCKETS)
    return [(training[index][0], mean) for index, mean in means]


def _caption(training: list[Point], validation: list[Point]) -> str:
    (first, start), (last, end) = training[0], training[-1]
    text = (
        f"Training bits per byte from {format_decimal(start, 3)} at step {format_exact(first)}"
        f" to {format_decimal(end, 3)} at step {format_exact(last)}"
    )
    if validation:
        step, best = min(validation, key=lambda point: point[1])
        text += f"; lowest validation {format_decimal(best, 3)} at step {format_exact(step)}"
    return text + "."


def _draw(curves: _Curves, frame: Frame) -> Markup:
    canvas = Canvas(frame, curves.caption)
    x = fitted_axis("step", *curves.steps, frame.x_ticks, whole=True)
    y = covering_axis("bits per byte", *curves.values)
    canvas.axes(x, y)
    canvas.path(line_path(_placed(curves.raw, frame, x, y)), "raw")
    canvas.path(line_path(_placed(curves.smooth, frame, x, y)), "smooth")
    dots = "validation dense" if len(curves.validation) > _DENSE else "validation"
    canvas.path(dots_path(_placed(curves.validation, frame, x, y)), dots)
    canvas.path(crosses_path([(frame.x(x.fraction(step)), frame.y(1)) for step in curves.lost_steps]), "lost")
    return canvas.to_markup()


def _placed(points: list[Point], frame: Frame, x: ChartAxis, y: ChartAxis) -> list[Point]:
    return [(frame.x(x.fraction(step)), frame.y(y.fraction(value))) for step, value in points]


def _legend(curves: _Curves, finite: int, lost: int) -> tuple[LegendEntry, ...]:
    entries = [LegendEntry("line", "raw", "training, each step")]
    if curves.smooth:
        entries.append(LegendEntry("line", "smooth", f"training, mean of ±{smoothing_radius(finite):,} steps"))
    if curves.validation:
        entries.append(LegendEntry("dot", "validation", "validation"))
    if lost:
        entries.append(LegendEntry("cross", "lost", f"loss not finite ({lost:,} {'step' if lost == 1 else 'steps'})"))
    return tuple(entries)


def _readouts(curves: _Curves) -> tuple[tuple[float, str], ...]:
    text: dict[float, list[str]] = {}
    for name, points in (("training", curves.raw), ("validation", curves.validation)):
        for step, value in points:
            text.setdefault(step, []).append(f"{name} {format_decimal(value)}")
    for step in curves.lost_steps:
        text.setdefault(step, []).append("training loss not finite")
    axis = fitted_axis("step", *curves.steps)
    return tuple(
        (round(axis.fraction(step), 5), "\n".join([f"step {format_exact(step)}", *text[step]])) for step in sorted(text)
    )
