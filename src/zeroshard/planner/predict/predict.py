"""A prediction: memory and time of a step under one plan, from rehearsals of its ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from zeroshard.doctor.hardware import Machines
from zeroshard.engine.techniques import data_ranks_of
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.rank_costs import RankCosts, Times
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.predict.shallow import Stack
from zeroshard.planner.predict.single_stage import Unstaged
from zeroshard.planner.predict.stages import Staged


def predict(task: TrainingTask, plan: Plan, machines: Machines, rows: int, deep: bool = False) -> Prediction:
    """The memory of a plan on its fullest rank, and the time of its step.

    Args:
        rows: of one data rank in one step.
        deep: rehearse every block and every stage, instead of extrapolating from few.

    Raises:
        ZeroshardError: the engine refuses the plan.
    """
    stacks = None if deep else task.facts.stacks
    return put_together(way_of(plan).rank_costs(task, plan, machines, rows, stacks), task, plan, machines, rows)


def put_together(
    per_rank: Sequence[RankCosts], task: TrainingTask, plan: Plan, machines: Machines, rows: int, timed: bool = False
) -> Prediction:
    """The prediction from the numbers of one rank, or of one rank for each rehearsed stage."""
    ranks, choices = machines.count, choices_of(plan)
    data_ranks = data_ranks_of(plan, ranks)
    times = way_of(plan).times(per_rank, plan, machines)
    notes = list(times.notes)
    if not all(one.exact for one in per_rank):
        notes.append("Few blocks and microbatches were rehearsed; every further one adds as much as the last.")
    fullest = max(per_rank, key=lambda one: sum(one.memory.values()))
    split = plan.pipeline.split or fullest.last.split
    per_node = min(machines.per_node, ranks)
    device = machines.device
    communicators = 0 if device.kind == "cpu" else fullest.last.communicators
    notes += [note for choice in choices for note in choice.notes(_host_rate(machines))]
    return Prediction(
        plan=plan.with_settings({"pipeline_parallel.split": split}) if split else plan,
        batch=rows,
        ranks=ranks,
        rank=fullest.rank,
        mode="shallow-real" if timed or task.values is True else "fake",
        time_mode="shallow-real" if timed else "roofline",
        memory=fullest.memory,
        phases=fullest.phases,
        capacity_bytes=device.beside(communicators),
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
        communicators=communicators,
        communicator_bytes=communicators * device.communicator_bytes,
        node_ranks=per_node,
        loading_bytes=task.facts.nbytes * per_node if task.made_aside == "whole" and device.kind != "cpu" else 0,
        adapters=task.adapters,
        optimizer=task.smaller,
    )


def _host_capacity(fullest: RankCosts, beside: bool, machines: Machines) -> int | None:
    """Bytes of one node's host memory; with `beside`, less the bytes of CPU devices, which lie in it."""
    if machines.host_memory is None or machines.device.kind != "cpu" or not beside:
        return machines.host_memory
    return max(0, machines.host_memory - sum(fullest.memory.values()) * min(machines.per_node, machines.count))


def _host_rate(machines: Machines) -> str:
    assumed = " is assumed" if machines.host_bandwidth is None and machines.device.kind != "cpu" else ""
    return f"{machines.host_rate / 1e9:.4g} GB/s of host memory for each rank{assumed}"


class Way(Protocol):
    """How plans of one kind are rehearsed."""

    def work(self, plan: Plan, blocks: int, deep: bool = False) -> float:
        """Duration of a prediction relative to one of one microbatch without stages, for a model with so many blocks.

        Args:
            deep: of every block and every stage; no work where the other has them all.
        """

    def whole(self, plan: Plan, blocks: int) -> int:
        """The size of a rehearsal of every block and stage, for a model with so many blocks."""

    def rank_costs(
        self, task: TrainingTask, plan: Plan, machines: Machines, rows: int, stacks: Sequence[Stack] | None
    ) -> list[RankCosts]:
        """The numbers of the rehearsed ranks, the one with the most bytes among them.

        Args:
            rows: of one data rank in one step.
            stacks: the model's repeated blocks, to rehearse few of them; None rehearses all.
        """

    def timed(self, task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> list[RankCosts]:
        """The same, from real steps.

        Raises:
            PlanError: few blocks do not fit into the memory of this machine.
        """

    def times(self, per_rank: Sequence[RankCosts], plan: Plan, machines: Machines) -> Times:
        """The time of a step of all ranks."""


def way_of(plan: Plan) -> Way:
    """The way for a plan."""
    return Staged() if plan.pipelined else Unstaged()


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
        per_rank = way_of(plan).timed(task, plan, machines, rows)
        return put_together(per_rank, task, plan, machines, rows, timed=True)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
