"""Exclusions: plans whose states alone exceed a device, or whose peak must, by a rehearsal of another plan.

[Note: the whole share first] Where a share of the states is offloaded, blocks are not alike, and all of them are
rehearsed. With all states offloaded few blocks tell the peak. With a share it is higher by at least `STAYING` of the
states that stay, as gradients may not be there at the peak. So a deep model is rehearsed with all of them offloaded
first, and shares that cannot fit are left out.

[Note: the same activations] Last resorts that offload no activations keep the same ones on the device. Where those of
one of them exceed it alone, so do those of the others, which are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from zeroshard.doctor.hardware import Machines
from zeroshard.memory.ledger import Category
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.estimate import MODEL_STATES
from zeroshard.planner.predict.result import MARGIN, Prediction
from zeroshard.planner.predict.states import Sizes, least_bytes, states_of
from zeroshard.text import format_bytes

STAYING = 0.85  # of the bytes of states by the formulas


@dataclass(frozen=True)
class Exclusions:
    """The exclusions of a job by the formulas.

    Attributes:
        base: settings that all plans have in common.
    """

    sizes: Sizes
    machines: Machines
    base: Plan

    @property
    def room(self) -> int:
        """The most bytes of a device that a plan can need and fit."""
        return int(self.machines.device.capacity_bytes * (1 - MARGIN))

    def least_bytes(self, plan: Plan, ranks: int | None = None) -> int:
        """The least bytes of its states on a device."""
        return least_bytes(self.sizes, plan, self.machines.count if ranks is None else ranks)

    def why(self, plan: Plan) -> tuple[str, str] | None:
        """Why the states of a plan alone exceed a device or a node's memory, and the way out; None if they do not."""
        ranks, machines = self.machines.count, self.machines
        needed = self.least_bytes(plan)
        states, per_node = states_of(self.sizes, plan, ranks), min(ranks, machines.per_node)
        kept = per_node * sum(choice.least_host_bytes(states, ranks) for choice in choices_of(plan))
        if not machines.node_holds(kept):
            held, need = format_bytes(machines.host_memory or 0), format_bytes(kept)
            why = f"The offloaded states alone take {need} of each node's host memory, which is {held}."
            return why, f"Nodes with more than {need} of host memory would hold them."
        if needed <= self.room or any(choice.exhausted for choice in choices_of(plan)):
            return None
        has = format_bytes(machines.device.capacity_bytes)
        free = f", of which {MARGIN:.0%} stay free" if needed <= machines.device.capacity_bytes else ""
        why = f"Its model states alone take {format_bytes(needed)} on every rank, and a device has {has}{free}."
        return why, self._way_out(plan, needed)

    def possible(self, plan: Plan, counts: Sequence[int]) -> Sequence[int]:
        """The numbers of microbatches with which the states fit, as several backwards add up in fp32; all if none."""
        return [m for m in counts if self.why(replace(plan, microbatches=m)) is None] or counts

    def at_least(self, plan: Plan, known: Prediction) -> Prediction:
        """The least that a plan needs by the prediction of one that offloads more ([Note: the whole share first])."""
        more = round(STAYING * (self.least_bytes(plan) - self.least_bytes(known.plan)))
        memory = {**known.memory, MODEL_STATES: max(0, more)}
        bound = replace(known, plan=plan, mode="estimate", time_mode="estimate", memory=memory, events=())
        return replace(bound, host={}, host_bytes=0)

    def crowded(self, plan: Plan, rows: int, seen: Mapping[tuple[Plan, int], Prediction]) -> Prediction | None:
        """The least that a last resort needs, if its activations alone exceed a device ([Note: the same activations]).

        Args:
            seen: the predictions of plans for so many rows per data rank.
        """
        if not any(choice.resort for choice in choices_of(plan)) or (like := _forward_of(plan)) is None:
            return None
        for (other, known_rows), known in seen.items():
            held = known.memory.get(Category.ACTIVATIONS, 0)
            if held > self.room and known_rows == rows and _forward_of(other) == like:
                memory = {MODEL_STATES: self.least_bytes(plan), str(Category.ACTIVATIONS): held}
                bound = replace(known, plan=plan, mode="estimate", time_mode="estimate", memory=memory, events=())
                return replace(bound, host={}, host_bytes=0, disk_bytes=0)
        return None

    def _way_out(self, plan: Plan, needed: int) -> str:
        """The smallest single change with which the states would fit."""
        every = (remedy for choice in reversed(choices_of(plan)) for remedy in choice.remedies(self.machines.count))
        for remedy in every:
            changed = (self.base if remedy.anew else plan).with_settings(remedy.settings)
            if remedy.certain or self.least_bytes(changed, remedy.ranks) <= self.room:
                return remedy.sentence
        return f"Devices with {format_bytes(needed)} or more would hold them."


def _forward_of(plan: Plan) -> Plan | None:
    """The plan without settings that leave the activations on its device as they are; None if these are its own."""
    every = [choice.beside_forward for choice in choices_of(plan)]
    known = [settings.items() for settings in every if settings is not None]
    return plan.with_settings(dict(chain.from_iterable(known))) if len(known) == len(every) else None
