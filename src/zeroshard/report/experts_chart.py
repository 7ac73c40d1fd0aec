"""The load of experts over the steps: the balance of every layer as lines, and a heat map of the experts of one."""

import math
from bisect import bisect
from collections.abc import Sequence
from typing import Any

from zeroshard.report.chart import Chart, Trace, axes, colour, dash, line, numbers
from zeroshard.report.run_records import ExpertLoad, TrainingPoint

BOUNDS = (0.05, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # of load over mean load, between the colours
_COLUMNS = 80  # of the heat map
_LINES = 240  # points of a line
_HEATS = len(BOUNDS) + 1


def balance_charts(points: Sequence[TrainingPoint]) -> list[Chart]:
    """The most and the least load of an expert over the mean, and the dropped share, if any; none without experts."""
    columns = _columns(points, _LINES)
    if not columns:
        return []
    loads: list[Trace] = []
    drops: list[Trace] = []
    for i, layer in enumerate(_sizes(points)):
        rows = [(step, each[layer]) for step, each in columns if layer in each]
        steps = [float(step) for step, _ in rows]
        most, least = ([limit(load.shares) for _, load in rows] for limit in (max, min))
        group = {"legendgroup": layer}
        loads.append(line(layer, steps, most, colour(i), hovertemplate="most %{y:.2f}", **group))
        shown = {"hovertemplate": "least %{y:.2f}", "showlegend": False}
        loads.append(line(layer, steps, least, colour(i), dash="dot", **group, **shown))
        dropped = [load.dropped for _, load in rows]
        drops.append(line(layer, steps, dropped, colour(i), dash=dash(i), hovertemplate="%{y:.2%}"))
    about = "Load of the fullest (solid) and of the emptiest (dotted) expert of each layer, over the mean (1)."
    charts = [Chart(tuple(loads), axes("step", "load / mean load"), about)]
    if any(load.dropped for _, each in columns for load in each.values()):
        about = "Share of the choices that had no place in their expert's capacity."
        charts.append(Chart(tuple(drops), axes("step", "dropped", tickformat=".1%"), about, height=240))
    return charts


def heat_chart(points: Sequence[TrainingPoint]) -> Chart | None:
    """The load of every expert over the steps, in colours; a menu chooses the layer. None without experts."""
    columns = _columns(points, _COLUMNS)
    if not columns:
        return None
    sizes = _sizes(points)
    first, last = columns[0][0], points[-1].step + 1
    width = (last - first) / len(columns)
    traces = [_heat(layer, columns, width, visible=i == 0) for i, layer in enumerate(sizes)]
    layout: dict[str, Any] = {
        **axes("step", "expert", autorange="reversed"), "barmode": "overlay", "hovermode": "closest",
        "bargap": 0, "showlegend": False,
    }  # fmt: skip
    caption = (
        f"Load of each expert over the mean load of its layer, by step; a row for each expert."
        f" {len(sizes)} {'layer' if len(sizes) == 1 else 'layers'}."
    )
    choices = tuple(sizes) if len(sizes) > 1 else ()
    height = 150 + min(360, max(160, 12 * max(sizes.values())))
    return Chart(tuple(traces), layout, caption, logarithmic=False, height=height, choices=choices, shaded=True)


def _heat(layer: str, columns: Sequence[tuple[int, dict[str, ExpertLoad]]], width: float, visible: bool) -> Trace:
    """One bar for each expert and column."""
    cells = [
        (step, expert, share)
        for step, loads in columns if layer in loads
        for expert, share in enumerate(loads[layer].shares)
    ]  # fmt: skip
    scale = [[edge / _HEATS, f"var(--heat{n})"] for n in range(_HEATS) for edge in (n, n + 1)]
    ticks = {"tickvals": [n + 0.5 for n in range(len(BOUNDS))], "ticktext": [f"{bound:g}" for bound in BOUNDS]}
    ink = {"color": "var(--ink)"}
    bar = {
        "title": {"text": "load / mean", "font": ink},
        "tickfont": ink,
        "thickness": 12,
        "outlinewidth": 0,
        "len": 1,
        **ticks,
    }
    return {
        "type": "bar", "name": layer, "visible": visible,
        "x": numbers(step + width / 2 for step, _, _ in cells), "width": width,
        "y": [1] * len(cells), "base": [expert - 0.5 for _, expert, _ in cells],
        "customdata": [[step, expert, float(f"{share:.4g}")] for step, expert, share in cells],
        "hovertemplate": "step %{customdata[0]}, expert %{customdata[1]}: %{customdata[2]} of the mean<extra></extra>",
        "marker": {"color": [bisect(BOUNDS, share) for *_, share in cells], "colorscale": scale, "cmin": -0.5,
                   "cmax": _HEATS - 0.5, "showscale": True, "colorbar": bar, "line": {"width": 0}},
    }  # fmt: skip


def _sizes(points: Sequence[TrainingPoint]) -> dict[str, int]:
    """The number of experts of each layer."""
    return {layer: len(load.load) for point in points for layer, load in point.loads.items()}


def _columns(points: Sequence[TrainingPoint], most: int) -> list[tuple[int, dict[str, ExpertLoad]]]:
    """First step and mean readings by layer of each run of equally many steps, at most ``most`` of them."""
    points = [point for point in points if point.loads]
    length = -(-len(points) // most) or 1
    sizes = _sizes(points)
    found = []
    for begin in range(0, len(points), length):
        run = points[begin : begin + length]
        means = {}
        for layer, size in sizes.items():
            loads = [p.loads[layer] for p in run if layer in p.loads and len(p.loads[layer].load) == size]
            if loads:
                means[layer] = _mean(loads)
        found.append((run[0].step, means))
    return found


def _mean(loads: Sequence[ExpertLoad]) -> ExpertLoad:
    """The mean of several steps' readings, of their shares."""
    count = len(loads)
    shares = tuple(math.fsum(each) / count for each in zip(*(load.shares for load in loads), strict=True))
    return ExpertLoad(shares, math.fsum(load.dropped for load in loads) / count, loads[0].entropy)
