"""The load of experts over the steps: a heat map, a row for each expert, one block of rows for each layer."""

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from markupsafe import Markup

from zeroshard.report.chart import WIDE, Canvas, ChartAxis, Figure, Frame, LegendEntry, both_widths, fitted_axis
from zeroshard.report.run_folder import TrainingPoint
from zeroshard.text import format_decimal, format_exact

BOUNDS = (0.05, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # of load over mean load, between the colours
LEGEND = ("below 0.05", "to 0.25", "to 0.5", "to 0.8", "to 1.25", "to 2", "to 4", "above 4 times the mean")
_COLUMNS = 160
_HEIGHT = 320.0  # of all rows, unless they would be lower than a pixel or two
_LOWEST, _HIGHEST = 3.0, 14.0
_GAP, _HEAD = 10.0, 16.0  # between layers, and for the name of one


def experts_figure(points: Sequence[TrainingPoint]) -> Figure | None:
    """The chart, or None without experts."""
    points = [point for point in points if point.loads]
    if not points:
        return None
    layers = {layer: len(load.load) for point in points for layer, load in point.loads.items()}
    columns = _columns(points, layers)
    caption = (
        f"Load of each expert over the mean load of its layer, by step; a row for each expert, from 0 at the top."
        f" {len(layers)} {'layer' if len(layers) == 1 else 'layers'}."
    )
    axis = _steps(points, WIDE)
    readouts = tuple((round(axis.fraction(step), 5), _readout(step, loads)) for step, loads in columns)
    return Figure(
        drawings=both_widths(partial(_draw, points, columns, layers, caption)),
        legend=tuple(LegendEntry("area", f"heat{n}", text) for n, text in enumerate(LEGEND)),
        caption=caption,
        readouts=readouts,
        holds=True,
    )


Columns = list[tuple[int, dict[str, tuple[float, ...]]]]


def _columns(points: Sequence[TrainingPoint], layers: dict[str, int]) -> Columns:
    """First step, and by layer the mean shares of the experts, of each run of equally many steps."""
    length = -(-len(points) // _COLUMNS)
    found: Columns = []
    for first in range(0, len(points), length):
        run = points[first : first + length]
        means = {}
        for layer, size in layers.items():
            shares = [p.loads[layer].shares for p in run if layer in p.loads and len(p.loads[layer].load) == size]
            if shares:
                means[layer] = tuple(math.fsum(each) / len(shares) for each in zip(*shares, strict=True))
        found.append((run[0].step, means))
    return found


def _steps(points: Sequence[TrainingPoint], frame: Frame) -> ChartAxis:
    return fitted_axis("step", float(points[0].step), points[-1].step + 1.0, frame.x_ticks, whole=True)


def _readout(step: int, loads: dict[str, tuple[float, ...]]) -> str:
    lines = [
        f"{layer}: most {format_decimal(max(shares), 2)}, least {format_decimal(min(shares), 2)} of the mean"
        for layer, shares in loads.items()
    ]
    return "\n".join([f"step {format_exact(step)}", *lines])


def _draw(
    points: Sequence[TrainingPoint], columns: Columns, layers: dict[str, int], caption: str, frame: Frame
) -> Markup:
    row = min(_HIGHEST, max(_LOWEST, _HEIGHT / sum(layers.values())))
    height = sum(_HEAD + size * row + _GAP for size in layers.values())
    frame = replace(frame, height=height + frame.bottom, left=2.0, top=0.0)
    canvas = Canvas(frame, caption)
    x = _steps(points, frame)
    edges = [*(frame.x(x.fraction(step)) for step, _ in columns), frame.x(1)]
    top = 0.0
    for layer, size in layers.items():
        canvas.text((frame.left, top + _HEAD - 4), layer, "name")
        top += _HEAD
        for n, (_, loads) in enumerate(columns):
            for expert, share in enumerate(loads.get(layer, ())):
                corner = (edges[n], top + expert * row)
                canvas.rect(corner, edges[n + 1] - edges[n], row, f"heat{bisect(BOUNDS, share)}")
        top += size * row + _GAP
    canvas.x_axis(x, height)
    return canvas.to_markup()
