"""What a plan asks of each technique, in the technique's own terms."""

from collections.abc import Callable

from zeroshard.errors import PlanError
from zeroshard.offload import policy as offload
from zeroshard.parts.technique import Technique
from zeroshard.pipeline import policy as pipeline
from zeroshard.plan import Plan

TECHNIQUES: list[Callable[[Plan], Technique | None]] = []  # makes those that a plan asks for


def techniques_of(plan: Plan) -> list[Technique]:
    """What splits parameters under a plan.

    Raises:
        PlanError: it does not combine with stages.
    """
    found = [technique for make in TECHNIQUES if (technique := make(plan)) is not None]
    if found and plan.pipelined:
        raise PlanError(f"Parameters are split inside of layers and stages={plan.stages}; set stages to 1.")
    return found


def cut_of(plan: Plan) -> pipeline.Policy:
    """How a plan cuts a model into stages."""
    return pipeline.Policy(
        schedule=plan.pipeline,
        stages=plan.stages,
        chunks=plan.chunks,
        split=plan.split,
        balance=plan.balance,
        units=plan.units,
        recomputes=plan.recomputes,
        defers=plan.schedule == "zb-h1",
    )


def offload_of(plan: Plan) -> offload.Policy:
    """What a plan keeps below the device."""
    return offload.Policy(
        optimizer="optimizer" in plan.offloads,
        parameters="parameters" in plan.offloads,
        activations="activations" in plan.offloads,
        share=plan.offload_share,
        disk=plan.offload_disk,
        disk_parameters=plan.offload_disk_parameters,
        moments=plan.offload_moments,
        delayed=plan.delayed_update,
        warmup=plan.delayed_warmup,
        speculates=plan.speculate,
        several=plan.microbatches > 1,
        timeout=plan.timeout,
    )
