"""The kinds of recomputation, by the name in a plan."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from zeroshard.comm.mesh import Mesh
from zeroshard.parts.part import Parts
from zeroshard.parts.planned import Planned
from zeroshard.parts.tables import planned_bytes
from zeroshard.recompute.auto.auto_recomputation import AutoRecomputation
from zeroshard.recompute.auto.budget import ActivationBudget, FirstStep
from zeroshard.recompute.auto.decision import Rules
from zeroshard.recompute.auto.stored import choices_of
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.operations import operations_of
from zeroshard.recompute.policy import LOSSY, Activations
from zeroshard.recompute.recomputation import LENGTHS, Recomputation, no_operations


@dataclass(frozen=True)
class RecomputeInputs:
    """Parts of the engine that a recomputation is made from.

    Attributes:
        parts: of the model.
        planned: gives planned bytes besides those of the parts.
        mesh: of the ranks of the stage.
        staged: whether the model is cut into stages, so that other forwards come before a forward's backward.
        streams: whether stages update without waiting for each other.
        splits: whether layers are split over ranks.
        shares_experts: whether ranks share out experts.
    """

    parts: Parts
    planned: Callable[[], Iterable[Planned]]
    mesh: Mesh
    staged: bool
    streams: bool
    splits: bool
    shares_experts: bool


def recomputation_of(
    policy: Activations,
    model: nn.Module,
    blocks: Sequence[tuple[nn.Module, int]],
    context: RecomputeContext,
    inputs: RecomputeInputs,
) -> Recomputation:
    """Recompute the blocks of a model as a policy says."""
    context.exact = not any(name in LOSSY for name in policy.compress)
    if policy.recompute == "auto":
        return _auto_of(policy, model, blocks, context, inputs)
    operations = operations_of(policy.operations) if policy.recompute == "selective" else no_operations
    lengths, last = LENGTHS[policy.recompute], inputs.staged or policy.recompute != "sqrt"
    sums = policy.save_sums and not policy.partition  # which are as large as the inputs
    return Recomputation(model, blocks, lengths, context, operations, sums, last)


def _auto_of(
    policy: Activations,
    model: nn.Module,
    blocks: Sequence[tuple[nn.Module, int]],
    context: RecomputeContext,
    inputs: RecomputeInputs,
) -> Recomputation:
    """Recompute the blocks of a model as its measurements in the first step decide."""
    parts, together = inputs.parts, inputs.splits or inputs.shares_experts
    largest = max((sum(part.flat.index.padded_numel for part in of_unit) for of_unit in parts.of_units), default=0)
    scratch = 16 * largest if inputs.mesh.ranks > 1 else 0  # two units on their way, as they are and summed in fp32
    planned = lambda: planned_bytes(parts, inputs.planned())  # noqa: E731
    first = FirstStep(model, context.device, context.ledger, parts.reserve, waits=not inputs.streams)
    budget = ActivationBudget(context.ledger, planned, first, scratch, not inputs.shares_experts, together)
    rules = Rules(parts.gatherer.passes or together, choices_of(context.saver))
    return AutoRecomputation(model, blocks, context, budget, rules, policy.save_sums)
