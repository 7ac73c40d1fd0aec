"""The wire volume of one step by purpose: the formula's bar above the measured one."""

import math
from dataclasses import replace

from markupsafe import Markup

from zeroshard.report.figure import Figure, LegendEntry
from zeroshard.report.run_folder import TrafficRecord
from zeroshard.report.svg import NARROW, WIDE, Canvas, Frame
from zeroshard.text import format_count

_ROW = 54.0
_BAR = 12.0
_VALUE_ROOM = 84.0


def traffic_figure(rows: tuple[TrafficRecord, ...]) -> Figure | None:
    """The chart, or None when nothing was sent and nothing was to be."""
    sizes = [n for row in rows for n in (row.planned_elements, row.measured_elements) if math.isfinite(n) and n > 0]
    if not sizes:
        return None
    caption = "Elements on the wire in one step by purpose, formula against measured."
    return Figure(
        drawings=tuple(_draw(rows, max(sizes), caption, frame) for frame in (WIDE, NARROW)),
        legend=(LegendEntry("area", "planned", "formula"), LegendEntry("area", "measured", "measured")),
        caption=caption,
    )


def _draw(rows: tuple[TrafficRecord, ...], largest: float, caption: str, frame: Frame) -> Markup:
    frame = replace(frame, height=_ROW * len(rows), left=2.0, right=_VALUE_ROOM)
    canvas = Canvas(frame, caption)
    for i, row in enumerate(rows):
        head = i * _ROW + 13
        canvas.text((frame.left, head), row.purpose, "name")
        for nth, (style, n) in enumerate((("planned", row.planned_elements), ("measured", row.measured_elements))):
            top = head + 6 + nth * (_BAR + 2)
            length = (frame.x(1) - frame.x(0)) * max(n, 0.0) / largest if math.isfinite(n) else 0.0
            canvas.rect((frame.left, top), length, _BAR, style)
            canvas.text((frame.left + length + 6, top + _BAR - 2), format_count(n), "tick")
    return canvas.to_markup()
