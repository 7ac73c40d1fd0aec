"""The charts of a run over its steps: learning, speed, ranks, waits for offload and traffic."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from zeroshard.report.chart import (
    BUCKETS,
    Chart,
    Trace,
    area,
    axes,
    byte_unit,
    colour,
    dash,
    line,
    numbers,
    running_mean,
    smoothing_radius,
    thin,
    time_unit,
)
from zeroshard.report.run_records import RunRecord, TrafficRecord, TrainingPoint, ValidationPoint
from zeroshard.text import format_decimal, format_duration, format_exact

Point = tuple[float, float]
_FINE = 600  # buckets of the loss
_SMOOTH_FROM = 20
_CAUSES = {  # and their colours, which are the same in chart and table, from the foot of the stack up
    "gradients down": 1,
    "update": 3,
    "parameters up": 0,
    "activations down": 4,
    "activations up": 2,
    "disk": 5,
}
_OTHER = 7
COURSE = (  # title, attribute of a step, label of the axis and caption of the smaller charts
    ("Learning rate", "learning_rate", "learning rate", "Learning rate of each step."),
    ("Gradient norm", "grad_norm", "norm before clipping", "Gradient norm of each step, before clipping."),
    ("Speed", "tokens_per_s", "tokens/s", "Tokens per second of all ranks, step by step."),
    ("MFU", "mfu", "MFU", "Model FLOPs per second, as a share of the device's peak rate."),
)


def finite(points: Sequence[TrainingPoint | ValidationPoint], name: str) -> list[Point]:
    """(step, value) of the points at which an attribute is a finite number."""
    values = ((float(point.step), float(getattr(point, name))) for point in points)
    return [(step, value) for step, value in values if math.isfinite(value)]


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> tuple[list[float], list[float]]:
    """The points without those that a drawing does not need, as their steps and their values."""
    kept = thin(points, lambda p: p[0], lambda p: p[1], (points[0][0], points[-1][0]), buckets) if points else []
    return [step for step, _ in kept], [value for _, value in kept]


def smoothed(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The running mean of the points, with its steps; empty for few points."""
    if len(points) < _SMOOTH_FROM:
        return [], []
    means = running_mean([value for _, value in points], smoothing_radius(len(points)), _FINE)
    return [points[index][0] for index, _ in means], [mean for _, mean in means]


def loss_chart(run: RunRecord) -> Chart | None:
    """Training loss of each step, its running mean, and the validation points; None without a finite loss."""
    training, validation = finite(run.training, "bits_per_byte"), finite(run.validation, "bits_per_byte")
    if not training:
        return None
    lost = [float(point.step) for point in run.training if not math.isfinite(point.bits_per_byte)]
    traces = [line("training, each step", *thinned(training, _FINE), "var(--raw)", width=1)]
    means = smoothed(training)
    if means[0]:
        radius = smoothing_radius(len(training))
        traces.append(line(f"training, mean of ±{radius:,} steps", *means, "var(--accent)", width=2.25))
    if validation:
        traces.append(_dots("validation", *thinned(validation), "var(--validation)"))
    if lost:
        top = [max(value for _, value in training)] * len(lost)
        crosses = {"symbol": "x", "hovertemplate": "loss not finite"}
        traces.append(
            _dots(f"loss not finite ({len(lost):,} steps)", lost[:BUCKETS], top[:BUCKETS], "var(--lost)", **crosses)
        )
    (first, start), (last, end) = training[0], training[-1]
    caption = (
        f"Training bits per byte from {format_decimal(start, 3)} at step {format_exact(first)}"
        f" to {format_decimal(end, 3)} at step {format_exact(last)}"
    )
    if validation:
        step, best = min(validation, key=lambda point: point[1])
        caption += f"; lowest validation {format_decimal(best, 3)} at step {format_exact(step)}"
    return Chart(tuple(traces), axes("step", "bits per byte"), f"{caption}.", height=380)


def course_charts(run: RunRecord) -> list[tuple[str, Chart]]:
    """Learning rate, gradient norm, tokens per second and MFU over the steps, with their titles; those with numbers."""
    found = []
    for title, name, label, caption in COURSE:
        points = finite(run.training, name)
        if not points:
            continue
        traces = [line(label, *thinned(points), "var(--accent)", width=1.5)]
        layout = axes("step", label, **({"tickformat": ".1%", "rangemode": "nonnegative"} if name == "mfu" else {}))
        found.append((title, Chart(tuple(traces), layout, caption, height=260)))
    return found


