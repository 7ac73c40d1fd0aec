"""Timelines of a pipeline as a drawing: one row per rank, one box per compute, several timelines on one time axis.

`lay_out` places everything, for any file format; `timeline_svg` and `timeline_png` write its pictures to files.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median

from zeroshard.schedule.actions import Kind
from zeroshard.schedule.simulate import Span, Timeline

LEFT, RIGHT, TOP = 62.0, 18.0, 14.0
NARROWEST, WIDEST = 1000.0, 1600.0
BOX = 15.0  # pixels of a typical forward
ROW, VERSIONED_ROW, LEAST_ROW, ALL_ROWS = 24.0, 29.0, 7.0, 840.0
HEAD, BETWEEN = 26.0, 16.0
SIZES = (11.0, 10.0, 9.0, 8.0)  # of the numbers in boxes, in pixels
DIGIT = 0.6  # width of a digit, of its size
TICKS = 10  # of the time axis, about
TIPS = 1000  # boxes; with more, they have no tips under the pointer
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "backward: input gradient",
    Kind.WEIGHT_GRADIENT: "backward: weight gradient",
    Kind.UPDATE: "update",
    Kind.REDUCE: "reduction over replicas",
}
# Fills for light and dark pages: blue, greens and orange differ for all kinds of colour vision.
FILLS = {
    Kind.FORWARD: ("#2f6db5", "#5794dc"),
    Kind.BACKWARD: ("#3d9c5f", "#4fb274"),
    Kind.INPUT_GRADIENT: ("#1c7350", "#319a70"),
    Kind.WEIGHT_GRADIENT: ("#b9dc95", "#b4d98e"),
    Kind.UPDATE: ("#e3a13b", "#e6a94b"),
    Kind.REDUCE: ("#9d95b5", "#8d84a8"),
}
PAGE, TRACK, INK, QUIET = (
    ("#ffffff", "#15181b"),
    ("#eceeec", "#262b30"),
    ("#23282d", "#e3e6e8"),
    ("#5f6870", "#9ba4ab"),
)
WHITE, BLACK = "#ffffff", "#000000"


class Fill(ABC):
    """Fill of boxes, on light and dark pages."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for a style sheet."""

    @abstractmethod
    def fill(self, dark: bool) -> str:
        """The colour, as #rrggbb."""

    def ink(self, dark: bool) -> str:
        """The colour of text inside: white or black, whichever has more contrast."""
        return WHITE if _luminance(self.fill(dark)) < 0.179 else BLACK  # equal contrast of both


@dataclass(frozen=True)
class Paint(Fill):
    """The fill of a box by its kind of action and the place of its chunk among the rank's chunks.

    Chunks go from the full colour half way to the page's.
    """

    kind: Kind
    chunk: int
    chunks: int

    def fill(self, dark: bool) -> str:
        """The colour, as #rrggbb."""
        share = 0.55 * self.chunk / max(1, self.chunks - 1)
        return _mixed(FILLS[self.kind][dark], PAGE[dark], share)

    @property
    def name(self) -> str:
        """A name for a style sheet."""
        return f"{self.kind.lower()}{self.chunk}of{self.chunks}"


@dataclass(frozen=True)
class Labels:
    """A line of text at its baseline; the style gives colour and weight, a `Fill` those of text in such a box."""

    x: float
    y: float
    text: str
    style: str | Fill
    size: float
    anchor: str = "start"


@dataclass
class Picture:
    """A drawing laid out, in pixels from the upper left corner.

    Attributes:
        tracks: (x, y, width, height) of the ranks' whole time, which shows where it is idle.
        boxes: for each paint and height, (x, y of the middle, width).
        lines: (x1, y1, x2, y2) of the axis.
        swatches: (x, y, width, height, paint) of the legend; None is the paint of a track.
        tips: (x, y, width, height, text) for the pointer; empty in large pictures.
    """

    width: float
    height: float
    title: str
    tracks: list[tuple[float, float, float, float]] = field(default_factory=list)
    boxes: dict[tuple[Fill, float], list[tuple[float, float, float]]] = field(default_factory=dict)
    labels: list[Labels] = field(default_factory=list)
    lines: list[tuple[float, float, float, float]] = field(default_factory=list)
    swatches: list[tuple[float, float, float, float, Fill | None]] = field(default_factory=list)
    tips: list[tuple[float, float, float, float, str]] = field(default_factory=list)


