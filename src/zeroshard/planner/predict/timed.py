"""Shallow-real predictions: the engine on real tensors with few blocks, on this machine's CPUs, and what follows.

They take over where tensors without values lie (transformers builds other masks for them), and they alone know what a
step takes on CPUs: caches, Python and the allocator are the real ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import put_together
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.predict.ways import way_of


def predict_timed(
    task: TrainingTask, plan: Plan, machines: Machines, rows: int, threads: int | None = None
) -> Prediction:
    """What a plan needs and how long its step takes, from steps really taken.

    Args:
        rows: of one data rank in one step.
        threads: that each rank computes with; what torch uses here by default.

    Raises:
        PlanError: the few blocks do not fit into the memory of this machine.
        ZeroshardError: whatever the engine refuses.
    """
    with _threads(threads):
        needs = way_of(plan).timed(task, plan, machines, rows)
        return put_together(needs, task, plan, machines, rows, timed=True)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
