"""Memory against time: every plan of a search as a point, whose shape shows if it fits, and with which results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.planner.search.text import seconds
from zeroshard.report.chart import Chart, Trace, byte_unit, number, numbers, time_unit
from zeroshard.text import format_bytes

WIDE_RANGE = 12.0  # times the least value: a longer range is drawn on a logarithmic scale
FAR = 0.5  # of the greatest value: an axis of values that are all above begins near the least
KINDS = {  # by their style: symbol, colour and meaning
    "fits": ("circle", "var(--accent)", "fits, with the results of an unlimited device"),
    "changed": ("triangle-up", "var(--validation)", "fits, with other results"),
    "unfit": ("x-thin", "var(--lost)", "does not fit"),
}


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One plan in the chart.

    Attributes:
        target: the id of the element that shows the plan.
        name: of the plan, for people.
        style: one of `KINDS`.
    """

    target: str
    name: str
    style: str
    seconds: float
    peak_bytes: int

    @property
    def label(self) -> str:
        """The point in words."""
        return f"{self.name}<br>{format_bytes(self.peak_bytes)}, {seconds(self.seconds)} per step"


def plans_chart(points: Sequence[PlanPoint], room: float, recommended: str | None) -> Chart:
    """The chart.

    Args:
        room: bytes of a device up to which a plan fits.
        recommended: the target of the plan to take; None without one.
    """
    unit, unit_name = byte_unit(max(room, *(point.peak_bytes for point in points)))
    second, second_name = time_unit(max(point.seconds for point in points))
    traces: list[Trace] = [_ring(point, second, unit) for point in points if point.target == recommended]
    for style, (symbol, paint, meaning) in KINDS.items():
        those = [point for point in points if point.style == style]
        if those:
            marker = {"symbol": symbol, "color": paint, "size": 11, "line": {"color": paint, "width": 2.5}}
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": meaning, "marker": marker,
                    "x": numbers(point.seconds / second for point in those),
                    "y": numbers(point.peak_bytes / unit for point in those),
                    "text": [point.label for point in those], "customdata": [point.target for point in those],
                    "hovertemplate": "%{text}<extra></extra>",
                }
            )  # fmt: skip
    line = {"color": "var(--quiet)", "width": 1.5, "dash": "dash"}
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": number(room / unit), "y1": number(room / unit)}
    layout: dict[str, Any] = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": f"time of a step, {second_name}"}, **_scale([p.seconds / second for p in points])},
        "yaxis": {
            "title": {"text": f"peak, {unit_name}"},
            **_scale([size / unit for size in (room, *(p.peak_bytes for p in points))]),
        },
        "shapes": [{**shape, "line": line}],
    }
    caption = (
        f"Memory of the fullest rank against the time of a step; a plan fits below the dashed line, at"
        f" {format_bytes(room)}. A click on a point leads to its plan."
    )
    return Chart(tuple(traces), layout, caption, height=400)


def _ring(point: PlanPoint, second: float, unit: float) -> Trace:
    """The mark of the recommended plan."""
    marker = {"symbol": "circle-open", "color": "var(--ink)", "size": 22, "line": {"width": 2}}
    return {
        "type": "scatter", "mode": "markers", "name": "recommended: plan 1", "marker": marker, "hoverinfo": "skip",
        "x": [number(point.seconds / second)], "y": [number(point.peak_bytes / unit)],
    }  # fmt: skip


def _scale(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis for a wide range of values, ticks at 1, 2 and 5; else one from 0, unless all are far."""
    low, high = min(values), max(values)
    if low > 0 and high / low > WIDE_RANGE:
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
        return {"type": "log", "tickvals": numbers(ticks), "ticktext": [f"{tick:.6g}" for tick in ticks]}
    return {} if low > FAR * high else {"rangemode": "tozero"}
