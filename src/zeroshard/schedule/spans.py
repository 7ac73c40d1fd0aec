"""Spans: the costs of each chunk, read from the times of its actions."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from zeroshard.schedule.actions import Action, Kind
from zeroshard.schedule.pipeline import PipelineSchedule
from zeroshard.schedule.simulate import Costs

Span = tuple[Action, float, float]
TIMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input_gradient",
    Kind.WEIGHT_GRADIENT: "weight_gradient",
    Kind.UPDATE: "update",
}


def costs_of(spans: Sequence[Sequence[Span]], pipeline: PipelineSchedule) -> Costs:
    """The costs of each chunk: the median seconds of each kind of action. Messages cost nothing."""
    seconds = medians(spans)
    given: dict[str, Any] = {}
    for kind, name in TIMES.items():
        values = tuple(seconds.get((kind, c), 0.0) for c in range(pipeline.layout.all_chunks))
        if any(values) or name in ("forward", "backward"):
            given[name] = values
    return Costs(**given)


def medians(spans: Sequence[Sequence[Span]]) -> dict[tuple[Kind, int], float]:
    """The median seconds of each kind of action, by kind and chunk."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in spans:
        for action, start, end in rank:
            times[action.kind, action.chunk].append(end - start)
    return {key: median(seconds) for key, seconds in times.items()}
