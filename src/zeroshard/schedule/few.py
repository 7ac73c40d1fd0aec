"""Few microbatches: of which the memory and the times of many follow."""

from dataclasses import replace
from fractions import Fraction

from zeroshard.schedule.peaks import peaks
from zeroshard.schedule.pipeline import PipelineSchedule

ALIKE = 3  # microbatches from which on every further one costs the same
MOST_FILLED = 8  # stages up to which few microbatches fill the pipeline


def few_microbatches(pipeline: PipelineSchedule) -> tuple[int, int] | None:
    """Two numbers of microbatches, of which the larger one fills the stages where they are few; None where all count.

    A stream goes on from step to step, so that none of its microbatches is left out.
    """
    d = pipeline.layout.stages
    less, more = (d, d + 1) if d <= MOST_FILLED else (ALIKE, ALIKE + 1)
    if pipeline.name in ("gpipe", "naive"):
        less, more = 2 * d, 3 * d
    elif pipeline.layout.chunks > 1:
        less, more = d, 2 * d
    return None if pipeline.streams or pipeline.microbatches <= less + more else (less, more)


def in_flight(pipeline: PipelineSchedule, rank: int, microbatches: int) -> Fraction:
    """Microbatches whose activations a rank keeps at once, at most, of so many in a step."""
    lists = [replace(pipeline, microbatches=microbatches).step(rank)]
    return peaks(lists, pipeline.layout.chunks)[0].in_flight
