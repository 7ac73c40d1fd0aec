"""The techniques that a plan asks for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.engine.forward import Forward
from zeroshard.moe.routing.statistics import MixtureSteps
from zeroshard.parts.part import Parts
from zeroshard.parts.place import Axis
from zeroshard.parts.technique import StepEnd, Technique, ranks_together
from zeroshard.pipeline.policy import Cut
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.plan import Plan
from zeroshard.precision.loss_scaling import LossScaler
from zeroshard.recompute.arena import CheckpointArena
from zeroshard.recompute.chunks import ChunkInputs
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.kinds import RecomputeInputs, recomputation_of
from zeroshard.recompute.recomputation import Recomputation
from zeroshard.recompute.shards import CheckpointPartition
from zeroshard.step.decision import Decision, StepRules
from zeroshard.units.hooks import place_of
from zeroshard.validation.rank_count import check_ranks


def _tensor(plan: Plan) -> Technique | None:
    if not plan.tensor.splits:
        return None
    from zeroshard.tensor.split.technique import TensorTechnique  # engines that do without start sooner

    return TensorTechnique(plan.tensor, plan.transport, plan.offloading.moments)


def _experts(plan: Plan) -> Technique | None:
    if not plan.experts.divides:
        return None
    from zeroshard.moe.exchange.technique import ExpertTechnique

    return ExpertTechnique(plan.experts, plan.transport)


TECHNIQUES: list[Callable[[Plan], Technique | None]] = [_experts, _tensor]  # makes those of a plan


def techniques_of(plan: Plan) -> list[Technique]:
    """The techniques that split parameters under a plan."""
    return [technique for make in TECHNIQUES if (technique := make(plan)) is not None]


def step_ends_of(
    model: nn.Module, stage: Stage | WholeModel, comm: Comm, techniques: Sequence[Technique], more: Recomputation | None
) -> list[StepEnd]:
    """The work of techniques at the end of each step.

    Args:
        comm: of the ranks of the stage.
        more: recomputation of blocks; None without it.
    """
    mixtures = MixtureSteps(model, comm, stage.is_elsewhere, ranks_together(techniques, comm.mesh.ranks))
    return [*([mixtures] if mixtures.reads else []), *(more.step_ends(comm, stage.world) if more else [])]


def decision_of(plan: Plan, step_ends: Sequence[StepEnd]) -> Decision:
    """Decisions on steps under a plan."""
    scaler = LossScaler.of(plan.loss_scaling) if plan.scales_loss else None
    return Decision(StepRules(plan.nonfinite, plan.clip_norm, plan.streams, plan.pipeline.stages), scaler, step_ends)


def cut_of(plan: Plan, techniques: Sequence[Technique], ranks: int) -> Cut:
    """The cut of a model into stages over so many ranks.

    Raises:
        PlanError: the ranks do not divide.
    """
    check_ranks(plan, ranks)
    replicas = plan.pipeline.replicas or (1,) * plan.pipeline.stages
    together = ranks_together(techniques, ranks * replicas[0] // sum(replicas))
    schedule = partial(plan.pipeline_schedule, together=together)
    return Cut(plan.pipeline, schedule, plan.units, together)


class RecomputedParts(NamedTuple):
    """Recomputation under a plan.

    Attributes:
        blocks: recomputes them; None where blocks keep their saved tensors.
        chunk_inputs: of a pipeline, whose chunks may be computed again from them; None without stages.
    """

    blocks: Recomputation | None
    chunk_inputs: ChunkInputs | None


def recomputing_of(
    plan: Plan,
    model: nn.Module,
    stage: Stage | WholeModel,
    parts: Parts,
    forward: Forward,
    axes: Mapping[str, Axis],
) -> RecomputedParts:
    """Recomputation of blocks and of a pipeline's chunks.

    Args:
        axes: of techniques, by name.
    """
    policy, of_blocks = plan.saving, plan.saving.of_blocks(plan.pipeline.stages)
    if not (plan.pipelined or of_blocks):
        return RecomputedParts(None, None)
    arena = CheckpointArena(stage.mesh.device, forward.hold) if policy.arena else None
    context = RecomputeContext(
        device=stage.mesh.device,
        ledger=parts.arena.ledger,
        places=lambda: {place_of(buffer) for part in parts.all for buffer in part.versions.buffers},
        hold=forward.hold,
        gathered=forward.gathered,
        draws=parts.random_numbers.again,
        now=stage.mesh.now,
        partition=CheckpointPartition(axes["tensor"].comm) if policy.partition else None,
        arena=arena,
        saver=forward.saver,
    )
    chunk_inputs = None
    if plan.pipelined:
        hooks = forward.hooks if policy.partition or plan.offloading.activations else None
        chunk_inputs = ChunkInputs(context, list(model.modules()), hooks, plan.recomputes)
    if not of_blocks and not policy.arena:
        return RecomputedParts(None, chunk_inputs)
    inputs = RecomputeInputs(
        parts=parts,
        planned=stage.planned,
        mesh=stage.mesh,
        staged=plan.pipelined,
        streams=plan.streams,
        splits=plan.tensor.splits,
        shares_experts=plan.experts.divides,
    )
    blocks = stage.blocks() if of_blocks else []
    return RecomputedParts(recomputation_of(policy, model, blocks, context, inputs), chunk_inputs)


def together_of(plan: Plan, ranks: int) -> int:
    """Number of ranks that work on the same data: neighbours, whose first rank is a multiple of that number.

    Raises:
        PlanError: as `data_ranks_of`.
    """
    return cut_of(plan, techniques_of(plan), ranks).together


def data_ranks_of(plan: Plan, ranks: int) -> int:
    """Number of batches in a step: one for each group of ranks that work on the same data.

    Raises:
        PlanError: the ranks do not divide among stages, or among the groups of a technique.
    """
    cut = cut_of(plan, techniques_of(plan), ranks)
    layout = cut.pipeline.layout(ranks, cut.together)
    return 1 if layout.uneven else layout.replicas[0]
