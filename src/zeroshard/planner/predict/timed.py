"""Shallow-real predictions: the engine runs on real tensors with few blocks, on this machine's CPUs.

They also hold for models that run differently on tensors without values (transformers builds other masks), and they
alone give the time of a step on CPUs, with real caches, Python and allocator.
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
    """Memory and time of a step under a plan, from real steps.

    Args:
        rows: of one data rank in one step.
        threads: of each rank; by default as many as torch uses now.

    Raises:
        PlanError: the few blocks do not fit into the memory of this machine.
        ZeroshardError: the engine refuses the plan.
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