def ranks_charts(run: RunRecord) -> list[tuple[str, Chart]]:
    """Busy seconds, memory and exposed seconds of every rank over the steps, with their titles."""
    points = [point for point in run.training if point.ranks]
    wanted: tuple[tuple[str, str, Callable[[float], tuple[float, str]], str], ...] = (
        ("Busy time of each rank", "busy_seconds", time_unit, "Time of each step without waits for other ranks."),
        ("Resident memory of each rank", "rss_bytes", byte_unit, "Resident memory of each rank's process."),
        ("Memory by the ledger between steps", "memory_bytes", byte_unit, "Bytes on each rank's device after a step."),
        ("Exposed time of each rank", "exposed_seconds", time_unit, "Time that each rank waited for offload."),
    )
    found = []
    for title, name, unit_of, caption in wanted:
        rows = [(float(point.step), point.ranks[name]) for point in points if point.ranks.get(name)]
        largest = max((max(values) for _, values in rows), default=0.0)
        if largest <= 0:
            continue
        unit, unit_name = unit_of(largest)
        names = points[-1].rank_names
        traces = []
        for i, rank in enumerate(names):
            series = [(step, values[i] / unit) for step, values in rows if i < len(values)]
            traces.append(line(rank, *thinned(series), colour(i), dash=dash(i), width=1.5))
        found.append((title, Chart(tuple(traces), axes("step", unit_name), caption, height=260)))
    return found


def causes_of(points: Sequence[TrainingPoint]) -> dict[str, str]:
    """The causes of waits, with their colour classes, from the bottom of the stack up."""
    found = {cause: None for point in points for cause, seconds in point.exposed.items() if seconds > 0}
    known = [cause for cause in _CAUSES if cause in found]
    ordered = [*known, *(cause for cause in found if cause not in _CAUSES)]
    return {cause: f"hue{_CAUSES.get(cause, _OTHER)}" for cause in ordered}


def exposed_chart(points: Sequence[TrainingPoint]) -> Chart | None:
    """Time of each step that waited for offload, stacked by cause; None if no step waited."""
    causes = causes_of(points)
    if not causes:
        return None
    kept = thin(points, lambda p: p.step, _exposed, (points[0].step, points[-1].step + 1.0), BUCKETS)
    longest = max(points, key=_exposed)
    steps = [float(point.step) for point in kept]
    traces = [
        area(cause, steps, [1e3 * point.exposed.get(cause, 0.0) for point in kept], f"var(--{hue})",
             hovertemplate="%{y:.2f} ms")
        for cause, hue in causes.items()
    ]  # fmt: skip
    caption = (
        f"Time that each step waited for offload, by cause; at most {format_duration(_exposed(longest))},"
        f" in step {format_exact(longest.step)}."
    )
    return Chart(tuple(traces), axes("step", "ms exposed"), caption, logarithmic=False)


def _dots(name: str, x: Sequence[float], y: Sequence[float], paint: str, symbol: str = "circle", **more: Any) -> Trace:
    marker = {"color": paint, "size": 8, "symbol": symbol}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": numbers(x),
        "y": numbers(y),
        "marker": marker,
        **more,
    }


def _exposed(point: TrainingPoint) -> float:
    return sum(point.exposed.values())


def traffic_chart(rows: Sequence[TrafficRecord]) -> Chart | None:
    """Elements on the wire by purpose, formula beside measured; None without traffic."""
    sizes = [n for row in rows for n in (row.planned_elements, row.measured_elements) if math.isfinite(n) and n > 0]
    if not sizes:
        return None
    traces: list[Trace] = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": [row.purpose for row in rows],
            "x": numbers(getattr(row, attribute) for row in rows), "marker": {"color": paint},
            "hovertemplate": "%{x:,} elements",
        }
        for name, attribute, paint in (
            ("measured", "measured_elements", "var(--accent)"), ("formula", "planned_elements", "var(--validation)"),
        )
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "elements"}}, "barmode": "group", "hovermode": "y unified",
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"traceorder": "reversed"},
    }  # fmt: skip
    caption = "Elements on the wire in one step by purpose, formula against measured."
    return Chart(tuple(traces), layout, caption, logarithmic=False, height=130 + 56 * len(rows))
