"""A prediction: what one plan needs and how long its step takes, put together from rehearsals of its ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import psutil

from zeroshard.comm import Purpose
from zeroshard.errors import PlanError
from zeroshard.plan import Plan
from zeroshard.planner.hardware import Machines
from zeroshard.planner.private import fakes
from zeroshard.planner.rehearse import ALIKE, Rehearsed, Task, highest_of, messages_of, rehearse
from zeroshard.planner.result import TEMPORARIES, Prediction, Span
from zeroshard.planner.shallow import FEW, Stack, deepen, needs_values, probes, shallow, stacks_of
from zeroshard.schedule import Layout, Pipeline
from zeroshard.schedule.peaks import peaks
from zeroshard.schedule.simulate import Costs, Simulation, simulate
from zeroshard.schedule.spans import costs_of

BIASED = "Without values transformers builds other masks, and this machine cannot hold it with: up to 6 % high."
STATES_EACH = 16  # bytes per parameter in fp32, AdamW
ROOM = 0.7  # of this machine's free memory
MOST_FILLED = 8  # stages up to which a rehearsal fills the pipeline
MOST_SPANS = 20_000  # of a pipeline's timeline
PER_MICROBATCH = (str(Purpose.SEND_ACTIVATIONS), str(Purpose.SEND_GRADIENTS))


@dataclass(frozen=True, slots=True)
class Needs:
    """One rank's numbers, at the model's depth and the plan's microbatches.

    Attributes:
        memory: bytes by category at the peak.
        wire: bytes by purpose.
        spent: seconds by cause.
        snapshot_nbytes: of its part of a checkpoint.
        host: bytes by category that it keeps in host memory.
        disk_nbytes: that it keeps on a disk.
        last: the rehearsal that came closest to it.
        exact: whether it was just that.
    """

    rank: int
    memory: Mapping[str, int]
    wire: Mapping[str, int]
    spent: Mapping[str, float]
    snapshot_nbytes: int
    host: Mapping[str, int]
    disk_nbytes: int
    last: Rehearsed
    exact: bool


def predict(task: Task, plan: Plan, machines: Machines, rows: int, deep: bool = False) -> Prediction:
    """What a plan needs on the rank that needs most, and how long a step takes.

    Args:
        rows: of one lane in one step.
        deep: rehearse every block and every stage, instead of few and what a further one adds.

    Raises:
        ZeroshardError: whatever the engine refuses.
    """
    there = on_machines(plan, machines)
    task, note = _with_values(task, there, machines, rows)
    if not plan.pipelined:
        found = put_together([_alone(task, there, machines, rows, deep)], task, plan, machines, rows)
    else:
        chosen = sorted(set(range(plan.stages)) if deep else {0, plan.stages - 1})
        found = put_together(_of_stages(task, plan, machines, rows, chosen), task, plan, machines, rows)
    return replace(found, notes=(*found.notes, *note))


def put_together(
    needs: Sequence[Needs], task: Task, plan: Plan, machines: Machines, rows: int, timed: bool = False
) -> Prediction:
    """The prediction that follows from what was rehearsed: one rank, or one of each of some stages."""
    ranks, notes = machines.count, []
    if plan.pipelined:
        lanes = plan.pipeline(ranks).layout.replicas[0]
        causes, spans = _pipeline_times(needs, plan, machines)
        if len(needs) < plan.stages:
            notes.append(f"{len(needs)} of {plan.stages} stages were rehearsed, the first and the last.")
    else:
        lanes = ranks
        causes, spans = {cause: seconds for cause, seconds in needs[0].spent.items() if seconds}, ()
    if not all(one.exact for one in needs):
        notes.append("Few blocks and microbatches were rehearsed; every further one adds as much as the last.")
    fullest = max(needs, key=lambda one: sum(one.memory.values()))
    split = fullest.last.split
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
    assumed = " is assumed" if machines.host_bandwidth is None and machines.device.kind == "cuda" else ""
    rate = f"{machines.host_rate / 1e9:.4g} GB/s of host memory for each rank{assumed}"
    return f"Seconds of copies between tiers and of host updates are modelled on a virtual clock; {rate}."


def on_machines(plan: Plan, machines: Machines) -> Plan:
    """The plan with the transport that the engine would choose there."""
    if plan.transport != "auto" or plan.pipelined or machines.count == 1:
        return plan
    shares = machines.device.kind == "cpu" and machines.nodes == 1
    return replace(plan, transport="shared" if shares else "network")


def _alone(task: Task, plan: Plan, machines: Machines, rows: int, deep: bool) -> Needs:
    """One rank of a plan without stages, which are all alike."""
    with fakes():
        stacks = [] if deep else [stack for stack in stacks_of(task.build()) if stack.depth > FEW + 1]
    m = plan.microbatches
    few = m if deep else min(m, ALIKE)
    less = replace(plan, microbatches=few)
    seen: list[Rehearsed] = []
    for depths in probes(stacks):
        probe = replace(task, build=shallow(task.build, depths)) if stacks else task
        seen.append(rehearse(probe, less, 0, machines.count, rows // m * few, machines))
    return needs_of(seen[-1], seen, stacks, m - few)


def needs_of(
    last: Rehearsed,
    seen: Sequence[Rehearsed] = (),
    stacks: Sequence[Stack] = (),
    more: int = 0,
    depths: tuple[int, int] = (FEW, 1),
) -> Needs:
    """A rank's numbers from rehearsals at few depths, with `more` microbatches than were rehearsed."""
    numbers = deepen(stacks, [_numbers(one, more) for one in seen or [last]], *depths)
    wire = _whole(_part(numbers, "wire"))
    return Needs(
        last.rank,
        _highest(numbers),
        wire,
        _part(numbers, "spent"),
        round(numbers["snapshot"]),
        _whole(_part(numbers, "host")),
        round(numbers["disk"]),
        last,
        exact=not stacks and not more,
    )


