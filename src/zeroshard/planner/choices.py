"""A plan's choice of each technique; only here does the planner read settings of techniques from a plan."""

import re
from typing import NamedTuple

from zeroshard.moe.choice import SharingExperts
from zeroshard.offload.choice import Offloading
from zeroshard.pipeline.choice import Stages
from zeroshard.plan import Plan
from zeroshard.precision.choice import Computing
from zeroshard.recompute.choice import Recomputing
from zeroshard.rng.choice import Drawing
from zeroshard.schedule import PipelineSchedule
from zeroshard.tensor.choice import Splitting
from zeroshard.zero.choice import Slicing

ONE_BLOCK = re.compile(r"(^|\.)[\d\[?]")  # in names of ignored parameters: of single blocks, so that blocks are unlike


class Choices(NamedTuple):
    """A choice of each technique, in the order in which a plan is described."""

    stages: Stages
    recomputing: Recomputing
    splitting: Splitting
    slicing: Slicing
    sharing_experts: SharingExperts
    computing: Computing
    drawing: Drawing
    offloading: Offloading

    @property
    def varied(self) -> tuple[SharingExperts, ...]:
        """Those with variants of the plan for a search to try out, in the order in which it does."""
        return (self.sharing_experts,)


def choices_of(plan: Plan) -> Choices:
    """The choices of a plan."""
    return Choices(
        Stages(
            stages=plan.pipeline.stages,
            schedule=plan.pipeline.schedule,
            chunks=plan.pipeline.virtual_stages,
            microbatches=plan.microbatches,
            replicas=plan.pipeline.replicas,
            split=plan.pipeline.split,
            together=plan.tensor.ranks,
        ),
        Recomputing(plan.saving.recompute, plan.device_memory, plan.saving.compress),
        Splitting(plan.tensor.ranks, plan.tensor.sequence, plan.tensor.layers is not None),
        Slicing(
            zero=plan.zero,
            groups=plan.pipeline.stages * plan.tensor.ranks,
            shard_group=plan.shard_group,
            reduce_dtype=plan.reduce_dtype,
            reduce_every=plan.reduce_every,
            reduces_each=plan.reduces_each_microbatch,
        ),
        SharingExperts(plan.experts.ranks, plan.experts.two_level, plan.pipeline.stages, plan.tensor.ranks),
        Computing(plan.precision, plan.scales_loss, plan.adds_up_locally or plan.reductions > 1),
        Drawing(plan.rng == "exact"),
        Offloading(plan.offloading, sliced=plan.zero == 3),
    )


def alike(plan: Plan) -> bool:
    """Whether equal blocks cost alike, so that few can be rehearsed for all."""
    return all(choice.alike for choice in choices_of(plan)) and not any(map(ONE_BLOCK.search, plan.ignored))


def schedule_of(plan: Plan, ranks: int) -> PipelineSchedule:
    """The lists of actions of `ranks` ranks, those that split layers as one replica.

    Raises:
        PlanError: the ranks do not divide, or the schedule cannot run.
    """
    return plan.pipeline_schedule(ranks, together=plan.tensor.ranks)
