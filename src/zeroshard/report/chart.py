"""Charts: axes with round ticks, an SVG canvas, and long series thinned. Colours and fonts are the style sheet's."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from markupsafe import Markup

from zeroshard.text import format_bytes

Point = tuple[float, float]
Bands = list[tuple[list[float], list[float]]]  # lower and upper side of each
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One key: ``mark`` is its shape (line, dot, cross, area), ``style`` its colour class."""

    mark: str
    style: str
    text: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart, drawn once for wide and once for narrow windows.

    ``readouts`` are (fraction of the plot's width, text) in order, shown under the pointer; ``holds`` says that a
    reading stays valid until the next one, so that the pointer picks the one before it and not the nearest.
    ``marked`` explains the numbers written into the drawing.
    """

    drawings: tuple[Markup, ...]
    legend: tuple[LegendEntry, ...]
    caption: str
    readouts: tuple[tuple[float, str], ...] = ()
    holds: bool = False
    marked: tuple[tuple[int, str], ...] = ()


def both_widths(draw: Callable[["Frame"], Markup]) -> tuple[Markup, ...]:
    """A drawing for wide and for narrow windows."""
    return draw(WIDE), draw(NARROW)


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """A range of data with its ticks, which places grid lines and points."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def fraction(self, value: float) -> float:
        """Position of ``value`` between ``low`` (0) and ``high`` (1)."""
        return (value - self.low) / (self.high - self.low)


def nice_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high], about ``target`` of them."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * largest else (largest or 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / target))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= span / target * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    # rounding takes off the tail that a float product leaves (0.30000000000000004)
    decimals = max(0, 1 - math.floor(math.log10(step)))
    return [round(k * step, decimals) for k in range(first, max(last, first + 1) + 1)]


def covering_axis(label: str, low: float, high: float) -> ChartAxis:
    """An axis that ends on round ticks outside the data."""
    ticks = nice_ticks(low, high)
    return ChartAxis(label, ticks[0], ticks[-1], tuple((tick, _tick_label(tick)) for tick in ticks))


def fitted_axis(label: str, low: float, high: float, target: int = 8, whole: bool = False) -> ChartAxis:
    """An axis that ends with the data, round ticks inside; ``whole`` drops ticks between integers."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    ticks = [t for t in nice_ticks(low, high, target) if low <= t <= high and not (whole and t % 1)]
    return ChartAxis(label, low, high, tuple((tick, _tick_label(tick)) for tick in ticks))


def bytes_axis(label: str, high: float) -> ChartAxis:
    """From zero to a round number of binary units (200 MiB, not 209,715,200)."""
    unit = 1024.0 ** min(max(int(math.log2(max(high, 1.0)) // 10), 0), 3)
    name = format_bytes(unit).split(" ")[1]
    ticks = nice_ticks(0.0, max(high / unit, 1.0), 4)
    return ChartAxis(
        label, 0.0, ticks[-1] * unit, tuple((tick * unit, f"{_tick_label(tick)} {name}") for tick in ticks)
    )


def _tick_label(tick: float) -> str:
    return f"{tick:,.10g}" if tick == 0 or 1e-6 <= abs(tick) < 1e10 else f"{tick:g}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One size of a drawing and its margins, in viewBox pixels. Charts are drawn once wide and once narrow."""

    name: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: int

    def x(self, fraction: float) -> float:
        """Horizontal position of a fraction of the plot's width."""
        return self.left + fraction * (self.width - self.left - self.right)

    def y(self, fraction: float) -> float:
        """Vertical position of a fraction of the plot's height, from its foot."""
        return self.height - self.bottom - fraction * (self.height - self.top - self.bottom)


WIDE = Frame("wide", 1040, 340, left=72, right=24, top=28, bottom=46, x_ticks=8)
NARROW = Frame("narrow", 360, 260, left=58, right=20, top=28, bottom=42, x_ticks=4)


