"""A prediction: what one plan needs and how long its step takes, put together from rehearsals of its ranks."""

from collections.abc import Sequence
from dataclasses import replace

import psutil

from zeroshard.errors import PlanError
from zeroshard.plan import Plan
from zeroshard.planner.hardware import Machines
from zeroshard.planner.needs import Needs, needs_of
from zeroshard.planner.rehearse import ALIKE, Rehearsed, Task, rehearse
from zeroshard.planner.result import Prediction
from zeroshard.planner.shallow import FEW, Stack, probes, shallow
from zeroshard.planner.stages import needs_of_stages, pipeline_times

BIASED = "Without values transformers builds other masks, and this machine cannot hold it with: up to 6 % high."
STATES_EACH = 16  # bytes per parameter in fp32, AdamW
ROOM = 0.7  # of this machine's free memory


def predict(task: Task, plan: Plan, machines: Machines, rows: int, deep: bool = False) -> Prediction:
    """What a plan needs on the rank that needs most, and how long a step takes.

    Args:
        rows: of one lane in one step.
        deep: rehearse every block and every stage, instead of few and what a further one adds.

    Raises:
        ZeroshardError: whatever the engine refuses.
    """
    there = on_machines(plan, machines)
    stacks = None if deep else task.look.stacks
    task, note = _with_values(task, there, machines, rows)
    if not plan.pipelined:
        found = put_together([_alone(task, there, machines, rows, stacks)], task, plan, machines, rows)
    else:
        chosen = sorted(set(range(plan.stages)) if deep else {0, plan.stages - 1})
        needs = needs_of_stages(task, plan, machines, rows, chosen, stacks or ())
        found = put_together(needs, task, plan, machines, rows)
    return replace(found, notes=(*found.notes, *note))


def put_together(
    needs: Sequence[Needs], task: Task, plan: Plan, machines: Machines, rows: int, timed: bool = False
) -> Prediction:
    """The prediction that follows from what was rehearsed: one rank, or one of each of some stages."""
    ranks, notes = machines.count, []
    if plan.pipelined:
        lanes = plan.pipeline(ranks).layout.replicas[0]
        causes, spans = pipeline_times(needs, plan, machines)
        if len(needs) < plan.stages:
            notes.append(f"{len(needs)} of {plan.stages} stages were rehearsed, the first and the last.")
    else:
        lanes = ranks
        causes, spans = {cause: seconds for cause, seconds in needs[0].spent.items() if seconds}, ()
    if not all(one.exact for one in needs):
        notes.append("Few blocks and microbatches were rehearsed; every further one adds as much as the last.")
    fullest = max(needs, key=lambda one: sum(one.memory.values()))
    split = plan.split or fullest.last.split
    here = min(machines.per_node, ranks)
    if plan.offloads:
        notes.append(_modelled(machines))
    return Prediction(
        plan=replace(plan, split=split) if split else plan,
        batch=rows,
        ranks=ranks,
        rank=fullest.rank,
        mode="shallow-real" if timed or task.values else "fake",
        time_mode="shallow-real" if timed else "roofline",
        memory=fullest.memory,
        capacity_bytes=machines.device.capacity_bytes,
        host=fullest.host,
        disk_bytes=fullest.disk_nbytes,
        host_bytes=(fullest.snapshot_nbytes + sum(fullest.host.values())) * here,
        host_capacity_bytes=_host_capacity(fullest, plan, machines),
        wire_bytes=fullest.wire,
        causes=causes,
        tokens=rows * lanes * task.sequence,
        events=fullest.last.events if fullest.exact else (),
        spans=spans,
        notes=tuple(notes),
    )


def _host_capacity(fullest: Needs, plan: Plan, machines: Machines) -> int | None:
    """What one node's host memory has beside the devices, which on CPUs lie in it."""
    if machines.host_memory is None or machines.device.kind != "cpu" or not plan.offloads:
        return machines.host_memory
    return max(0, machines.host_memory - sum(fullest.memory.values()) * min(machines.per_node, machines.count))


def _modelled(machines: Machines) -> str:
    assumed = " is assumed" if machines.host_bandwidth is None and machines.device.kind != "cpu" else ""
    rate = f"{machines.host_rate / 1e9:.4g} GB/s of host memory for each rank{assumed}"
    return f"Seconds of copies between tiers and of host updates are modelled on a virtual clock; {rate}."


def on_machines(plan: Plan, machines: Machines) -> Plan:
    """The plan with the transport that the engine would choose there."""
    if plan.transport != "auto" or machines.count == 1:
        return plan
    group = min(plan.shard_ranks or machines.count, machines.count // plan.stages)
    shares = machines.device.kind == "cpu" and (machines.nodes == 1 or machines.per_node % group == 0)
    return replace(plan, transport="shared" if shares else "network")


def _alone(task: Task, plan: Plan, machines: Machines, rows: int, stacks: Sequence[Stack] | None) -> Needs:
    """One rank of a plan without stages, which are all alike.

    Args:
        stacks: repeated blocks, of which few are rehearsed, and few microbatches; without, everything is.
    """
    m = plan.microbatches
    few = m if stacks is None else min(m, ALIKE)
    stacks = [stack for stack in stacks or () if stack.depth > FEW + 1 and not keeps_part_below(plan)]
    less = replace(plan, microbatches=few)
    seen: list[Rehearsed] = []
    for depths in probes(stacks):
        probe = replace(task, build=shallow(task.build, depths)) if stacks else task
        seen.append(rehearse(probe, less, 0, machines.count, rows // m * few, machines))
    return needs_of(seen[-1], seen, stacks, m - few)


def keeps_part_below(plan: Plan) -> bool:
    """Whether some units are offloaded and some are not, so that a further block may be either."""
    return "optimizer" in plan.offloads and plan.offload_share < 1


def _with_values(task: Task, plan: Plan, machines: Machines, rows: int) -> tuple[Task, tuple[str, ...]]:
    """The task on tensors with values, where the model needs them and this machine can hold them."""
    if not task.values and not task.look.needs_values:
        return task, ()
    task = replace(task, values=True)
    try:
        refuse_too_large(task, plan, machines, rows)
    except PlanError:
        return replace(task, values=False), (BIASED,)
    return task, ()


def refuse_too_large(task: Task, plan: Plan, machines: Machines, rows: int) -> None:
    """Refuse a rehearsal on tensors with values that this machine cannot hold.

    Raises:
        PlanError: with what it would need.
    """
    few = plan.microbatches if plan.pipelined else min(2, plan.microbatches)
    less, part = replace(plan, microbatches=few), rows // plan.microbatches * few
    try:
        needed = rehearse(replace(task, values=False), less, 0, machines.count, part).peak_bytes
    except RuntimeError:  # an operation that torch cannot do without values; then by the states alone, twice over
        needed = 2 * STATES_EACH * task.look.parameters
    room = int(ROOM * psutil.virtual_memory().available)
    if needed > room:
        raise PlanError(
            f"A rehearsal on tensors with values needs {needed:,} bytes and {room:,} are free here. Use fewer rows, or "
            f"a model of the same kind with smaller layers."
        )
