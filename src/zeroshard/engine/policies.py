"""The policy of each technique, made from a plan."""

from collections.abc import Callable

from zeroshard.errors import PlanError
from zeroshard.parts.technique import Technique
from zeroshard.pipeline.policy import Cut
from zeroshard.plan import Plan

TECHNIQUES: list[Callable[[Plan], Technique | None]] = []  # makes those that a plan asks for


def techniques_of(plan: Plan) -> list[Technique]:
    """The techniques that split parameters under a plan.

    Raises:
        PlanError: it does not combine with stages.
    """
    found = [technique for make in TECHNIQUES if (technique := make(plan)) is not None]
    if found and plan.pipelined:
        raise PlanError(
            f"Parameters are split inside of layers and pipeline_parallel={plan.pipeline.stages}; set it to 1."
        )
    return found


def cut_of(plan: Plan) -> Cut:
    """How a plan cuts a model into stages."""
    return Cut(plan.pipeline, plan.pipeline_schedule, plan.units, plan.recomputes)