class Canvas:
    """An SVG image with a title for screen readers; ElementTree escapes every text."""

    def __init__(self, frame: Frame, title: str) -> None:
        self.frame = frame
        self.root = ET.Element(
            "svg",
            {
                "role": "img",
                "class": frame.name,
                "viewBox": f"0 0 {frame.width:g} {frame.height:g}",
                "data-left": f"{frame.x(0):g}",
                "data-right": f"{frame.x(1):g}",
            },
        )
        ET.SubElement(self.root, "title").text = title

    def line(self, start: Point, end: Point, style: str) -> None:
        """A straight line."""
        (x1, y1), (x2, y2) = start, end
        ends = {"x1": short(x1), "y1": short(y1), "x2": short(x2), "y2": short(y2)}
        ET.SubElement(self.root, "line", {"class": style, **ends})

    def text(self, at: Point, content: str, style: str) -> None:
        """One line of text; the style sets its anchor."""
        ET.SubElement(self.root, "text", {"class": style, "x": short(at[0]), "y": short(at[1])}).text = content

    def rect(self, corner: Point, width: float, height: float, style: str) -> None:
        """A rectangle from its upper left corner."""
        box = {"x": short(corner[0]), "y": short(corner[1]), "width": short(width), "height": short(height)}
        ET.SubElement(self.root, "rect", {"class": style, **box})

    def path(self, data: str, style: str) -> None:
        """A path from its data string."""
        if data:
            ET.SubElement(self.root, "path", {"class": style, "d": data})

    def axes(self, x: ChartAxis, y: ChartAxis) -> None:
        """Grid lines at the y ticks, tick marks at the x ticks, and the labels of both axes."""
        frame = self.frame
        foot = frame.y(0)
        for value, label in y.ticks:
            height = frame.y(y.fraction(value))
            self.line((frame.x(0), height), (frame.x(1), height), "grid")
            self.text((frame.x(0) - 8, height + 4), label, "tick end")
        self.x_axis(x, foot)
        self.line((frame.x(0), foot), (frame.x(1), foot), "axis")
        self.text((0, 12), y.label, "label")

    def x_axis(self, x: ChartAxis, foot: float) -> None:
        """Tick marks below ``foot``, and the label of the axis."""
        for value, label in x.ticks:
            place = self.frame.x(x.fraction(value))
            self.line((place, foot), (place, foot + 5), "axis")
            self.text((place, foot + 19), label, "tick middle")
        self.text((self.frame.x(1), self.frame.height - 6), x.label, "label end")

    def bands(
        self, edges: Sequence[float], tops: Sequence[Sequence[float]], y: ChartAxis, styles: Sequence[str]
    ) -> Bands:
        """Stacked stepped bands: ``tops[i][j]`` is the top of band ``j`` from ``edges[i]`` on. Returns their sides."""
        sides: Bands = []
        lower = [self.frame.y(0)] * len(tops)
        for j, style in enumerate(styles):
            upper = [self.frame.y(y.fraction(heights[j])) for heights in tops]
            self.path(band_path(edges, lower, upper), f"band {style}")
            sides.append((lower, upper))
            lower = upper
        return sides

    def to_markup(self) -> Markup:
        """The image as an HTML fragment."""
        # ElementTree has escaped all text and attributes
        return Markup(ET.tostring(self.root, encoding="unicode"))


def short(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def line_path(points: Sequence[Point]) -> str:
    """Path data of a line through points; one point alone becomes a dot under a round line cap."""
    if len(points) == 1:
        return dots_path(points)
    return "".join(f"{'L' if i else 'M'}{short(x)} {short(y)}" for i, (x, y) in enumerate(points))


def dots_path(points: Sequence[Point]) -> str:
    """Path data of zero-length strokes: dots under a round line cap."""
    return "".join(f"M{short(x)} {short(y)}h0" for x, y in points)


def crosses_path(points: Sequence[Point]) -> str:
    """Path data of small diagonal crosses."""
    return "".join(f"M{short(x - 3)} {short(y - 3)}l6 6m-6 0l6 -6" for x, y in points)


def band_path(edges: Sequence[float], lower: Sequence[float], upper: Sequence[float]) -> str:
    """Path data of a stepped band: between ``edges[i]`` and ``edges[i + 1]`` it spans ``lower[i]`` to ``upper[i]``."""
    top = "".join(f"V{short(y)}H{short(edges[i + 1])}" for i, y in enumerate(upper))
    foot = "".join(f"V{short(y)}H{short(edges[i])}" for i, y in reversed(list(enumerate(lower))))
    return f"M{short(edges[0])} {short(lower[0])}{top}{foot}Z"


def thin(
    items: Sequence[T], x: Callable[[T], float], y: Callable[[T], float], span: tuple[float, float], buckets: int
) -> list[T]:
    """Keep the first, lowest, highest and last item of each of ``buckets`` equal parts of ``span``.

    Those four decide every pixel that a line through all items would touch in a column of that width (the M4
    aggregation: Jugel et al., VLDB 2014), so a drawing of the kept items equals a drawing of all. Items are in order
    of x; all are kept when there are no more than ``buckets``.
    """
    if len(items) <= buckets:
        return list(items)
    low, high = span
    width = (high - low) / buckets or 1.0
    kept: list[int] = []
    for _, column in groupby(range(len(items)), key=lambda i: min(int((x(items[i]) - low) / width), buckets - 1)):
        members = list(column)
        lowest = min(members, key=lambda i: y(items[i]))
        highest = max(members, key=lambda i: y(items[i]))
        kept.extend(sorted({members[0], lowest, highest, members[-1]}))
    return [items[i] for i in kept]


def smoothing_radius(count: int) -> int:
    """Steps on each side in the smoothed line's mean: about 3 % of the run in all."""
    return max(2, count // 60)


def running_mean(values: Sequence[float], radius: int, points: int) -> list[tuple[int, float]]:
    """(index, mean of the values within ``radius``) at up to ``points`` evenly spaced indices.

    Near the start the window shrinks equally on both sides, so that the steep first steps are not lifted; at the end
    it only loses its right side.
    """
    last = len(values) - 1
    centres = sorted({round(last * k / max(points - 1, 1)) for k in range(points)})
    means: list[tuple[int, float]] = []
    for centre in centres:
        reach = min(radius, centre)
        window = values[centre - reach : centre + reach + 1]
        means.append((centre, math.fsum(window) / len(window)))
    return means
