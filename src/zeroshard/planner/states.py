"""Model states by the formulas alone, to leave out plans before a rehearsal. Predictions never come from here."""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from zeroshard.optim import check_elementwise
from zeroshard.plan import Plan
from zeroshard.planner.private import fakes
from zeroshard.planner.rehearse import Task, quiet
from zeroshard.units import find_units
from zeroshard.zero.formulas import BytesPerParameter, state_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the formulas need to know of a model and its optimizer.

    Attributes:
        trainable: parameters that are trained.
        frozen: those that are not.
        units: parameters of each unit.
        state_bytes: of the optimizer per parameter, in fp32.
    """

    trainable: int
    frozen: int
    units: tuple[int, ...]
    state_bytes: int


def sizes_of(task: Task) -> Sizes:
    """Look at the model and try the optimizer.

    Raises:
        OptimizerError: the optimizer needs whole tensors.
    """
    with fakes(), quiet():
        model = task.build()
        parameters = list(model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        units = tuple(sum(p.numel() for p in unit.parameters.values()) for unit in find_units(model))
        optimizer = task.optimizer_of(model)
    layout = check_elementwise(optimizer)
    return Sizes(trainable, sum(p.numel() for p in parameters) - trainable, units, layout.bytes_per_element)


def least_bytes(sizes: Sizes, plan: Plan, ranks: int) -> int:
    """What the states take at least on every rank; under stage 3 with the largest unit gathered."""
    width = 4 if plan.precision == "fp32" else 2
    each = BytesPerParameter(width, width, 0 if width == 4 else 4, sizes.state_bytes)
    # The stage with most holds at least an equal part.
    sizes = replace(sizes, trainable=sizes.trainable // plan.stages, frozen=sizes.frozen // plan.stages)
    slices = plan.shard_ranks or ranks // plan.stages
    if "optimizer" in plan.offloads:
        return _least_with_offload(sizes, plan, slices, each)
    states = state_bytes(sizes.trainable, slices, plan.zero, each).total
    states += state_bytes(sizes.frozen, slices, plan.zero, each, frozen=True).total
    gathered = max(sizes.units) * width if plan.zero == 3 and ranks > 1 else 0
    return ceil(states) + gathered


def _least_with_offload(sizes: Sizes, plan: Plan, slices: int, each: BytesPerParameter) -> int:
    """The weights, whole or sliced, or of one unit if they come and go; and the states of units that stay."""
    below, largest = "parameters" in plan.offloads, max(sizes.units)
    weights = 0 if below else sizes.trainable + sizes.frozen
    gathered = largest if plan.zero == 3 and (slices > 1 or below) else 0
    stay = max(Fraction(0), (1 - Fraction(plan.offload_share)) * sizes.trainable - largest)
    states = stay * (each.gradient + each.master_weight + each.optimizer_state) / slices
    return (
        ceil(Fraction(weights, slices if plan.zero == 3 else 1) * each.parameter + states) + gathered * each.parameter
    )
