"""Timelines of a pipeline as a trace for chrome://tracing and ui.perfetto.dev (the Trace Event Format)."""

import json
from collections.abc import Iterable, Iterator, Sequence

from zeroshard.schedule.actions import Kind
from zeroshard.schedule.simulate import Timeline


def timeline_trace(timelines: Sequence[Timeline]) -> str:
    """A process per timeline, a thread per rank, a slice per action, and an arrow per message, in microseconds."""
    events = [event for pid, timeline in enumerate(timelines) for event in _events(timeline, pid)]
    return trace_of(events)


def trace_of(events: Iterable[str]) -> str:
    """The content of a trace from the JSON of its events."""
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"


def metadata(pid: int, tid: int, kind: str, **args: object) -> str:
    """The event that gives a process or a thread a name, or its place in the order."""
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args})


def _events(timeline: Timeline, pid: int) -> Iterator[str]:
    yield metadata(pid, 0, "process_name", name=timeline.name)
    origin = min([spans[0][1] for spans in timeline.spans if spans], default=0)
    for rank, spans in enumerate(timeline.spans):
        yield metadata(pid, rank, "thread_name", name=f"rank {rank}")
        for action, start, end in spans:
            kind, chunk, microbatch, version, _ = action
            number = "" if microbatch is None else f'"microbatch":{microbatch},'
            ts, duration = (start - origin) * 1e6, (end - start) * 1e6
            yield (
                f'{{"ph":"X","pid":{pid},"tid":{rank},"ts":{ts:.3f},"dur":{duration:.3f},'
                f'"name":"{action}","cat":"{kind.value}","args":{{"chunk":{chunk},{number}"version":{version}}}}}'
            )
    yield from _arrows(timeline, pid, origin, forward=True)
    yield from _arrows(timeline, pid, origin, forward=False)


def _arrows(timeline: Timeline, pid: int, origin: float, forward: bool) -> Iterator[str]:
    """Arrows from each output, or gradient of an input, to the compute on another rank that receives it."""
    kinds = (Kind.FORWARD,) if forward else (Kind.BACKWARD, Kind.INPUT_GRADIENT)
    onward, name = (1, "output") if forward else (-1, "gradient")
    made = {
        (action.chunk, action.microbatch): (rank, start, end)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
        if action.kind in kinds
    }
    for (chunk, microbatch), (rank, start, end) in made.items():
        taker, taken, _ = made.get((chunk + onward, microbatch), (rank, 0.0, 0.0))
        if taker == rank:
            continue
        common = f'"pid":{pid},"id":"{pid}.{name}.{chunk}.{microbatch}","name":"{name}","cat":"message","bp":"e"'
        leaves = (end - (end - start) / 1000 - origin) * 1e6  # just within the slice, to which the arrow attaches
        yield (
            f'{{"ph":"s","tid":{rank},"ts":{leaves:.3f},{common}}},\n'
            f'{{"ph":"f","tid":{taker},"ts":{(taken - origin) * 1e6:.3f},{common}}}'
        )