def _numbers(one: Rehearsed, more: int) -> dict[str, float]:
    """All numbers of a rehearsal with `more` further microbatches, in one mapping, to be deepened together."""
    each = one.each
    numbers = _memory_numbers(one, one.plan.microbatches + more)
    for purpose, (_, nbytes, _) in one.wire.items():
        numbers[f"wire/{purpose}"] = nbytes + (more * each.wire.get(purpose, 0) if each and more else 0)
    for cause, seconds in one.spent.items():
        numbers[f"spent/{cause}"] = seconds + (more * each.spent.get(cause, 0.0) if each and more else 0.0)
    numbers |= {f"host/{category}": nbytes for category, nbytes in one.host.items()}
    return numbers | {"snapshot": one.snapshot_nbytes, "disk": one.disk_nbytes}


def _of_stages(task: Task, plan: Plan, machines: Machines, rows: int, stages: Sequence[int]) -> list[Needs]:
    """The first replica of each of some stages.

    Of many microbatches only some are rehearsed, with two numbers of them: memory grows with those that are in flight
    at once, which the schedule's own lists say.
    """
    m, ranks = plan.microbatches, machines.count
    first = plan.pipeline(ranks).layout.first_ranks
    less, more = _some_microbatches(plan)
    if plan.streams or m <= less + more:
        return [_of_stage(rehearse(task, plan, first[s], ranks, rows, machines), 1, True) for s in stages]
    each, found = rows // m, []
    for stage in stages:
        rank = first[stage]
        some, further, all_of_them = (_in_flight(plan, stage, k) for k in (less, more, m))
        growth = (all_of_them - further) / (further - some) if further > some else 0
        b = rehearse(task, replace(plan, microbatches=more), rank, ranks, each * more, machines)
        a = b
        if growth:
            a = rehearse(task, replace(plan, microbatches=less), rank, ranks, each * less, machines)
        low, high = _memory_numbers(a, m), _memory_numbers(b, m)
        memory = {name: n + float(growth) * (n - low.get(name, 0)) for name, n in high.items()}
        found.append(replace(_of_stage(b, m / more, False), memory=_highest(memory)))
    return found


def _some_microbatches(plan: Plan) -> tuple[int, int]:
    """Two numbers of microbatches to rehearse; where stages are few, the larger one fills them."""
    d = plan.stages
    if plan.schedule in ("gpipe", "naive"):
        return 2 * d, 3 * d
    if plan.chunks > 1:
        return d, 2 * d
    return (d, d + 1) if d <= MOST_FILLED else (ALIKE, ALIKE + 1)


def _memory_numbers(one: Rehearsed, microbatches: int) -> dict[str, float]:
    """Bytes by phase and category, with the batch of so many microbatches beside what was rehearsed."""
    numbers = {f"memory/{p}/{name}": float(n) for p, memory in one.phases.items() for name, n in memory.items()}
    further = one.batch_nbytes / one.plan.microbatches * (microbatches - one.plan.microbatches)
    for phase in one.phases:
        numbers[f"memory/{phase}/{TEMPORARIES}"] += further
    return numbers


def _highest(numbers: Mapping[str, float]) -> dict[str, int]:
    """Bytes by category in the phase that stands highest."""
    phases: dict[str, dict[str, int]] = {}
    for key, nbytes in _part(numbers, "memory").items():
        phase, _, name = key.partition("/")
        phases.setdefault(phase, {})[name] = round(nbytes)
    return dict(highest_of(phases))


def _in_flight(plan: Plan, stage: int, microbatches: int) -> Fraction:
    """Microbatches whose activations a stage keeps at once, at most."""
    layout = Layout.equal(plan.stages, plan.chunks)
    pipeline = Pipeline(plan.schedule, layout, microbatches, reduce_each=plan.reduces_each_microbatch)
    return peaks([pipeline.step(stage)], plan.chunks)[0].in_flight


def _of_stage(one: Rehearsed, times: float, exact: bool) -> Needs:
    """A stage's numbers, with `times` as many messages as were seen."""
    wire = {p: round(nbytes * (times if p in PER_MICROBATCH else 1)) for p, (_, nbytes, _) in one.wire.items()}
    return Needs(one.rank, one.memory, wire, one.spent, one.snapshot_nbytes, one.host, one.disk_nbytes, one, exact)