def lay_out(timelines: Sequence[Timeline], title: str = "") -> Picture:
    """Place timelines one above the other, each from its own first start, over one time axis.

    Computes, updates and reductions are drawn; other actions, and those that take no time, are left out.
    """
    drawn = [_Drawn(timeline) for timeline in timelines]
    end = max([d.end for d in drawn], default=0) or 1.0
    width = LEFT + RIGHT + BOX * end / min([d.usual for d in drawn if d.usual], default=end)
    width = min(max(width, NARROWEST), WIDEST)
    picture = Picture(width, 0, title or "; ".join(timeline.name for timeline in timelines))
    scale = (width - LEFT - RIGHT) / end
    tips = sum(len(row) for d in drawn for row in d.rows) <= TIPS
    y = TOP
    if title:
        picture.labels.append(Labels(LEFT, y + 17, title, "title", 17))
        y += 32
    for d in drawn:
        y = d.place(picture, y, scale, tips) + BETWEEN
    place_axis(picture, y - BETWEEN + 6, end)
    picture.height = _legend(picture, y - BETWEEN + 58, any(d.versions for d in drawn)) + 20
    return picture


class _Drawn:
    """One timeline with the sizes of its drawing."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        starts = [start for spans in timeline.spans for _, start, _ in spans[:1]]
        self.start = min(starts, default=0)
        self.rows = [[s for s in spans if s[0].kind in NAMES and s[2] > s[1]] for spans in timeline.spans]
        self.end = max([row[-1][2] - self.start for row in self.rows if row], default=0)
        forwards = [end - start for row in self.rows for action, start, end in row if action.kind is Kind.FORWARD]
        self.usual = median(forwards) if forwards else 0
        # a chunk's place among those of its rank
        held = [sorted({action.chunk for action, _, _ in row}) for row in self.rows]
        self.shades = [{chunk: place for place, chunk in enumerate(chunks)} for chunks in held]
        self.chunks = max([len(chunks) for chunks in held], default=1)
        self.newest = max([action.version for row in self.rows for action, _, _ in row], default=0)
        pitch = min(VERSIONED_ROW if self.newest else ROW, ALL_ROWS / max(1, len(self.rows)))
        self.pitch = max(pitch, LEAST_ROW)
        self.versions = self.newest > 0 and self.pitch >= ROW  # whether there is room to write them
        self.height = self.pitch - (3 if self.pitch >= 16 else 1)

    def place(self, picture: Picture, y: float, scale: float, tips: bool) -> float:
        """Put the timeline into the picture with its upper edge at `y`; returns the lower edge."""
        picture.labels.append(Labels(LEFT, y + 14, self.timeline.name, "name", 13))
        notes = "  \N{MIDDLE DOT}  ".join(self.timeline.notes)
        picture.labels.append(Labels(LEFT + 18 + 7.8 * len(self.timeline.name), y + 14, notes, "quiet", 12))
        y += HEAD
        self._fit_numbers(scale)
        every = -(-13 // self.pitch)
        for rank, row in enumerate(self.rows):
            top = y + rank * self.pitch
            picture.tracks.append((LEFT, top, self.end * scale, self.height))
            if rank % every == 0:
                middle = top + self.height / 2
                picture.labels.append(Labels(LEFT - 8, middle + 4, f"rank {rank}", "quiet", 11.5, "end"))
            self._place_row(picture, row, rank, top, scale)
            if tips:
                picture.tips += [self._tip(span, top, scale) for span in row]
        return y + len(self.rows) * self.pitch

    def _place_row(self, picture: Picture, row: list[Span], rank: int, top: float, scale: float) -> None:
        middle, left = top + self.height / 2, LEFT - self.start * scale
        shades, boxes = self.shades[rank], picture.boxes
        paints: dict[tuple[str, int], tuple[Fill, list[tuple[float, float, float]]]] = {}
        for action, start, end in row:
            key = (action.kind.value, action.chunk)
            if key not in paints:
                shade = Paint(action.kind, shades[action.chunk], self.chunks)
                paints[key] = shade, boxes.setdefault((shade, self.height), [])
            paint, places = paints[key]
            wide = (end - start) * scale
            gap = 1 if wide > 12 else wide / 12
            places.append((left + start * scale + gap / 2, middle, wide - gap))
            if wide >= self.room and action.microbatch is not None:
                x, y = left + (start + end) / 2 * scale, middle + 0.36 * self.size - (4 if self.versions else 0)
                picture.labels.append(Labels(x, y, str(action.microbatch), paint, self.size, "middle"))
                if wide >= self.version_room:
                    picture.labels.append(Labels(x, middle + 10, f"v{action.version}", paint, SIZES[-1], "middle"))

    def _fit_numbers(self, scale: float) -> None:
        """Choose the largest size at which the longest number fits the usual forward, else the least.

        All boxes with room for the longest number have one, so that none seems to be missing.
        """
        digits = len(str(max([action.microbatch or 0 for row in self.rows for action, _, _ in row], default=0)))
        fitting = (size for size in SIZES if digits * DIGIT * size <= self.usual * scale - 2)
        self.size = next(fitting, SIZES[-1])
        self.room = digits * DIGIT * self.size + 2 if self.size + 2 <= self.height else math.inf
        self.version_room = len(f"v{self.newest}") * DIGIT * SIZES[-1] if self.versions else math.inf

    def _tip(self, span: Span, top: float, scale: float) -> tuple[float, float, float, float, str]:
        action, start, end = span
        start, end = start - self.start, end - self.start
        unit, factor = time_unit(self.end)
        tip = f"{action}: {NAMES[action.kind]}, {start * factor:.4g} to {end * factor:.4g} {unit}"
        return LEFT + start * scale, top, (end - start) * scale, self.height, tip


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for times up to `seconds`, and its number per second."""
    return ("\N{MICRO SIGN}s", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 2 else ("s", 1.0)


def nice_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover [low, high], about ten of them."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * largest else (largest or 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= span / TICKS * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    # rounding takes off the tail that a float product leaves (0.30000000000000004)
    decimals = max(0, 1 - math.floor(math.log10(step)))
    return [round(k * step, decimals) for k in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def place_axis(picture: Picture, y: float, end: float) -> None:
    """The axis of the times from 0 to `end` seconds, at `y`."""
    unit, factor = time_unit(end)
    span = float(end) * factor or 1.0
    right = picture.width - RIGHT
    picture.lines.append((LEFT, y, right, y))
    for value in (tick for tick in nice_ticks(0.0, span) if tick <= span):
        x = LEFT + value / span * (right - LEFT)
        picture.lines.append((x, y, x, y + 4))
        picture.labels.append(Labels(x, y + 17, f"{value:,.10g}", "quiet", 11, "middle"))
    picture.labels.append(Labels(LEFT - 8, y + 17, unit, "quiet", 11, "end"))


def _legend(picture: Picture, y: float, versions: bool) -> float:
    """Place the legend of boxes and numbers; returns its lowest baseline."""
    x = LEFT
    paints = {paint for paint, _ in picture.boxes if isinstance(paint, Paint)}
    most = max([paint.chunks for paint in paints], default=1)
    entries: list[tuple[list[Paint | None], str]] = []
    for kind, name in NAMES.items():
        chunks = max([paint.chunks for paint in paints if paint.kind is kind], default=0)
        if chunks:
            shown = sorted({round(i * (chunks - 1) / 3) for i in range(4)})
            entries.append(([Paint(kind, chunk, chunks) for chunk in shown], name))
    entries.append(([None], "idle"))
    for swatches, name in entries:
        for paint in swatches:
            picture.swatches.append((x, y - 10, 12, 12, paint))
            x += 13
        picture.labels.append(Labels(x + 4, y, name, "quiet", 12))
        x += 22 + 6.6 * len(name)
    notes = ["number: microbatch"] if any(isinstance(label.style, Paint) for label in picture.labels) else []
    notes += ["fainter: later chunk of the rank"] * (most > 1) + ["v: version of the weights"] * versions
    note = "; ".join(notes)
    if x + 6.6 * len(note) > picture.width - RIGHT:
        x, y = LEFT, y + 20
    picture.labels.append(Labels(x + 4 if x > LEFT else x, y, note, "quiet", 12))
    return y


def _mixed(colour: str, other: str, share: float) -> str:
    parts = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in parts)


def _luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def timeline_svg(timelines: Sequence[Timeline], title: str = "") -> str:
    """The timelines as a self-contained SVG file, for light and dark pages."""
    return picture_svg(lay_out(timelines, title))


def picture_svg(picture: Picture) -> str:
    """A picture as a self-contained SVG file, for light and dark pages."""
    size = f"{short(picture.width)} {short(picture.height)}"
    width, height = size.split()
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(picture.title)}</title>",
        f"<style>{_style(picture)}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<path class="lane" d="{"".join(_rectangle(*track) for track in picture.tracks)}"/>',
    ]
    for (paint, height_of_box), places in picture.boxes.items():
        data = "".join([f"M{x:.2f} {y:.1f}h{wide:.2f}" for x, y, wide in places])
        out.append(f'<path class="box {paint.name}" stroke-width="{short(height_of_box)}" d="{data}"/>')
    for *corner, paint_of_swatch in picture.swatches:
        name = "lane" if paint_of_swatch is None else f"fill-{paint_of_swatch.name}"
        out.append(f'<path class="{name}" d="{_rectangle(*corner)}"/>')
    lines = "".join(f"M{short(x1)} {short(y1)}L{short(x2)} {short(y2)}" for x1, y1, x2, y2 in picture.lines)
    out.append(f'<path class="axis" d="{lines}"/>')
    out += _texts(picture.labels)
    for x, y, wide, high, tip in picture.tips:
        out.append(f'<path class="tip" d="{_rectangle(x, y, wide, high)}"><title>{escape(tip)}</title></path>')
    return "\n".join([*out, "</svg>\n"])


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.2f} {short(y)}h{width:.2f}v{short(height)}h-{width:.2f}z"


