"""The ledger over one training step: stacked categories, the peak, and the events that moved most bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from markupsafe import Markup

from zeroshard.report.chart import (
    WIDE,
    Canvas,
    ChartAxis,
    Figure,
    Frame,
    LegendEntry,
    both_widths,
    bytes_axis,
    fitted_axis,
    thin,
)
from zeroshard.report.run_folder import MemoryEvent, MemoryStep
from zeroshard.text import format_bytes, format_exact

_BUCKETS = 360
_MARKS = 8
_MARK_GAP = 0.065
_LETTER = 6.4
_LABEL_HEIGHT = 17.0
_HUES = 8


@dataclass(frozen=True, slots=True)
class _Change:
    """An event and its change of the total."""

    event: MemoryEvent
    delta: float

    @property
    def tip(self) -> str:
        """Time, event and signed bytes."""
        sign = "+" if self.delta > 0 else ""
        return f"{self.event.t * 1e3:.2f} ms  {self.event.label}  {sign}{format_bytes(self.delta)}"


def hue(index: int) -> str:
    """The colour class of the category at ``index``."""
    return f"hue{index % _HUES}"


def memory_figure(step: MemoryStep) -> Figure:
    """The chart of one rank's ledger over one step."""
    changes = _changes(step)
    start, end = _span(step)
    marked = _largest(changes, start, end)
    kept = thin(changes, lambda c: c.event.t, lambda c: c.event.total, (start, end), _BUCKETS)
    peak = max((change.event for change in changes), key=lambda event: event.total)
    caption = (
        f"Memory by category over one step of rank {format_exact(step.rank)}:"
        f" peak {format_bytes(peak.total)} at {peak.t * 1e3:.2f} ms ({peak.label})."
    )
    highest = [max(event.nbytes[i] for event in step.events) for i in range(len(step.categories))]
    # the legend lists the top of the stack first
    legend = [LegendEntry("area", hue(i), f"{name}, up to {format_bytes(highest[i])}") for i, name in _named(step)]
    axis = _time_axis(step, WIDE)
    return Figure(
        drawings=both_widths(partial(_draw, step, kept, marked, caption)),
        legend=tuple(reversed(legend)),
        caption=caption,
        readouts=tuple((round(axis.fraction(change.event.t * 1e3), 5), _readout(step, change)) for change in kept),
        holds=True,
        marked=tuple((number, change.tip) for number, change in enumerate(marked, 1)),
    )


def phases_figure(phases: Mapping[str, Mapping[str, float]], held: Sequence[str]) -> Figure:
    """The chart of the peaks of a step's phases, for a plan of which no curve over the step is known.

    Args:
        phases: bytes by category at each peak, in the order of the phases.
        held: the categories, from the foot of the stack up.
    """
    caption = "Memory at the peak of each phase of a step, by category; build is the making of the engine."
    highest = [max(memory.get(name, 0) for memory in phases.values()) for name in held]
    legend = [LegendEntry("area", hue(i), f"{name}, up to {format_bytes(highest[i])}") for i, name in enumerate(held)]
    tops = [list(accumulate(memory.get(name, 0) for name in held)) for memory in phases.values()]
    return Figure(both_widths(partial(_draw_phases, list(phases), tops, caption)), tuple(reversed(legend)), caption)


def _draw_phases(names: list[str], tops: list[list[float]], caption: str, frame: Frame) -> Markup:
    canvas, count = Canvas(frame, caption), len(names)
    y = bytes_axis("bytes on this rank", 1.05 * max(stack[-1] for stack in tops))
    canvas.axes(ChartAxis("", 0, count, tuple((i + 0.5, name) for i, name in enumerate(names))), y)
    canvas.bands([frame.x(i / count) for i in range(count + 1)], tops, y, [hue(i) for i in range(len(tops[0]))])
    for i, stack in enumerate(tops):
        at = (frame.x((i + 0.5) / count), frame.y(y.fraction(stack[-1])) - 5)
        canvas.text(at, format_bytes(stack[-1]), "number middle")
    return canvas.to_markup()


