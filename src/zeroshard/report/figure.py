"""The parts of a chart, the same for all charts, so that one piece of template shows them."""

from dataclasses import dataclass

from markupsafe import Markup


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