def _texts(labels: Sequence[Labels]) -> list[str]:
    """The texts, those of one style in one group."""
    groups: dict[tuple[str, float, str], list[str]] = {}
    for label in labels:
        style = label.style if isinstance(label.style, str) else f"in-{label.style.name}"
        texts = groups.setdefault((style, label.size, label.anchor), [])
        texts.append(f'<text x="{short(label.x)}" y="{short(label.y)}">{escape(label.text)}</text>')
    return [
        f'<g class="{style}" font-size="{size:g}" text-anchor="{anchor}">{"".join(texts)}</g>'
        for (style, size, anchor), texts in groups.items()
    ]


def _style(picture: Picture) -> str:
    paints = {paint for paint, _ in picture.boxes} | {paint for *_, paint in picture.swatches if paint is not None}
    themes = []
    for dark in (False, True):
        rules = [
            f".page{{fill:{PAGE[dark]}}}.lane{{fill:{TRACK[dark]}}}.axis{{stroke:{QUIET[dark]}}}",
            f"text{{fill:{INK[dark]}}}.quiet text{{fill:{QUIET[dark]}}}",
        ]
        for paint in sorted(paints, key=lambda paint: paint.name):
            name, fill = paint.name, paint.fill(dark)
            rules.append(
                f".{name}{{stroke:{fill}}}.fill-{name}{{fill:{fill}}}.in-{name} text{{fill:{paint.ink(dark)}}}"
            )
        themes.append("\n".join(rules))
    fonts = "system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif"
    return (
        f"\nsvg{{font-family:{fonts};font-variant-numeric:tabular-nums}}.title,.name{{font-weight:600}}"
        ".box,.axis{fill:none}.tip{fill:none;pointer-events:all}\n"
        f"{themes[0]}\n@media (prefers-color-scheme:dark){{\n{themes[1]}\n}}\n"
    )
