"""Drawing primitives: an SVG canvas, a plot frame, and axes. Colours and fonts are the page's style sheet's."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from zeroshard.report.scales import ChartAxis

Point = tuple[float, float]


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
        """Horizontal place of a fraction of the plot's width."""
        return self.left + fraction * (self.width - self.left - self.right)

    def y(self, fraction: float) -> float:
        """Vertical place of a fraction of the plot's height, counted from its foot."""
        return self.height - self.bottom - fraction * (self.height - self.top - self.bottom)


WIDE = Frame("wide", 1040, 340, left=72, right=24, top=28, bottom=46, x_ticks=8)
NARROW = Frame("narrow", 360, 260, left=58, right=20, top=28, bottom=42, x_ticks=4)


class Canvas:
    """An SVG image with a title for those who cannot see it; ElementTree escapes every text."""

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
        """One line of text; its anchor comes with the style."""
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
        for value, label in x.ticks:
            place = frame.x(x.fraction(value))
            self.line((place, foot), (place, foot + 5), "axis")
            self.text((place, foot + 19), label, "tick middle")
        self.line((frame.x(0), foot), (frame.x(1), foot), "axis")
        self.text((frame.x(1), frame.height - 6), x.label, "label end")
        self.text((0, 12), y.label, "label")

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
