"""Shallow-real predictions: the engine on real tensors with few blocks, on this machine's CPUs, and what follows.

They take over where tensors without values lie (transformers builds other masks for them), and they alone know what a
step takes on CPUs: caches, Python and the allocator are the real ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from zeroshard.plan import Plan
from zeroshard.planner.hardware import Machines
from zeroshard.planner.needs import Needs, needs_of
from zeroshard.planner.predict import keeps_part_below, on_machines, put_together, refuse_too_large
from zeroshard.planner.rehearse import ALIKE, Task, rehearse
from zeroshard.planner.result import Prediction
from zeroshard.planner.shallow import probes, shallow

FEW, STEP = 4, 4  # blocks that are run, and further ones: far enough apart for what is measured


def predict_really(task: Task, plan: Plan, machines: Machines, rows: int, threads: int | None = None) -> Prediction:
    """What a plan needs and how long its step takes, from steps really taken.

    Args:
        rows: of one lane in one step.
        threads: that each rank computes with; what torch uses here by default.

    Raises:
        PlanError: the few blocks do not fit into the memory of this machine.
        ZeroshardError: whatever the engine refuses.
    """
    with _threads(threads):
        if plan.pipelined:
            first = plan.pipeline(machines.count).layout.first_ranks
            refuse_too_large(task, plan, machines, rows)
            ones = [rehearse(task, plan, rank, machines.count, rows, machines, timed=True) for rank in first]
            return put_together([needs_of(one) for one in ones], task, plan, machines, rows, timed=True)
        needs = _alone(task, on_machines(plan, machines), machines, rows)
        return put_together([needs], task, plan, machines, rows, timed=True)


def _alone(task: Task, plan: Plan, machines: Machines, rows: int) -> Needs:
    stacks = [stack for stack in task.look.stacks if stack.depth > FEW + STEP and not keeps_part_below(plan)]
    m = plan.microbatches
    few = m if m <= 2 * ALIKE else ALIKE
    less = replace(plan, microbatches=few)
    seen = []
    for number, depths in enumerate(probes(stacks, FEW, STEP)):
        probe = replace(task, build=shallow(task.build, depths)) if stacks else task
        if number == 0:
            refuse_too_large(probe, less, machines, rows // m * few)
        seen.append(rehearse(probe, less, 0, machines.count, rows // m * few, machines, timed=True))
    return needs_of(seen[-1], seen, stacks, m - few, (FEW, STEP))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
