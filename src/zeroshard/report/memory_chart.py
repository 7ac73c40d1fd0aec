"""Memory of the ranks: the ledger over one training step by category and layer, its peak, budget and capacity."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from zeroshard.report.chart import Chart, Trace, area, axes, byte_unit, colour, line, number, numbers, thin
from zeroshard.report.run_records import MemoryEvent, MemoryStep
from zeroshard.text import format_bytes, format_exact

_BUCKETS = 250
FAR = 2.0  # times the peak: a limit above that is hidden until the reader asks for it
STRIP = 0.14  # of the chart's height, for the layers


def memory_chart(step: MemoryStep, budget: float = 0, capacity: float = 0) -> Chart:
    """One rank's ledger over one step, stacked by category, with the layers below it.

    Args:
        budget: bytes that the plan allows; 0 for none.
        capacity: bytes of the device; 0 if it is not known.
    """
    events = step.events
    start, end = events[0].t, events[-1].t
    end += 0.02 * (end - start) or 1e-3  # to show the bytes after the last event
    kept = thin(list(enumerate(events)), lambda e: e[1].t, lambda e: e[1].total, (start, end), _BUCKETS)
    peak = max(events, key=lambda event: event.total)
    unit, unit_name = byte_unit(max(peak.total, budget if budget < FAR * peak.total else 0))
    times = [event.t * 1e3 for _, event in kept] + [end * 1e3]
    traces: list[Trace] = []
    for i, name in enumerate(step.categories):
        heights = [event.nbytes[i] / unit for _, event in kept]
        if any(heights):
            held = {"hovertemplate": f"%{{y:.2f}} {unit_name}"}
            traces.append(area(name.replace("_", " "), times, [*heights, heights[-1]], colour(i), **held))
    totals = [event.total / unit for _, event in kept]
    texts = [_event_text(events[max(i - 1, 0)], event) for i, event in kept]
    traces.append(
        line("total", times, [*totals, totals[-1]], "var(--ink)", width=1.25, shape="hv", text=[*texts, ""],
             hovertemplate=f"%{{y:.2f}} {unit_name}<br>%{{text}}")
    )  # fmt: skip
    traces.append(_marked("peak", peak.t * 1e3, peak.total / unit, f"{format_bytes(peak.total)}, {peak.place}"))
    traces += _limits(times, {"budget": budget, "capacity of the device": capacity}, peak.total, (unit, unit_name))
    layout = axes("ms", f"{unit_name} on this rank", rangemode="tozero")
    strip = _layers(step, end)
    if strip:
        traces += strip
        layout["yaxis"]["domain"] = [STRIP + 0.04, 1]
        layout["xaxis"]["anchor"] = "y2"
        layout["yaxis2"] = {"domain": [0, STRIP], "showticklabels": False, "fixedrange": True, "showgrid": False}
        layout["uniformtext"] = {"mode": "hide", "minsize": 10}
        layout["barmode"] = "overlay"
    caption = (
        f"Memory by category over one step of rank {format_exact(step.rank)}:"
        f" peak {format_bytes(peak.total)} at {peak.t * 1e3:.2f} ms ({peak.place})."
    )
    if strip:
        caption += " The strip below names the layer that runs: forward above, backward below."
    return Chart(tuple(traces), layout, caption, logarithmic=False, height=400)


def ranks_chart(steps: Sequence[MemoryStep]) -> Chart | None:
    """The totals of all ranks over the same step; None for a single rank."""
    if len(steps) < 2:
        return None
    peaks = {step.rank: max(event.total for event in step.events) for step in steps}
    unit, unit_name = byte_unit(max(peaks.values()))
    traces = []
    for i, step in enumerate(steps):
        span = (step.events[0].t, step.events[-1].t or 1e-3)
        kept = thin(step.events, lambda event: event.t, lambda event: event.total, span, _BUCKETS)
        name = f"rank {format_exact(step.rank)}"
        totals = [event.total / unit for event in kept]
        shown = {"text": [event.place for event in kept], "hovertemplate": f"%{{y:.2f}} {unit_name}, %{{text}}"}
        traces.append(line(name, [e.t * 1e3 for e in kept], totals, colour(i), shape="hv", width=1.5, **shown))
    fullest = max(peaks, key=lambda rank: peaks[rank])
    caption = (
        f"Memory of {len(steps)} ranks over the same step; the highest peak is {format_bytes(peaks[fullest])},"
        f" on rank {format_exact(fullest)}, the lowest {format_bytes(min(peaks.values()))}."
    )
    return Chart(tuple(traces), axes("ms", f"{unit_name} by the ledger"), caption)


def phases_chart(phases: Mapping[str, Mapping[str, float]], held: Sequence[str]) -> Chart:
    """The peaks of a step's phases, for a plan of which no curve over the step is known.

    Args:
        phases: bytes by category at each peak, in the order of the phases.
        held: the categories, from the foot of the stack up.
    """
    unit, unit_name = byte_unit(max(sum(memory.values()) for memory in phases.values()))
    traces: list[Trace] = [
        {
            "type": "bar", "name": name, "x": list(phases), "marker": {"color": colour(i)},
            "y": numbers(memory.get(name, 0) / unit for memory in phases.values()),
            "hovertemplate": f"%{{y:.2f}} {unit_name}",
        }
        for i, name in enumerate(held)
    ]  # fmt: skip
    caption = "Memory at the peak of each phase of a step, by category; build is the making of the engine."
    layout: dict[str, Any] = {**axes("", f"{unit_name} on this rank"), "barmode": "stack"}
    return Chart(tuple(traces), layout, caption, logarithmic=False)


def _event_text(before: MemoryEvent, event: MemoryEvent) -> str:
    """An event with its layer and the change of the total."""
    delta = event.total - before.total
    return f"{event.place} ({'+' if delta > 0 else ''}{format_bytes(delta)})"


def _marked(name: str, x: float, y: float, text: str) -> Trace:
    marker = {"color": "var(--ink)", "size": 10, "symbol": "circle-open", "line": {"width": 2}}
    shown = {"text": [text], "hovertemplate": "%{text}"}
    return {"type": "scatter", "mode": "markers", "name": name, "x": [number(x)], "y": [number(y)], "marker": marker,
            **shown}  # fmt: skip


def _limits(times: Sequence[float], limits: Mapping[str, float], peak: float, units: tuple[float, str]) -> list[Trace]:
    """Lines at the limits that are known; one far above the peak is hidden at first."""
    unit, unit_name = units
    return [
        line(
            f"{name}, {format_bytes(limit)}", [times[0], times[-1]], [limit / unit] * 2, "var(--lost)", width=1.5,
            dash="dash" if name == "budget" else "dot", hovertemplate=f"%{{y:.2f}} {unit_name}",
            visible=True if limit < FAR * peak else "legendonly",
        )
        for name, limit in limits.items() if limit > 0
    ]  # fmt: skip


def _layers(step: MemoryStep, end: float) -> list[Trace]:
    """The layers that run, as bars over the time axis: one row for forwards, one for backwards."""
    places = [(event.phase, event.layer, event.t) for event in step.events]
    runs = [next(group) for _, group in groupby(places, key=lambda place: place[:2])]
    rows: dict[str, list[tuple[float, float, str]]] = {"forward": [], "backward": []}
    for (phase, layer, begin), (*_, after) in pairwise([*runs, ("", "", end)]):
        if layer and phase in rows:
            rows[phase].append((begin * 1e3, (after - begin) * 1e3, layer))
    return [
        {
            "type": "bar", "orientation": "h", "name": phase, "yaxis": "y2", "showlegend": False,
            "y": [phase] * len(bars), "base": numbers(b for b, _, _ in bars), "x": numbers(w for _, w, _ in bars),
            "text": [layer for *_, layer in bars], "textposition": "inside", "insidetextanchor": "middle",
            "textangle": 0, "insidetextfont": {"color": "var(--panel)"}, "width": 0.9,
            "marker": {"color": "var(--accent)" if phase == "forward" else "var(--validation)",
                       "line": {"color": "var(--panel)", "width": 1}},
            "hovertemplate": f"{phase} %{{text}}<extra></extra>",
        }
        for phase, bars in reversed(rows.items()) if bars
    ]  # fmt: skip
