"""Pipelines: the numbers of a stage, and the time of a step of all stages.

[Note: short pipelines] The first and the last stage of many are rehearsed as those of a pipeline of few stages: a stage
does not see how many there are, except by the microbatches that it has in flight, which grow its memory evenly and
follow from the schedule's actions. Of those between, which hold fewer microbatches than the first, only one can need
more memory: the first of those with the most parameters in its blocks. Where these are more than the first stage's, it
is rehearsed too, as the second of one stage more; or in its own place where backwards are split, since the gradients of
weights that wait depend on the place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from zeroshard.comm.collectives import Purpose
from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.choices import alike, choices_of, schedule_of
from zeroshard.planner.predict.rank_costs import (
    RankCosts,
    Times,
    largest_of,
    memory_numbers,
    numbers_of,
    owner_ranks,
    rank_costs_from,
    rank_costs_of,
    with_few_blocks,
)
from zeroshard.planner.predict.rehearse import Rehearsed, TrainingTask, message_bytes, refuse_too_large, rehearse
from zeroshard.planner.predict.result import Span
from zeroshard.planner.predict.shallow import Stack, deepen, whole_model
from zeroshard.schedule import Layout, PipelineSchedule
from zeroshard.schedule.peaks import ALIKE, MOST_FILLED, few_microbatches, in_flight
from zeroshard.schedule.simulate import TIMES, Costs, Simulation, simulate

FEW_OF_STAGE = 2  # blocks of a chunk from which on every further one costs the same: a stage gathers none ahead
RECOMPUTED = 1.15  # times the work without recomputation
MICROBATCHES = 1.6  # times the work of a rehearsal of one microbatch without stages
STEADY = 4  # steps of a stream in which its steady state shows; where each flushes, the first is enough
MOST_SPANS = 20_000  # of a pipeline's timeline
SENT, GATHERED = (Purpose.SEND_ACTIVATIONS, Purpose.SEND_GRADIENTS), (Purpose.GATHER_MESSAGES,)
IN_LAYERS = (Purpose.SUM_ACTIVATIONS, Purpose.GATHER_ACTIVATIONS, Purpose.SUM_LOSSES)
PER_MICROBATCH = [str(purpose) for purpose in (*SENT, *GATHERED, *IN_LAYERS)]


class Staged:
    """The way to rehearse plans with stages, one replica of each; a `ways.Way`."""

    def work(self, plan: Plan, blocks: int, deep: bool = False) -> float:
        """Two stages or three, each with more microbatches; at two depths where chunks have many blocks."""
        d, v = plan.pipeline.stages, plan.pipeline.virtual_stages
        own, fewest = blocks / d, d * v * (FEW_OF_STAGE + 1)
        depths = 1 if deep or blocks <= fewest else 2
        few, many = (d, 2 * d) if deep else (2, 5)  # of long pipelines also a third, and with more in flight
        whole = (1 + own) / (1 + min(own, v * FEW_OF_STAGE)) if deep else 1.0
        again = MICROBATCHES * RECOMPUTED ** choices_of(plan).recomputing.in_blocks
        again *= max(1.0, 3 * d / (2 * ALIKE + 1)) if v > 1 else 1.0  # in groups, one of them and two
        return again * whole * depths * (many if d > MOST_FILLED else few) / 2

    def whole(self, plan: Plan, blocks: int) -> int:
        """A quarter of stages times blocks: each stage's rehearsal makes all blocks."""
        return plan.pipeline.stages * max(1, blocks // 4)

    def rank_costs(
        self, task: TrainingTask, plan: Plan, machines: Machines, rows: int, stacks: Sequence[Stack] | None
    ) -> list[RankCosts]:
        """The numbers of the first, the last and the fullest stage between, with few of their blocks; or of all, whole.

        All stages are rehearsed without `stacks`, or where the ranks of a stage differ.
        """
        slices = [choices_of(plan).slicing.slices_of(n) for n in schedule_of(plan, machines.count).layout.replicas]
        owned = [owner_ranks(task, plan, 0, of) for of in slices]
        stacks = None if max(map(len, owned)) > 1 else stacks
        cut = None if stacks is None else _cut(plan, stacks)
        chosen = set(range(plan.pipeline.stages)) if stacks is None else {0, plan.pipeline.stages - 1}
        chosen |= set() if cut is None else _fuller_than_the_first(task, plan, *cut)
        depths = None if _made_on_devices(task, machines) else cut if alike(plan) else None
        pipeline = plan.pipeline
        stages = pipeline.rehearsed_stages(plan.microbatches) if depths is not None else pipeline.stages
        found = []
        for stage in sorted(chosen):
            few = pipeline.rehearsed_length(stage, stages)
            jobs = [_Job(task, plan, machines, rows, stage, depths, few, rank) for rank in owned[stage]]
            found.append(largest_of([_of_stage(job) for job in jobs], slices[stage] * plan.tensor.ranks))
        return found

    def timed(self, task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> list[RankCosts]:
        """The numbers of all stages, whole, from real steps."""
        first = schedule_of(plan, machines.count).layout.first_ranks
        refuse_too_large(task, plan, machines, rows)
        return [rank_costs_of(rehearse(task, plan, rank, machines.count, rows, machines, timed=True)) for rank in first]

    def times(self, per_rank: Sequence[RankCosts], plan: Plan, machines: Machines) -> Times:
        """The time of all stages, simulated from their costs."""
        causes, spans = _times(per_rank, plan, machines)
        between = ", the fullest between" if len(per_rank) > 2 else ""
        note = f"{len(per_rank)} of {plan.pipeline.stages} stages were rehearsed, the first{between} and the last."
        return Times(causes, spans, (note,) * (len(per_rank) < plan.pipeline.stages))


@dataclass(frozen=True, slots=True)
class _Job:
    """A stage to be rehearsed.

    Attributes:
        depths: the one stack, and the number of blocks of its list in every chunk.
        stages: of the pipeline in which it is rehearsed ([Note: short pipelines]).
        owner: the rank within the stage, if its ranks differ.
    """

    task: TrainingTask
    plan: Plan
    machines: Machines
    rows: int
    stage: int
    depths: tuple[Stack, tuple[int, ...]] | None
    stages: int
    owner: int = 0

    @property
    def is_short(self) -> bool:
        """Whether the rehearsed pipeline has fewer stages than the plan."""
        return self.stages < self.plan.pipeline.stages

    @property
    def place(self) -> int:
        """The stage's number in the rehearsed pipeline: if that is short, of the first, the second or the last."""
        last = self.stage == self.plan.pipeline.stages - 1
        return self.stage if not self.is_short else self.stages - 1 if last else min(self.stage, 1)

    def schedule(self, stages: int) -> PipelineSchedule:
        """One rank of each of so many stages."""
        plan, layout = self.plan, Layout.equal(stages, self.plan.pipeline.virtual_stages)
        return PipelineSchedule(
            plan.pipeline.schedule, layout, plan.microbatches, reduce_each=plan.reduces_each_microbatch
        )

    def rehearse(self, microbatches: int, blocks: Sequence[int] = ()) -> Rehearsed:
        """Rehearse the stage with so many microbatches, and with so many blocks in each chunk."""
        task, ranks = self.task, self.machines.count
        settings: dict[str, Any] = {"microbatches": microbatches}
        if self.machines.device.kind != "cpu":
            settings["transport"] = "network"
        if blocks:
            assert self.depths is not None
            path, starts = self.depths[0].path, [sum(blocks[:chunk]) for chunk in range(1, len(blocks))]
            settings["pipeline_parallel.split"] = tuple(f"{path}.{start}" for start in starts)
            settings["pipeline_parallel.stages"] = self.stages
            task = with_few_blocks(task, {path: sum(blocks)})
            ranks = ranks // self.plan.pipeline.stages * self.stages
        plan = self.plan.with_settings(settings)
        rank = schedule_of(plan, ranks).layout.first_ranks[self.place] + self.owner
        rows = self.rows // self.plan.microbatches * microbatches
        return rehearse(task, plan, rank, ranks, rows, self.machines)


def _cut(plan: Plan, stacks: Sequence[Stack]) -> tuple[Stack, tuple[int, ...]] | None:
    """The stack and the blocks of its list in every chunk, if there is one stack that the plan splits by name."""
    if len(stacks) != 1 or not plan.pipeline.split:
        return None
    (stack,) = stacks
    starts = [name.removeprefix(f"{stack.path}." if stack.path else "") for name in plan.pipeline.split]
    if not all(start.isdecimal() for start in starts):
        return None
    edges = [0, *map(int, starts), stack.others + stack.depth]
    return stack, tuple(end - start for start, end in pairwise(edges))


def _fuller_than_the_first(task: TrainingTask, plan: Plan, stack: Stack, depths: Sequence[int]) -> set[int]:
    """The stage between the first and the last that may need the most memory, if any ([Note: short pipelines])."""
    blocks = iter(whole_model(task.build).get_submodule(stack.path).children())
    of_blocks = [sum(one.nbytes for one in block.parameters()) for block in blocks]
    edges, stages = [0, *accumulate(depths)], plan.pipeline.stages
    of_chunks = [sum(of_blocks[start:end]) for start, end in pairwise(edges)]
    first, *between = (sum(of_chunks[stage::stages]) for stage in range(stages - 1))
    return {1 + between.index(max(between))} if between and max(between) > first else set()


def _made_on_devices(task: TrainingTask, machines: Machines) -> bool:
    """Whether each rank makes and runs the whole model in the memory of its device, before it keeps a stage of it."""
    aside = task.made_aside and machines.device.kind != "cpu"
    return not aside and not all(parameter.is_meta for parameter in whole_model(task.build).parameters())


def _probes(job: _Job) -> Iterator[tuple[Sequence[int], Stack]]:
    """Blocks of each chunk for each rehearsal, and the stack whose growth it shows: the stage's chunks of one depth.

    Blocks unlike those of the stack are all there, in the chunks where they are, or else in the first one before these.
    """
    assert job.depths is not None
    stack, depths = job.depths
    stages, chunks = job.plan.pipeline.stages, job.plan.pipeline.virtual_stages
    own = {number * job.stages + job.place: number * stages + job.stage for number in range(chunks)}
    unlike = {c: min(depths[of], max(0, stack.others - sum(depths[:of]))) for c, of in own.items()}
    equal = {c: depths[of] - unlike[c] for c, of in own.items()}
    deep = {depth for depth in equal.values() if depth > FEW_OF_STAGE + 1}
    few = {c: unlike[c] + (min(depth, FEW_OF_STAGE) if depth in deep else depth) for c, depth in equal.items()}
    every = range(job.stages * chunks)
    elsewhere = {next((c for c in every if c not in own), -1): max(1, stack.others - sum(unlike.values()))}
    base = [few.get(c, elsewhere.get(c, 1)) for c in every]
    yield base, Stack(stack.path, 0)
    for depth in sorted(deep):
        yield [base[c] + (equal.get(c) == depth) for c in every], Stack(stack.path, depth)


def _of_stage(job: _Job) -> RankCosts:
    """A stage's numbers, from few blocks of its chunks and some of its microbatches."""
    if job.depths is None:
        numbers, last, exact = _of_microbatches(job, ())
        return rank_costs_from(numbers, last, exact)
    probes = list(_probes(job))
    seen = [_of_microbatches(job, blocks) for blocks, _ in probes]
    numbers = deepen([stack for _, stack in probes[1:]], [one for one, _, _ in seen], FEW_OF_STAGE, 1)
    found = rank_costs_from(numbers, seen[-1][1], len(probes) == 1 and seen[-1][2])
    return _placed(job, found) if job.is_short else found


def _placed(job: _Job, found: RankCosts) -> RankCosts:
    """The numbers under the stage's rank and chunks in the whole pipeline."""
    costs = {}
    for key, seconds in found.costs.items():
        kind, _, chunk = key.partition("/")
        costs[f"{kind}/{int(chunk) // job.stages * job.plan.pipeline.stages + job.stage}"] = seconds
    rank = schedule_of(job.plan, job.machines.count).layout.first_ranks[job.stage]
    return replace(found, rank=rank, costs=costs, exact=False)


def _of_microbatches(job: _Job, blocks: Sequence[int]) -> tuple[Mapping[str, float], Rehearsed, bool]:
    """The numbers with all microbatches, the last rehearsal, and whether it had all of them.

    Of many microbatches only some are rehearsed, in two rehearsals: memory grows with the microbatches in flight at
    once, which follow from the schedule's actions.
    """
    m, schedule, whole = job.plan.microbatches, job.schedule(job.stages), job.schedule(job.plan.pipeline.stages)
    few = few_microbatches(schedule)
    if few is None:
        one = job.rehearse(m, blocks)
        return numbers_of(one, 0), one, True
    all_of_them = in_flight(whole, job.stage, m)
    less, more = few
    if whole.layout.chunks == 1:  # else groups of a microbatch per stage
        filled = in_flight(schedule, job.place, ALIKE) == all_of_them  # by as few, as the last stage is
        less, more = (ALIKE, ALIKE + 1) if job.is_short or filled else few
    some, further = (in_flight(schedule, job.place, k) for k in (less, more))
    growth = (all_of_them - further) / (further - some) if further > some else 0
    b = job.rehearse(more, blocks)
    a = job.rehearse(less, blocks) if growth else b
    low, high = memory_numbers(a, m), memory_numbers(b, m)
    memory = {name: n + float(growth) * (n - low.get(name, 0)) for name, n in high.items()}
    wire = {f"wire/{p}": nbytes * (m / more if p in PER_MICROBATCH else 1) for p, (_, nbytes, _) in b.wire.items()}
    return {**numbers_of(b, 0), **memory, **wire}, b, False


def _times(
    per_rank: Sequence[RankCosts], plan: Plan, machines: Machines
) -> tuple[dict[str, float], tuple[tuple[Span, ...], ...]]:
    """Seconds of one step by cause, and the actions of each rank with their times."""
    pipeline = schedule_of(plan, machines.count)
    lists_of = pipeline.distinct
    if pipeline.layout.uneven:
        lists_of = replace(lists_of, loans=per_rank[0].last.pipeline.loans)
    rehearsed = per_rank[0].last.pipeline  # which may have fewer stages
    whole = rehearsed.layout.all_chunks == lists_of.layout.all_chunks
    lists_of = replace(lists_of, skips=rehearsed.skips * whole, one_way=rehearsed.one_way * whole)
    costs = _costs(per_rank, plan, lists_of, machines)
    simulation = simulate(lists_of.stretch(STEADY), lists_of.layout, costs)
    spent = [_spent(one, pipeline.layout.stage_of(one.rank), plan, costs, lists_of) for one in per_rank]
    causes = max(spent, key=lambda causes: causes["compute"] + causes["optimizer"] + causes["waits"])
    wire, waits = max(each["wire"] for each in spent), causes["waits"]
    overhead = max(each.pop("overhead") for each in spent)
    bubble = _step_seconds(simulation, plan) + overhead - causes["compute"] - causes["optimizer"] - causes.pop("waits")
    causes |= {"wire": wire + waits, "bubble": max(0.0, bubble)}
    spans = tuple(tuple(rank) for rank in simulation.spans)
    return causes, spans if sum(map(len, spans)) <= MOST_SPANS else ()


def _spent(one: RankCosts, stage: int, plan: Plan, costs: Costs, pipeline: PipelineSchedule) -> dict[str, float]:
    """Seconds of a stage in one step, by cause.

    "overhead" is the time outside of its actions; "waits" that of transfers in the forwards and backwards of every
    microbatch, whose costs have it; "wire" that of other transfers.
    """
    m, few = plan.microbatches, one.last.plan.microbatches
    compute, optimizer, wire = (one.spent.get(cause, 0.0) for cause in ("compute", "optimizer", "wire"))
    overhead = max(0.0, compute + optimizer + one.waits - one.actions)
    chunks = pipeline.layout.chunks_of(stage)
    passes = sum(costs.forward[c] + costs.whole_backward(c, pipeline.splits_backward) for c in chunks)
    updates = sum(costs.update[c] for c in chunks) * (m // plan.microbatches_per_update)
    waits = one.microbatch_waits * m
    return {
        "compute": m * passes + updates - waits - optimizer + overhead,
        "optimizer": optimizer,
        "wire": max(0.0, wire - one.microbatch_waits * few),
        "waits": waits,
        "overhead": overhead,
    }


def _step_seconds(simulation: Simulation, plan: Plan) -> float:
    steady = simulation.steady
    return simulation.makespan if steady is None else steady.microbatch_seconds * plan.microbatches


def _costs(per_rank: Sequence[RankCosts], plan: Plan, pipeline: PipelineSchedule, machines: Machines) -> Costs:
    """The costs of each chunk in the rehearsed stages, and for others of one with as many blocks."""
    layout = pipeline.layout
    known = {key: seconds for one in per_rank for key, seconds in one.costs.items()}
    seen = {int(key.rpartition("/")[2]) for key in known}
    like = _nearest(seen, plan, layout.all_chunks)
    per_chunk: dict[str, Any] = {name: tuple(known.get(f"{name}/{c}", 0.0) for c in like) for name in TIMES.values()}
    sent, gathered = (max(message_bytes(one.last.wire, kinds) for one in per_rank) for kinds in (SENT, GATHERED))
    seconds = machines.wire_seconds("send", sent, layout.stages, machines.count // layout.stages) if sent else 0.0
    seconds += machines.wire_seconds("gather", gathered, per_rank[0].last.plan.tensor.ranks)
    rate = sent / seconds if seconds else float("inf")
    halves = {name: per_chunk.pop(name) for name in ("input_gradient", "weight_gradient")}
    if any(map(any, halves.values())):
        per_chunk |= halves
    times: dict[str, Any] = dict(per_chunk)
    skip_bytes = dict.fromkeys(pipeline.skips, sent)
    return Costs(**times, bytes_per_second=rate, boundary_bytes=(sent,) * layout.all_chunks, skip_bytes=skip_bytes)


def _nearest(seen: set[int], plan: Plan, chunks: int) -> list[int]:
    """For each chunk the one seen with the nearest number of blocks, of those the nearest before it."""
    starts = [name.rpartition(".")[2] for name in plan.pipeline.split]
    edges = [0, *map(int, starts)] if all(start.isdecimal() for start in starts) else []
    blocks = dict(enumerate(end - start for start, end in pairwise(edges)))

    def distance(of: int, chunk: int) -> tuple[int, bool, int]:
        return abs(blocks.get(of, 0) - blocks.get(chunk, 0)), of > chunk, abs(of - chunk)

    before = [of for of in seen if of < chunks - 1]  # the last chunk has the loss
    return [min(before, key=lambda of: distance(of, chunk)) for chunk in range(chunks - 1)] + [chunks - 1]
