"""Plans without stages: one rank stands for all, rehearsed with few blocks and few microbatches."""

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.choices import alike, choices_of, schedule_of
from zeroshard.planner.predict.rank_costs import (
    RankCosts,
    Times,
    largest_of,
    owner_ranks,
    rank_costs_of,
    with_few_blocks,
)
from zeroshard.planner.predict.rehearse import SETTLED, Rehearsed, TrainingTask, refuse_too_large, rehearse
from zeroshard.planner.predict.shallow import FEW, Stack, probes, shallow
from zeroshard.schedule.peaks import ALIKE

ALL_BLOCKS = (15, 20)  # blocks to add to all of a model, and to divide these by, for the work of a whole rehearsal
RECOMPUTED = 1.35  # times the work without recomputation
FIRST_STEP = 3  # work of building and of the first step beyond that of a later one, as of so many
FEW_TIMED, STEP_TIMED = 4, 4  # blocks of the first run, and more of the next: enough for a measurable difference


class Unstaged:
    """The way to rehearse plans without stages; a `ways.Way`."""

    def work(self, plan: Plan, blocks: int, deep: bool = False) -> float:
        """The unit, by the microbatches and steps that are rehearsed, and by all blocks where these are."""
        choices, m = choices_of(plan), plan.microbatches
        steps = SETTLED
        for choice in choices:
            steps = choice.settled(schedule_of(plan, plan.tensor.ranks), steps)
        few = blocks > FEW + 1 and all(choice.alike for choice in choices)
        known = deep and not few
        whole = 1.0 if few and not deep else max(1.0, (blocks + ALL_BLOCKS[0]) / ALL_BLOCKS[1]) * (not known)
        again = RECOMPUTED**choices.recomputing.in_blocks
        return whole * again * (1 + (m if deep else min(m, ALIKE))) / 2 * (steps + FIRST_STEP) / (SETTLED + FIRST_STEP)

    def whole(self, plan: Plan, blocks: int) -> int:
        """Blocks times microbatches."""
        return blocks * plan.microbatches

    def rank_costs(
        self, task: TrainingTask, plan: Plan, machines: Machines, rows: int, stacks: Sequence[Stack] | None
    ) -> list[RankCosts]:
        """The numbers of one rank; where whole parameters have owners, of the rank with the most bytes."""
        plan, m = on_machines(plan, machines), plan.microbatches
        few = m if stacks is None else min(m, ALIKE)
        less = replace(plan, microbatches=few)
        slices = choices_of(plan).slicing.slices(machines.count)
        chosen = owner_ranks(task, plan, 0, slices)
        if len(chosen) > 1:
            each = [rehearse(task, less, rank, machines.count, rows // m * few, machines) for rank in chosen]
            return [largest_of([rank_costs_of(one, more=m - few) for one in each], slices * plan.tensor.ranks)]
        deep = _deeper(plan, stacks or (), FEW + 1)
        seen: list[Rehearsed] = []
        for depths in probes(deep):
            probe = with_few_blocks(task, depths) if deep else task
            seen.append(rehearse(probe, less, 0, machines.count, rows // m * few, machines))
        return [rank_costs_of(seen[-1], seen, deep, m - few)]

    def timed(self, task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> list[RankCosts]:
        """The numbers of one rank, from real steps."""
        plan, m = on_machines(plan, machines), plan.microbatches
        deep = _deeper(plan, task.facts.stacks, FEW_TIMED + STEP_TIMED)
        few = m if m <= 2 * ALIKE else ALIKE
        less = replace(plan, microbatches=few)
        seen: list[Rehearsed] = []
        for number, depths in enumerate(probes(deep, FEW_TIMED, STEP_TIMED)):
            probe = replace(task, build=shallow(task.build, depths)) if deep else task
            if number == 0:
                refuse_too_large(probe, less, machines, rows // m * few)
            seen.append(rehearse(probe, less, 0, machines.count, rows // m * few, machines, timed=True))
        return [rank_costs_of(seen[-1], seen, deep, m - few, (FEW_TIMED, STEP_TIMED))]

    def times(self, per_rank: Sequence[RankCosts], plan: Plan, machines: Machines) -> Times:
        """The seconds of the rehearsed rank."""
        return Times({cause: seconds for cause, seconds in per_rank[0].spent.items() if seconds})


def _deeper(plan: Plan, stacks: Sequence[Stack], few: int) -> list[Stack]:
    """The stacks of more than `few` blocks, if few blocks determine the numbers of all."""
    return [stack for stack in stacks if alike(plan) and stack.depth > few]


def on_machines(plan: Plan, machines: Machines) -> Plan:
    """The plan with the transport that the engine would choose on these machines."""
    if plan.transport != "auto" or machines.count == 1:
        return plan
    group = min(choices_of(plan).slicing.slices(machines.count), schedule_of(plan, machines.count).layout.replicas[0])
    shares = machines.device.kind == "cpu" and (machines.nodes == 1 or machines.per_node % group == 0)
    return replace(plan, transport="shared" if shares else "network")
