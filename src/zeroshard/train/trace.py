"""Measured timelines of a few steps: of a pipeline, beside a simulation from the same times; of offload, beside the
exposed seconds.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeroshard.engine import Engine
from zeroshard.memory.transfers import TaskSpan
from zeroshard.schedule import Action
from zeroshard.schedule.simulate import Span, costs_of, simulate

TIMELINE, OFFLOADED = "timeline.json", "timeline-offload.json"


def write_timeline(folder: Path, engine: Engine, spans: list[Span], steps: int, writes: bool) -> None:
    """Gather the spans of all ranks, simulate the same steps from them, and write both; a collective call.

    Args:
        spans: (action, start, end) of this rank, in seconds of a clock that the ranks share.
        steps: number of steps that they cover, from the start of the schedule.
        writes: whether this rank writes the file.
    """
    pipeline = engine.pipeline
    assert pipeline is not None
    mine = [[str(action), start, end] for action, start, end in spans]
    everyone = engine.world.agree_on(mine, "timeline")
    if not writes:
        return
    begin = min(start for rank in everyone for _, start, _ in rank)
    measured = [[(Action.parse(text), start - begin, end - begin) for text, start, end in rank] for rank in everyone]
    narrow = pipeline.narrow
    simulation = simulate(narrow.stretch(steps), narrow.layout, costs_of(measured, narrow))
    took = max(end for rank in measured for _, _, end in rank)
    name = f"{pipeline.name}, {pipeline.layout.stages} stages, {pipeline.microbatches} microbatches"
    notes = [f"{took * 1e3:.1f} ms", f"bubble {_bubble(measured, took):.3f}"]
    forecast = [f"{simulation.makespan * 1e3:.1f} ms", f"bubble {simulation.bubble_fraction:.3f}"]
    forecast.append(f"{(simulation.makespan / took - 1) * 100:+.1f} % against the measured time")
    timelines = [
        {"name": f"{name}: measured", "notes": notes, "spans": _plain(measured)},
        {"name": f"{name}: simulated from the measured times", "notes": forecast, "spans": _plain(simulation.spans)},
    ]
    content = {"measured_seconds": took, "simulated_seconds": simulation.makespan, "timelines": timelines}
    (folder / TIMELINE).write_text(json.dumps(content))


class OffloadTrace:
    """Times of copies, host jobs and computes in this rank's offloaded steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begin = engine.mesh.now()
        self._ends: list[float] = []
        self._spans: list[TaskSpan] = []
        self._exposed: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace the step that is taken inside."""
        with self._engine.trace() as trace:
            yield
        self._ends.append(self._engine.mesh.now() - self._begin)
        self._spans += trace.tasks
        for cause, seconds in self._engine.exposed.items():
            self._exposed[str(cause)] += seconds

    def write(self, folder: Path) -> None:
        """Write the trace into a run folder."""
        begin = self._begin
        spans = [[span.label, str(span.cause), span.start - begin, span.end - begin] for span in self._spans]
        content = {"rank": self._engine.mesh.rank, "ends": self._ends, "exposed": self._exposed, "spans": spans}
        (folder / OFFLOADED).write_text(json.dumps(content))


def _bubble(spans: list[list[Span]], took: float) -> float:
    busy = sum(end - start for rank in spans for _, start, end in rank)
    return 1 - busy / (took * len(spans))


def _plain(spans: Any) -> list[list[list[Any]]]:
    return [[[str(action), float(start), float(end)] for action, start, end in rank] for rank in spans]
