"""Rehearsals on tensors with values: where a model needs them, and whether this machine can hold them."""

from dataclasses import replace

import psutil

from zeroshard.doctor.hardware import Machines
from zeroshard.errors import PlanError
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse

BIASED = "Memory may be up to 6 % too high: rehearsed without values for lack of memory here, with other masks."
STATES_EACH = 16  # bytes per parameter in fp32, AdamW
ROOM = 0.7  # of this machine's free memory


def with_values(task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> tuple[TrainingTask, tuple[str, ...]]:
    """The task on tensors with values, where the model needs them and this machine can hold them."""
    if not task.values and not task.facts.needs_values:
        return task, ()
    task = replace(task, values=True)
    try:
        refuse_too_large(task, plan, machines, rows)
    except PlanError:
        return replace(task, values=False), (BIASED,)
    return task, ()


def refuse_too_large(task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> None:
    """Refuse a rehearsal on tensors with values that this machine cannot hold.

    Raises:
        PlanError: with the needed and the free bytes.
    """
    few = choices_of(plan).stages.fewest(2)
    less, few_rows = replace(plan, microbatches=few), rows // plan.microbatches * few
    try:
        needed = rehearse(replace(task, values=False), less, 0, machines.count, few_rows).peak_bytes
    except RuntimeError:  # torch lacks an operation without values: assume twice the states
        needed = 2 * STATES_EACH * task.facts.parameters
    room = int(ROOM * psutil.virtual_memory().available)
    if needed > room:
        raise PlanError(
            f"A rehearsal on tensors with values needs {needed:,} bytes and {room:,} are free here. Use fewer rows, or "
            f"a model of the same kind with smaller layers."
        )
