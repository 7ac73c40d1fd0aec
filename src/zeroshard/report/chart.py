"""Charts: traces and layouts for Plotly, which draws them in the page, and long series thinned.

A colour names a variable of the page, `var(--accent)`; `charts.js` puts in its place the value in the light or the dark
scheme.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from zeroshard.text import format_bytes

Trace = dict[str, Any]
T = TypeVar("T")
BUCKETS = 300  # of a thinned series
HUES = 8
DASHES = ("solid", "dash", "dot", "dashdot")  # of lines, when all colours are in use


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        traces: the series, as Plotly takes them.
        layout: settings of Plotly's layout beside those that all charts share.
        caption: the content in words, for screen readers too.
        logarithmic: whether the page offers a logarithmic scale of its y axis.
        height: in pixels.
        choices: names of the traces of which a menu shows one at a time; empty to show all.
        shaded: whether its colours stand for numbers, the middle ones near that of the page.
    """

    traces: tuple[Trace, ...]
    layout: dict[str, Any]
    caption: str
    logarithmic: bool = True
    height: int = 320
    choices: tuple[str, ...] = ()
    shaded: bool = False

    @property
    def begins_logarithmic(self) -> bool:
        """Whether its y axis is logarithmic before the reader asks for it."""
        return bool(self.layout.get("yaxis", {}).get("type") == "log")

    def as_json(self) -> dict[str, Any]:
        """The content that `charts.js` reads."""
        return {"traces": list(self.traces), "layout": self.layout}


def colour(index: int) -> str:
    """The colour of the series at ``index``; after the last colour the first follows."""
    return f"var(--hue{index % HUES})"


def dash(index: int) -> str:
    """The dash of the line at ``index``: another one for each round through the colours."""
    return DASHES[index // HUES % len(DASHES)]


def number(value: float) -> float | None:
    """A number to six digits, as JSON holds it: None when it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


def numbers(values: Iterable[float]) -> list[float | None]:
    """`number` of each."""
    return [number(value) for value in values]


def line(name: str, x: Sequence[float], y: Sequence[float], colour: str, **settings: Any) -> Trace:
    """A line; settings such as ``width`` and ``dash`` are those of Plotly's lines, others of its traces."""
    drawn = {key: settings.pop(key) for key in ("width", "dash", "shape") if key in settings}
    return {
        "type": "scatter", "mode": "markers" if len(x) == 1 else "lines", "name": name, "x": numbers(x),
        "y": numbers(y), "line": {"color": colour, "width": 1.75, **drawn}, "marker": {"color": colour, "size": 7},
        **settings,
    }  # fmt: skip


def area(name: str, x: Sequence[float], y: Sequence[float], colour: str, **settings: Any) -> Trace:
    """One layer of a stack of stepped areas, each of which holds its height until the next x."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": numbers(x), "y": numbers(y), "stackgroup": "one",
        "line": {"color": colour, "width": 0.5, "shape": "hv"}, "fillcolor": colour, **settings,
    }  # fmt: skip


def axes(x: str, y: str, **settings: Any) -> dict[str, Any]:
    """A layout with the titles of both axes, and settings of the y axis."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **settings}}


def byte_unit(largest: float) -> tuple[float, str]:
    """The binary unit for sizes up to ``largest``, in bytes, and its name."""
    unit = 1024.0 ** min(max(int(math.log2(max(largest, 1.0)) // 10), 0), 3)
    return unit, format_bytes(unit).split(" ")[1]


def time_unit(largest: float) -> tuple[float, str]:
    """The unit for times up to ``largest`` seconds, and its name."""
    return (1.0, "s") if largest >= 2 else (1e-3, "ms") if largest >= 2e-3 else (1e-6, "µs")


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
