"""Few microbatches, from which memory and times of many are extrapolated."""

from dataclasses import replace
from fractions import Fraction

from zeroshard.schedule.peaks import peaks
from zeroshard.schedule.pipeline import PipelineSchedule

ALIKE = 3  # microbatches after which each further one costs the same
MOST_FILLED = 8  # stages of a pipeline that few microbatches still fill


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