def _named(step: MemoryStep) -> list[tuple[int, str]]:
    return [(i, name.replace("_", " ")) for i, name in enumerate(step.categories)]


def _changes(step: MemoryStep) -> list[_Change]:
    totals = [event.total for event in step.events]
    return [
        _Change(event, total - before)
        for event, total, before in zip(step.events, totals, [totals[0], *totals], strict=False)
    ]


def _span(step: MemoryStep) -> tuple[float, float]:
    """From the first event to a little after the last, to show the bytes after it."""
    start, end = step.events[0].t, step.events[-1].t
    return start, end + (0.02 * (end - start) or 1e-3)


def _time_axis(step: MemoryStep, frame: Frame) -> ChartAxis:
    start, end = _span(step)
    return fitted_axis("ms", start * 1e3, end * 1e3, frame.x_ticks)


def _largest(changes: list[_Change], start: float, end: float) -> list[_Change]:
    """The largest changes whose numbers do not overlap, in order of time."""
    chosen: list[_Change] = []
    for change in sorted(changes, key=lambda c: -abs(c.delta)):
        gap = _MARK_GAP * (end - start)
        if change.delta and all(abs(change.event.t - other.event.t) >= gap for other in chosen):
            chosen.append(change)
        if len(chosen) == _MARKS:
            break
    return sorted(chosen, key=lambda c: c.event.t)


def _readout(step: MemoryStep, change: _Change) -> str:
    held = [f"{name} {format_bytes(change.event.nbytes[i])}" for i, name in reversed(_named(step))]
    return "\n".join([change.tip, f"total {format_bytes(change.event.total)}", *held])


def _draw(step: MemoryStep, kept: list[_Change], marked: list[_Change], caption: str, frame: Frame) -> Markup:
    canvas = Canvas(frame, caption)
    x = _time_axis(step, frame)
    y = bytes_axis("bytes on this rank", max(change.event.total for change in kept))
    canvas.axes(x, y)
    edges = [*(frame.x(x.fraction(change.event.t * 1e3)) for change in kept), frame.x(1)]
    tops = [list(accumulate(change.event.nbytes)) for change in kept]
    labels: list[tuple[tuple[float, float], str]] = []
    names = _named(step)
    sides = canvas.bands(edges, tops, y, [hue(i) for i, _ in names])
    for (_, name), (lower, upper) in zip(names, sides, strict=True):
        place = _label_place(edges, lower, upper, _LETTER * len(name))
        if place is not None:
            labels.append((place, name))
    for place, name in labels:
        canvas.text(place, name, "inside middle")
    _draw_marks(canvas, marked, x)
    return canvas.to_markup()


def _draw_marks(canvas: Canvas, marked: list[_Change], x: ChartAxis) -> None:
    frame = canvas.frame
    for number, change in enumerate(marked, 1):
        place = frame.x(x.fraction(change.event.t * 1e3))
        canvas.line((place, frame.y(1)), (place, frame.y(0)), "mark")
        canvas.text((place, frame.y(1) - 4), str(number), "number middle")


def _label_place(
    edges: list[float], lower: list[float], upper: list[float], width: float
) -> tuple[float, float] | None:
    """The middle of a band's highest stretch that fits a label of ``width`` pixels, or None."""
    best_room, best = _LABEL_HEIGHT, None
    for first in range(len(upper)):
        floor, ceiling = lower[first], upper[first]
        for last in range(first, len(upper)):
            low, high = min(floor, lower[last]), max(ceiling, upper[last])
            # once wide enough, go on only as far as it costs no room
            if edges[last] - edges[first] >= width and (low, high) != (floor, ceiling):
                break
            floor, ceiling, end = low, high, edges[last + 1]
        if end - edges[first] >= width and floor - ceiling > best_room:
            best_room, best = floor - ceiling, ((edges[first] + end) / 2, (floor + ceiling) / 2 + 4)
    return best
