"""A prediction: memory and time of a step under one plan, put together from rehearsals of its ranks."""

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.doctor.hardware import Machines
from zeroshard.engine.techniques import data_ranks_of
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.alone import on_machines
from zeroshard.planner.predict.needs import Needs
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.predict.values import with_values
from zeroshard.planner.predict.ways import way_of


def predict(task: TrainingTask, plan: Plan, machines: Machines, rows: int, deep: bool = False) -> Prediction:
    """The memory of a plan on its fullest rank, and the time of its step.

    Args:
        rows: of one data rank in one step.
        deep: rehearse every block and every stage, instead of extrapolating from few.

    Raises:
        ZeroshardError: the engine refuses the plan.
    """
    stacks = None if deep else task.facts.stacks
    task, note = with_values(task, on_machines(plan, machines), machines, rows)
    needs = way_of(plan).needs(task, plan, machines, rows, stacks)
    found = put_together(needs, task, plan, machines, rows)
    return replace(found, notes=(*found.notes, *note))


def put_together(
    needs: Sequence[Needs], task: TrainingTask, plan: Plan, machines: Machines, rows: int, timed: bool = False
) -> Prediction:
    """The prediction from the numbers of rehearsed ranks: of one, or of one in each of some stages."""
    ranks, choices = machines.count, choices_of(plan)
    data_ranks = data_ranks_of(plan, ranks)
    times = way_of(plan).times(needs, plan, machines)
    notes = list(times.notes)
    if not all(one.exact for one in needs):
        notes.append("Few blocks and microbatches were rehearsed; every further one adds as much as the last.")
    fullest = max(needs, key=lambda one: sum(one.memory.values()))
    split = plan.pipeline.split or fullest.last.split
    per_node = min(machines.per_node, ranks)
    notes += [note for choice in choices for note in choice.notes(_host_rate(machines))]
    return Prediction(
        plan=plan.with_settings({"pipeline_parallel.split": split}) if split else plan,
        batch=rows,
        ranks=ranks,
        rank=fullest.rank,
        mode="shallow-real" if timed or task.values else "fake",
        time_mode="shallow-real" if timed else "roofline",
        memory=fullest.memory,
        capacity_bytes=machines.device.capacity_bytes,
        host=fullest.host,
        disk_bytes=fullest.disk_nbytes,
        host_bytes=fullest.on_host * per_node,
        host_capacity_bytes=_host_capacity(fullest, any(choice.beside_devices for choice in choices), machines),
        wire_bytes=fullest.wire,
        causes=times.causes,
        tokens=rows * data_ranks * task.sequence,
        events=fullest.last.events if fullest.exact else (),
        spans=times.spans,
        notes=tuple(notes),
        owners=fullest.last.owners,
    )


def _host_capacity(fullest: Needs, beside: bool, machines: Machines) -> int | None:
    """Bytes of one node's host memory; with `beside`, less those of the devices, which on CPUs lie in it."""
    if machines.host_memory is None or machines.device.kind != "cpu" or not beside:
        return machines.host_memory
    return max(0, machines.host_memory - sum(fullest.memory.values()) * min(machines.per_node, machines.count))


def _host_rate(machines: Machines) -> str:
    assumed = " is assumed" if machines.host_bandwidth is None and machines.device.kind != "cpu" else ""
    return f"{machines.host_rate / 1e9:.4g} GB/s of host memory for each rank{assumed}"