def _pipeline_times(
    needs: Sequence[Needs], plan: Plan, machines: Machines
) -> tuple[dict[str, float], tuple[tuple[Span, ...], ...]]:
    """Seconds of one step by cause, and who does what when."""
    pipeline = needs[0].last.pipeline
    assert pipeline is not None
    pipeline = replace(pipeline, microbatches=plan.microbatches)
    one_lane = replace(pipeline, layout=type(pipeline.layout).equal(plan.stages, plan.chunks), loans=())
    even = not pipeline.layout.uneven
    lists_of = one_lane if even else pipeline  # lanes of an even layout do not meet but at reductions
    costs = _costs(needs, lists_of, machines)
    simulation = simulate(lists_of.stretch(4 if plan.streams else 1), lists_of.layout, costs)
    spent = [_spent(one, plan, costs, lists_of) for one in needs]
    causes = max(spent, key=lambda causes: causes["compute"] + causes["optimizer"])
    wire = max(each["wire"] for each in spent)
    overhead = max(each.pop("overhead") for each in spent)
    bubble = _step_seconds(simulation, plan) + overhead - causes["compute"] - causes["optimizer"]
    causes |= {"wire": wire, "bubble": max(0.0, bubble)}
    spans = tuple(tuple(rank) for rank in simulation.spans)
    return causes, spans if sum(map(len, spans)) <= MOST_SPANS else ()


def _spent(one: Needs, plan: Plan, costs: Costs, pipeline: Pipeline) -> dict[str, float]:
    """What a stage spends in one step, by cause; "overhead" is what lies beside its actions."""
    assert one.last.pipeline is not None
    stage = one.last.pipeline.layout.stage_of(one.rank)
    actions = sum(end - start for _, start, end in one.last.spans)
    spent = {cause: one.spent.get(cause, 0.0) for cause in ("compute", "optimizer", "wire")}
    overhead = max(0.0, spent["compute"] + spent["optimizer"] - actions)
    chunks = pipeline.layout.chunks_of(stage)
    passes = sum(costs.forward[c] + _backward(costs, c, pipeline) for c in chunks)
    updates = sum(costs.update[c] for c in chunks) * (plan.microbatches // plan.microbatches_per_update)
    compute = plan.microbatches * passes + updates - spent["optimizer"] + overhead
    return {**spent, "compute": compute, "overhead": overhead}


def _backward(costs: Costs, chunk: int, pipeline: Pipeline) -> float:
    """Seconds of a chunk's backward, in one part or in two."""
    if pipeline.name == "zb-h1":
        return costs.input_gradient[chunk] + costs.weight_gradient[chunk]
    return costs.backward[chunk]


def _step_seconds(simulation: Simulation, plan: Plan) -> float:
    steady = simulation.steady
    return simulation.makespan if steady is None else steady.microbatch_seconds * plan.microbatches


def _costs(needs: Sequence[Needs], pipeline: Pipeline, machines: Machines) -> Costs:
    """What each chunk costs, from the spans of the stages that were rehearsed; the others are like those before."""
    layout = pipeline.layout
    costs = costs_of([list(one.last.spans) for one in needs], pipeline)
    seen = {action.chunk for one in needs for action, _, _ in one.last.spans}
    like = [max(c for c in seen if c <= chunk) for chunk in range(layout.all_chunks)]
    fields = ("forward", "backward", "input_gradient", "weight_gradient", "update")
    spread: dict[str, Any] = {name: tuple(getattr(costs, name)[c] for c in like) for name in fields}
    share = max(1, needs[0].last.plan.microbatches * layout.chunks)
    sent = max(messages_of(one.last.wire) for one in needs) // share // 2 or 0
    seconds = machines.wire_seconds("send", sent, layout.stages, machines.count // layout.stages) if sent else 0.0
    rate = sent / seconds if seconds else float("inf")
    return replace(costs, **spread, bytes_per_second=rate, boundary_bytes=(sent,) * layout.all_chunks)


def _with_values(task: Task, plan: Plan, machines: Machines, rows: int) -> tuple[Task, tuple[str, ...]]:
    """The task on tensors with values, where the model needs them and this machine can hold them."""
    with fakes():
        if not task.values and not needs_values(task.build()):
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
        with fakes():
            needed = 2 * STATES_EACH * sum(parameter.numel() for parameter in task.build().parameters())
    room = int(ROOM * psutil.virtual_memory().available)
    if needed > room:
        raise PlanError(
            f"A rehearsal on tensors with values needs {needed:,} bytes and {room:,} are free here. Use fewer rows, or "
            f"a model of the same kind with smaller layers."
        )


def _part(numbers: Mapping[str, float], name: str) -> dict[str, float]:
    return {key.partition("/")[2]: value for key, value in numbers.items() if key.startswith(f"{name}/")}


def _whole(numbers: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in numbers.items()}
