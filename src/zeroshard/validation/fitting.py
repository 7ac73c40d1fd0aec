"""Plans that keep a model's states within a device's budget, by the formulas of ZeRO and offload alone."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.offload.policy import KINDS
from zeroshard.plan import GROUPS, Plan
from zeroshard.planning.settings import flat
from zeroshard.zero.byte_formulas import BytesPerParameter, state_bytes

OPTIONS = {  # fields in which the plans differ, and their options of the command line
    "zero": "--zero",
    "offload.parts": "--offload",
    "offload.fraction": "--offload.fraction",
    "microbatches": "--microbatches",
    "activations.recompute": "--recompute",
}
CLASSES = re.compile(rf"\b(?=(?:Plan|{'|'.join(kind.__name__ for kind in GROUPS.values())})\()")
ZERO: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Searches for a plan that needs fewer bytes on each device than the present one.

    Attributes:
        plan: the present plan.
        ranks: number of ranks that slice the states.
        trainable: trainable elements of all units.
        frozen: frozen elements of all units.
        units: bytes of the parameters of each unit, the root last.
        each: bytes of one parameter's states.
    """

    plan: Plan
    ranks: int
    trainable: int
    frozen: int
    units: tuple[int, ...]
    each: BytesPerParameter

    def device_bytes(self, plan: Plan) -> int:
        """Model states on each device under a plan, with the units gathered at once under stage 3."""
        states = state_bytes(self.trainable, self.ranks, plan.zero, self.each)
        parameters = states.parameters
        parameters += state_bytes(self.frozen, self.ranks, plan.zero, self.each, frozen=True).parameters
        gathered = 0
        if plan.zero == 3 and (self.ranks > 1 or plan.offloading.parameters):
            gathered = sum(sorted(self.units[:-1])[-2:]) + self.units[-1]  # two units besides the root
        if plan.offloading.parameters:
            parameters = Fraction(0)
        stay = Fraction(plan.offloading.staying)
        gradients = states.gradients * (stay if plan.zero >= 2 else 1)
        return ceil(parameters + gradients + stay * (states.master_weights + states.optimizer_states)) + gathered

    def way_out(self, needed: int, budget: int) -> str:
        """The lightest plan under which `needed` bytes fit the budget, as Python; or the smallest budget.

        Where the model states fit and the rest does not, that is recomputation of activations, which no formula counts.

        Args:
            needed: bytes on the device at the refused allocation; those that are no model states are the same under
                every plan.
        """
        states_bytes = self.device_bytes(self.plan)
        others = max(needed, states_bytes) - states_bytes
        plans = [self.plan, *leaner(self.plan, self.ranks)]
        plan, nbytes = fitting_or_least(((plan, others + self.device_bytes(plan)) for plan in plans), budget)
        again = recomputing(self.plan, "auto")
        if states_bytes <= budget and again != self.plan:
            more = f" If that is too little, the next is {as_call(plan)}." if nbytes <= budget else ""
            return (
                f"The model states take {states_bytes:,} of it by their formulas, the activations the rest: raise the "
                f"budget, give smaller batches, or recompute only as many activations as the budget asks for with "
                f"{as_call(again)}.{more}"
            )
        if nbytes <= budget:
            return (
                f"Raise the budget, or take the lightest plan that needs less: {nbytes:,} by the formulas of the model "
                f"states, and activations on top, with {as_call(plan)}."
            )
        least = replace(plan, device_memory=nbytes)
        return (
            f"No plan that differs in zero and offload alone keeps it within {budget:,}. Use more ranks, or the "
            f"smallest budget that can work, and activations come on top: {as_call(least)}."
        )


def recomputing(plan: Plan, how: Literal["blocks", "auto"]) -> Plan:
    """The plan with activations that are computed again, or as it is where that does not combine."""
    try:
        return replace(plan, activations=plan.saving.recomputed(how))
    except PlanError:
        return plan


def as_call(plan: Plan) -> str:
    """A plan as it is written in a program that imports zeroshard as zs."""
    return CLASSES.sub("zs.", repr(plan))


def fitting_or_least(needs: Iterable[tuple[Plan, int]], budget: int) -> tuple[Plan, int]:
    """The first plan whose bytes fit the budget, otherwise the one that needs least, each with its bytes.

    Raises:
        ValueError: there are no plans.
    """
    seen = []
    for plan, nbytes in needs:
        if nbytes <= budget:
            return plan, nbytes
        seen.append((plan, nbytes))
    return min(seen, key=lambda need: need[1])


def leaner(plan: Plan, ranks: int) -> Iterator[Plan]:
    """Plans with fewer bytes on each device, in the order of their cost: higher stages, then more offload."""
    kept = [part for part in KINDS if part in plan.offloading.kinds]
    ways = [(zero, kept) for zero in range(plan.zero + 1, 4) if ranks > 1]
    ways += [(zero, [*kept, "optimizer"]) for zero in range(max(2, plan.zero), 4 if ranks > 1 else 3)]
    ways += [(3, [*kept, "optimizer", "parameters"]), (3, list(KINDS))]
    seen = {plan}
    for zero, parts in ways if not plan.pipelined else ():
        parts_text = ",".join(part for part in KINDS if part in parts)
        try:
            other = replace(plan, zero=ZERO[zero], offload=replace(plan.offloading, parts=parts_text, fraction=1.0))
        except PlanError:  # fields that do not combine
            continue
        if other not in seen:
            seen.add(other)
            yield other


def changed(plan: Plan, other: Plan) -> str:
    """The differences between two plans, as options of the command line."""
    before, after = dict(flat(plan.as_dict())), dict(flat(other.as_dict()))
    return " ".join(f"{option} {after[name]}" for name, option in OPTIONS.items() if after[name] != before[name])
