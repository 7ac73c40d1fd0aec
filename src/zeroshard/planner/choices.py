"""What a plan chooses of each technique: the one place in which the planner takes a plan apart."""

from typing import NamedTuple

from zeroshard.offload.choice import Offloading
from zeroshard.pipeline.choice import Stages
from zeroshard.plan import Plan
from zeroshard.precision.choice import Computing
from zeroshard.zero.choice import Slicing


class Choices(NamedTuple):
    """Of each technique, in the order in which a plan is told."""

    stages: Stages
    slicing: Slicing
    computing: Computing
    offloading: Offloading


def choices_of(plan: Plan) -> Choices:
    """What a plan chooses."""
    return Choices(
        Stages(
            stages=plan.pipeline.stages,
            schedule=plan.pipeline.schedule,
            chunks=plan.pipeline.virtual_stages,
            microbatches=plan.microbatches,
            replicas=plan.pipeline.replicas,
            split=plan.pipeline.split,
            recompute=plan.recompute,
            recomputes=plan.recomputes,
        ),
        Slicing(
            zero=plan.zero,
            groups=plan.pipeline.stages,
            shard_group=plan.shard_group,
            reduce_dtype=plan.reduce_dtype,
            reduce_every=plan.reduce_every,
            reduces_each=plan.reduces_each_microbatch,
        ),
        Computing(plan.precision, plan.scales_loss),
        Offloading(plan.offloading, sliced=plan.zero == 3),
    )
