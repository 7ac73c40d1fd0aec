"""What a plan chooses of each technique: the one place in which the planner takes a plan apart."""

from typing import NamedTuple

from zeroshard.engine.policies import offload_of
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
            stages=plan.stages,
            schedule=plan.schedule,
            chunks=plan.chunks,
            microbatches=plan.microbatches,
            replicas=plan.replicas,
            split=plan.split,
            recompute=plan.recompute,
            recomputes=plan.recomputes,
        ),
        Slicing(
            zero=plan.zero,
            groups=plan.stages,
            shard_ranks=plan.shard_ranks,
            reduce_dtype=plan.reduce_dtype,
            reduce_every=plan.reduce_every,
            reduces_each=plan.reduces_each_microbatch,
        ),
        Computing(plan.precision, plan.scales_loss),
        Offloading(offload_of(plan), sliced=plan.zero == 3),
    )
