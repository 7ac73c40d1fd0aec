"""Peaks: the most that each rank holds at once under given lists, by counting alone.

Memory and times of many microbatches are extrapolated from those of few.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from zeroshard.schedule.actions import BACKWARDS, COMPUTE, Action, Kind, Schedule
from zeroshard.schedule.pipeline import PipelineSchedule


@dataclass(frozen=True)
class Peak:
    """The most that one rank holds at once.

    Attributes:
        in_flight: microbatches whose activations are kept, from the forward to the backward or, where that is in two
            parts, to the gradient of the weights; in units of one microbatch of the rank's whole share.
        weight_versions: of any one chunk's weights. An update adds one, unless it reuses a dropped one.
        buffers: messages between chunks: receives that are posted and not yet used by a forward or backward.
    """

    in_flight: Fraction
    weight_versions: int
    buffers: int


def peaks(lists: Sequence[Schedule], chunks: int) -> list[Peak]:
    """The peaks of every rank; `chunks` is the number of chunks of each stage.

    Lists that use no weights after an update end with a flush, and update in place.
    """
    flushes = not any(a.kind is Kind.DROP or (a.kind in COMPUTE and a.version) for actions in lists for a in actions)
    return [
        Peak(
            Fraction(max(accumulate(map(_flights, actions)), default=0), chunks),
            1 if flushes else max(_versions(actions), default=1),
            max(_buffers(actions), default=0),
        )
        for actions in lists
    ]


def _flights(action: Action) -> int:
    """The change in kept activations, in chunks of one microbatch."""
    return (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT))


def _versions(actions: Schedule) -> Iterator[int]:
    """The number of versions of the chunk after each update or drop."""
    alive = Counter[int]()
    for action in actions:
        if action.kind is Kind.UPDATE or action.kind is Kind.DROP:
            alive[action.chunk] += 1 if action.kind is Kind.UPDATE else -1
            yield 1 + alive[action.chunk]


def _buffers(actions: Schedule) -> Iterator[int]:
    """The number of open receives after each action."""
    opened = Counter[tuple[bool, int, int | None]]()
    for action in actions:
        key = action.kind is Kind.FORWARD or action.kind is Kind.RECEIVE_FORWARD, action.chunk, action.microbatch
        if action.kind is Kind.RECEIVE_FORWARD or action.kind is Kind.RECEIVE_BACKWARD:
            opened[key] += 1
        elif action.kind is Kind.FORWARD or action.kind in BACKWARDS:
            del opened[key]
        yield opened.total()


ALIKE = 3  # microbatches after which each further one costs the same
MOST_FILLED = 6  # stages of a pipeline that few microbatches still fill


def few_microbatches(pipeline: PipelineSchedule) -> tuple[int, int] | None:
    """Two numbers of microbatches, the larger of which fills a short pipeline; None where all microbatches must run.

    A stream goes on from step to step, so all its microbatches run.
    """
    d = pipeline.layout.stages
    less, more = (d, d + 1) if d <= MOST_FILLED else (ALIKE, ALIKE + 1)
    if pipeline.name in ("gpipe", "naive"):
        less, more = 2 * d, 3 * d
    elif pipeline.layout.chunks > 1:
        less, more = d, 2 * d
    return None if pipeline.streams or pipeline.microbatches <= less + more else (less, more)


def in_flight(pipeline: PipelineSchedule, rank: int, microbatches: int) -> Fraction:
    """The most microbatches whose activations a rank keeps at once, in a step of so many."""
    lists = [replace(pipeline, microbatches=microbatches).step(rank)]
    return peaks(lists, pipeline.layout.chunks)[0].in_flight
