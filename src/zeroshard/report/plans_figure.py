"""Memory against time: every plan of a search as a point, whose shape shows if it fits, and with which results."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from zeroshard.planner.search.text import seconds
from zeroshard.report.chart import Canvas, ChartAxis, Figure, Frame, LegendEntry, both_widths, nice_ticks, short
from zeroshard.text import format_bytes

WIDE_RANGE = 12.0  # times the least value: a longer range is drawn on a logarithmic scale
FAR = 0.5  # of the greatest time: an axis of times that are all above begins at the least
ROOM = 0.06  # of an axis, beside the outermost points
STEPS = (1, 2, 5)  # ticks of a decade
KINDS = {  # by their style: the shape, and its meaning
    "fits": ("dot", "fits, with the results of an unlimited device"),
    "changed": ("triangle", "fits, with other results"),
    "unfit": ("cross", "does not fit"),
}
SHAPES: dict[str, Callable[[float, float], str]] = {
    "fits": lambda x, y: f"M{short(x - 5)} {short(y)}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "changed": lambda x, y: f"M{short(x)} {short(y - 6.5)}l6.5 11.5h-13Z",
    "unfit": lambda x, y: f"M{short(x - 5)} {short(y - 5)}l10 10m-10 0l10 -10",
}
RING, TOUCH = 10.0, 13.0  # radii around a point, in pixels


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
        meaning = KINDS[self.style][1]
        return f"{self.name}: {format_bytes(self.peak_bytes)}, {seconds(self.seconds)} per step, {meaning}"


def plans_figure(points: Sequence[PlanPoint], room: float, recommended: str | None) -> Figure:
    """The chart.

    Args:
        room: bytes of a device up to which a plan fits.
        recommended: the target of the plan to take; None without one.
    """
    caption = "Memory of the fullest rank against the time of a step. Each point leads to its plan."
    styles = [style for style in KINDS if any(point.style == style for point in points)]
    legend = [LegendEntry(KINDS[style][0], style, KINDS[style][1]) for style in styles]
    if recommended is not None:
        legend.insert(0, LegendEntry("ring", "recommended", "recommended: plan 1"))
    return Figure(both_widths(partial(_draw, points, room, recommended, caption)), tuple(legend), caption)


def _draw(points: Sequence[PlanPoint], room: float, recommended: str | None, caption: str, frame: Frame) -> Markup:
    canvas = Canvas(frame, caption)
    canvas.root.set("role", "group")  # an image would hide its links
    canvas.root.set("aria-label", caption)
    x = _scaled("time of a step", [point.seconds for point in points], _tick_seconds, frame.x_ticks)
    y = _scaled("peak", [room, *(point.peak_bytes for point in points)], _tick_bytes, 5, 1024.0)
    canvas.axes(x, y)
    height = frame.y(_at(y, room))
    canvas.line((frame.x(0), height), (frame.x(1), height), "room")
    canvas.text((frame.x(1), height - 5), f"a plan fits up to {format_bytes(room)}", "label end")
    for point in sorted(points, key=lambda one: (one.style != "unfit", one.target == recommended)):
        _draw_point(canvas, point, (frame.x(_at(x, point.seconds)), frame.y(_at(y, point.peak_bytes))), recommended)
    return canvas.to_markup()


def _draw_point(canvas: Canvas, point: PlanPoint, at: tuple[float, float], recommended: str | None) -> None:
    link = ET.SubElement(canvas.root, "a", {"href": f"#{point.target}", "class": f"point {point.style}"})
    link.set("aria-label", point.label)
    ET.SubElement(link, "title").text = point.label
    circle = {"cx": short(at[0]), "cy": short(at[1])}
    ET.SubElement(link, "circle", {"class": "touch", "r": short(TOUCH), **circle})
    if point.target == recommended:
        ET.SubElement(link, "circle", {"class": "recommended", "r": short(RING), **circle})
    ET.SubElement(link, "path", {"class": "shape", "d": SHAPES[point.style](*at)})


def _scaled(
    label: str, values: Sequence[float], text: Callable[[float], str], target: int, base: float = 10.0
) -> ChartAxis:
    """An axis with room beside the outermost values: from 0, of near times from the least, of far ones logarithmic."""
    low, high = min(values), max(values)
    if low > 0 and high / low > WIDE_RANGE:
        start, end = math.log(low), math.log(high)
        beside = ROOM * (end - start)
        ticks = [tick for tick in _decades(low, high, base) if start - beside <= math.log(tick) <= end + beside]
        while len(ticks) > target + 1:
            ticks = ticks[::2]
        named = tuple((math.log(tick), text(tick)) for tick in ticks)
        return ChartAxis(f"{label}, logarithmic", start - beside, end + beside, named)
    beside = ROOM * (high - low)
    start = low - beside if base == 10.0 and beside > 0 and low > FAR * high else 0.0
    unit = base ** math.floor(math.log(max(high, 1e-12), base)) if high > 0 else 1.0
    end = high + ROOM * (high - start) or 1.0
    ticks = [tick * unit for tick in nice_ticks(start / unit, end / unit, target) if start <= tick * unit <= end]
    return ChartAxis(label, start, end, tuple((tick, text(tick)) for tick in ticks))


def _tick_seconds(time: float) -> str:
    unit, factor = ("s", 1.0) if time >= 1 or not time else ("ms", 1e3) if time >= 1e-3 else ("µs", 1e6)
    return f"{time * factor:.6g} {unit}"


def _tick_bytes(nbytes: float) -> str:
    return format_bytes(nbytes).replace(".00", "")


def _decades(low: float, high: float, base: float) -> list[float]:
    """Round numbers that cover a range: 1, 2 and 5 times powers of ten; of bytes, powers of two."""
    if base == 10.0:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [step * 10.0**power for power in powers for step in STEPS]
    return [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]


def _at(axis: ChartAxis, value: float) -> float:
    """The fraction of an axis that `_scaled` made."""
    return axis.fraction(math.log(value) if "logarithmic" in axis.label else value)
