"""Rehearsal of one rank: the real engine takes real steps, on tensors without values and without other ranks.

This module has no model of ZeRO or of a pipeline. The ledger, comm and the schedule have the numbers that they would
have in the run, and the tracker sees torch's other allocations.
"""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import psutil
import torch
from torch import nn

from zeroshard.comm.collectives import Purpose
from zeroshard.comm.mesh import Mesh
from zeroshard.doctor.hardware import Machines, Operation
from zeroshard.engine import Engine
from zeroshard.errors import PlanError
from zeroshard.memory.ledger import Category, Event
from zeroshard.memory.transfers import Task as Job
from zeroshard.optim import StateLayout, layout_of
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of, schedule_of
from zeroshard.planner.predict.copies import batch_of
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.result import TEMPORARIES, Span
from zeroshard.planner.predict.shallow import ModelFacts, facts_of_model, quiet, whole_model
from zeroshard.planner.predict.torch_internals import Results, fakes, forget_values, in_backward
from zeroshard.planner.predict.workspaces import beside_results
from zeroshard.platform.accelerator import as_on_devices
from zeroshard.platform.rehearsed import Clock, Rehearsal
from zeroshard.schedule import PipelineSchedule
from zeroshard.schedule.actions import COMPUTE
from zeroshard.schedule.peaks import ALIKE
from zeroshard.schedule.simulate import medians
from zeroshard.traffic import DISK, UPDATE
from zeroshard.units.hooks import tensors_in
from zeroshard.units.ignored import ignored_in

TIMED, MOST_TIMED, LEAST_SECONDS = 5, 25, 1.0  # steps that are timed, and for how long at least
SETTLED = 1  # steps before the steady state: the first makes states
EVENTS = 400  # most events of a step's memory picture
HOST_LINK = (Purpose.GRADIENTS_DOWN, Purpose.PARAMETERS_UP, Purpose.ACTIVATIONS_DOWN, Purpose.ACTIVATIONS_UP)
CAUSES: dict[str, str] = {**dict.fromkeys(HOST_LINK, "host link"), UPDATE: "host update", DISK: "disk"}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class TrainingTask:
    """A model and its training.

    Attributes:
        build: makes the model, best on the meta device.
        batch: makes a batch of a number of rows, as the engine takes it.
        optimizer: makes the optimizer from the model's parameters, or from the model if `whole_model`.
        rows: of one step, over all data ranks.
        sequence: tokens of one row.
        name: of the model, for people.
        whole_model: whether `optimizer` takes the model itself.
        loss: function of (output, batch), as `Engine` takes it.
        host_optimizer: replaces `optimizer` where the plan offloads its states; the same by default.
        loss_chunk: rows of logits that exist together where the loss is chunked; None if the model cannot, or does so.
        others: the makers of optimizers with smaller states, on the device and on the host, by their names; None leaves
            out plans that change results.
        made_aside: how the model gets into host memory, where that is not the device's: "whole", as `build` makes it,
            or "from files", from which a run reads it slice by slice; empty where `build` makes it elsewhere.
        values: whether the model must be run on tensors with values, which takes as much memory as a run; or with those
            of its integer inputs alone, such as the sizes of images.
        adapters: that are trained instead of the model, in words; empty without.
        identity: text that is equal for tasks with equal rehearsals; empty if there is none.
        smaller: the name of the optimizer, where it is one of `others`; else empty.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    rows: int
    sequence: int = 1
    name: str = "model"
    whole_model: bool = False
    values: bool | Literal["integers"] = False
    loss_chunk: int | None = None
    made_aside: Literal["", "whole", "from files"] = ""
    others: Mapping[str, tuple[Callable[[Any], torch.optim.Optimizer], ...]] | None = None
    loss: Any = None
    host_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    adapters: str = ""
    smaller: str = ""
    identity: str = ""

    @property
    def integers(self) -> bool:
        """Whether integer inputs have values."""
        return self.values == "integers"

    @cached_property
    def facts(self) -> ModelFacts:
        """The facts of the model."""
        found = facts_of_model(whole_model(self.build))
        return replace(found, stacks=()) if self.integers else found  # images read outputs of layers by number

    @cached_property
    def layout(self) -> StateLayout:
        """The states of the optimizer, and whether it needs whole tensors.

        Raises:
            OptimizerError: it does not run, or its parameters depend on each other.
        """
        with fakes(), quiet():
            return layout_of(self.optimizer_of(whole_model(self.build)))

    def optimizer_of(self, model: nn.Module, plan: Plan | None = None) -> torch.optim.Optimizer:
        """The optimizer over a model, under a plan."""
        make = choices_of(plan or Plan()).offloading.updater(self.optimizer, self.host_optimizer or self.optimizer)
        return make(model if self.whole_model else model.parameters())


@dataclass(frozen=True, slots=True)
class PerMicrobatch:
    """The cost of one microbatch: seconds by cause, and bytes on the wire by purpose."""

    spent: Mapping[str, float]
    wire: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """The numbers of one rehearsed rank.

    Attributes:
        states: bytes by category as the ledger holds them after the last step.
        phases: for each phase of the run (build, forward, backward, update) the bytes by category, `TEMPORARIES` among
            them, at its peak. Each grows evenly with blocks and microbatches; which phase is highest may change.
        wire: by purpose, of the last step: elements, bytes, calls.
        spent: seconds of the last step, by cause.
        spans: actions of the last step.
        split: first layers of all chunks but the first.
        sizes: bytes of a copy of the states, as a checkpoint on its way to the disk holds it; of the batch itself,
            which is among the temporaries; and of the largest part that a checkpoint reads or converts before it is
            written.
        per_microbatch: cost of one more microbatch; None with fewer than three.
        host: bytes by category that are kept in host memory, in whole pages, after the last step.
        disk_nbytes: bytes on the disk.
        owners: what owners of whole parameters do and cost, in sentences; empty where slices are even.
        waits: seconds for which forwards and backwards among the spans waited for transfers; and those of one
            microbatch, as `schedule.simulate.medians` has its actions.
        communicators: of NCCL, if the ranks have GPUs.
    """

    rank: int
    plan: Plan
    states: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    wire: Mapping[str, tuple[int, int, int]]
    spent: Mapping[str, float]
    pipeline: PipelineSchedule
    spans: tuple[Span, ...]
    split: tuple[str, ...]
    events: tuple[Event, ...]
    sizes: tuple[int, int, int]
    per_microbatch: "PerMicrobatch | None" = None
    host: Mapping[str, int] = field(default_factory=dict)
    disk_nbytes: int = 0
    waits: tuple[float, float] = (0.0, 0.0)
    owners: str = ""
    communicators: int = 0

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes by category at the peak of all phases."""
        return highest_of(self.phases)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of all phases."""
        return sum(self.memory.values())


def rehearse(
    task: TrainingTask,
    plan: Plan,
    rank: int,
    ranks: int,
    rows: int,
    machines: Machines | None = None,
    timed: bool = False,
) -> Rehearsed:
    """Build the engine of one rank and take steps up to the steady state.

    Args:
        rows: of this rank's batch in one step.
        machines: give times of operations and collectives, and the granularity of allocations; None stops the clock.
        timed: run on tensors with values on this machine's CPUs, and measure CPU time.

    Raises:
        PlanError, ModelError, OptimizerError, BatchError: the engine refuses the plan or the task.
    """
    clock = Clock()
    rates = Rates(clock, machines)
    rounds = machines.device.rounds if machines else 1
    values = timed or task.values is True
    with contextlib.nullcontext() if values else fakes(task.integers) as mode, quiet():
        results = None if mode is None else Results(mode)
        beside = beside_results if machines is None or machines.device.kind == "cpu" else None
        tracker = Tracker(None if timed else rates.hear, not values, rounds, results, beside)
        rehearsal = Rehearsal(
            range(ranks),
            shares=plan.transport != "network",
            values=values,
            measured=timed,
            apart=timed & (not plan.pipelined),  # with stages the actions' times include them
            clock=clock,
            wire_seconds=rates.wire,
            link_of=rates.link,
            made=tracker.share,
            compute=rates.compute,
            task_seconds=(lambda job: 0.0) if timed else rates.job,
            make_on_host=tracker.make_on_host,
            host_room=rates.host_room,
            accelerated=machines is not None and machines.device.kind != "cpu",
            beside_devices=tracker.making_aside if task.made_aside and beside is None else contextlib.nullcontext,
        )
        elsewhere = contextlib.nullcontext() if beside is not None else as_on_devices()
        with elsewhere, tracker, tracker.resizing():
            run = _Run(task, plan, rows, (rank, ranks, rehearsal), tracker)
            rehearsed = run.tracked()
        return run.timed(rehearsed) if timed else rehearsed


class _Run:
    """The engine of one rank, and its steps in a rehearsal."""

    def __init__(
        self, task: TrainingTask, plan: Plan, rows: int, place: tuple[int, int, Rehearsal], tracker: Tracker
    ) -> None:
        rank, ranks, rehearsal = place
        mesh = Mesh(rank, ranks, platform=rehearsal)
        self._tracker, self._mesh, self._plan, self._choices = tracker, mesh, plan, choices_of(plan)
        self._batch = batch_of(task.batch, rows, plan.microbatches)
        example = self._choices.stages.example(lambda: task.batch(max(1, rows // plan.microbatches)))
        with rehearsal.beside_devices():
            model = task.build()
        forget_values(model)
        self._clock, self._timed, self._last = rehearsal.clock, rehearsal.measured, 0.0
        changes: dict[str, Any] = {"device_memory": None}
        for choice in self._choices:
            changes |= choice.rehearsed(SETTLED, rehearsal.values)
        whole = plan.with_settings(changes)
        self.engine = Engine(model, task.optimizer_of(model, plan), whole, mesh=mesh, loss=task.loss, example=example)
        tracker.bring([*model.buffers(), *ignored_in(model).values()])
        self._updating = False
        self._marks: list[PerMicrobatch] = []
        model.register_forward_pre_hook(lambda *_: self._mark())
        self.engine.optimizer.register_step_pre_hook(lambda *_: self._begin("optimizer"))
        self.engine.optimizer.register_step_post_hook(lambda *_: self._begin("compute"))

    def tracked(self) -> Rehearsed:
        """Take steps up to the steady state; returns the numbers of the last."""
        engine, tracker, clock = self.engine, self._tracker, self._clock
        phases = {"build": self._split_up(tracker.peak.nbytes)}
        tracker.note, tracker.phase = self._note, self._phase
        tracker.start_again()
        for _ in range(self._warm_up):
            engine.train_step(self._batch)
        before = {phase: peak.snapshot for phase, peak in tracker.peaks.items()}
        tracker.start_again()
        self._updating = False
        events: list[Event] = []
        clock.spent.clear()
        clock.waits.clear()
        self._marks.clear()
        start = clock.now
        note = tracker.listing(lambda: events.append(Event(clock.now - start, "", self._note())))
        with engine.trace(memory=True) as trace, note:
            engine.train_step(self._batch)
        phases |= {phase: peak.snapshot for phase, peak in tracker.peaks.items()}
        for phase, memory in before.items():
            if sum(memory.values()) > sum(phases.get(phase, {}).values()):
                phases[phase] = memory
        return Rehearsed(
            self._mesh.rank,
            self._plan,
            engine.ledger.snapshot(),
            phases,
            {str(row.purpose): (row.measured_elements, row.measured_bytes, row.calls) for row in engine.traffic()},
            by_cause(clock.spent),
            self._pipeline,
            tuple(trace.actions),
            engine.split,
            tuple(_thin(events)),
            (engine.checkpoint_nbytes, _nbytes(self._batch), engine.fetched_nbytes),
            self._per_microbatch(),
            engine.ledger.snapshot("host"),
            engine.ledger.total("disk"),
            _waits_inside(clock.waits, trace.actions),
            engine.owners,
            engine.communicators,
        )

    def timed(self, tracked: Rehearsed) -> Rehearsed:
        """Take further steps without the tracker; returns the numbers with the seconds of the median step."""
        engine, clock = self.engine, self._clock
        steps: list[tuple[float, dict[str, float], PerMicrobatch | None, tuple[Span, ...]]] = []
        began = time.perf_counter()
        while len(steps) < TIMED or (time.perf_counter() - began < LEAST_SECONDS and len(steps) < MOST_TIMED):
            clock.spent.clear()
            self._marks.clear()
            with engine.trace() as trace:
                self._last = time.process_time()
                engine.train_step(self._batch)
                self._tick()
            spent = by_cause({cause: seconds for cause, seconds in clock.spent.items() if cause != "aside"})
            steps.append((sum(spent.values()), spent, self._per_microbatch(), tuple(trace.actions)))
        _, spent, each, spans = sorted(steps, key=lambda step: step[0])[len(steps) // 2]
        return replace(tracked, spent=spent, per_microbatch=each, spans=spans)

    def _tick(self) -> None:
        """Record the CPU time since the last call, without simulated work of other ranks."""
        now, aside = time.process_time(), self._clock.spent.pop("aside", 0.0)
        self._clock.spent[self._clock.cause] += now - self._last - aside
        self._last = now

    def _mark(self) -> None:
        """Note the seconds and bytes so far, at the start of a microbatch's forward."""
        self._updating = False
        if self._timed:
            self._tick()
        wire = {str(purpose): count.nbytes for purpose, count in self.engine.sent_so_far.items()}
        self._marks.append(PerMicrobatch(by_cause(self._clock.spent), wire))

    def _per_microbatch(self) -> PerMicrobatch | None:
        """The cost from the second microbatch's start to the third's; the first uses other buffers."""
        if len(self._marks) < ALIKE:
            return None
        a, b = self._marks[ALIKE - 2], self._marks[ALIKE - 1]
        spent = {cause: seconds - a.spent.get(cause, 0.0) for cause, seconds in b.spent.items()}
        return PerMicrobatch(spent, {purpose: nbytes - a.wire.get(purpose, 0) for purpose, nbytes in b.wire.items()})

    @property
    def _warm_up(self) -> int:
        """Number of steps before the steady state."""
        settled = SETTLED
        for choice in self._choices:
            settled = choice.settled(self._pipeline, settled)
        return settled

    @property
    def _pipeline(self) -> PipelineSchedule:
        """The actions of all ranks, equal for ranks of one stage."""
        return self.engine.pipeline or schedule_of(self._plan, self._mesh.ranks)

    def _phase(self) -> str:
        return "backward" if in_backward() else "update" if self._updating else "forward"

    def _begin(self, cause: str) -> None:
        self._updating = True
        if self._timed:
            self._tick()
        self._clock.cause = cause

    def _note(self) -> dict[str, int]:
        return self._split_up(self._tracker.current)

    def _split_up(self, nbytes: int) -> dict[str, int]:
        """All bytes by category; bytes outside of the ledger are temporaries."""
        known = self.engine.ledger.snapshot()
        return {**known, TEMPORARIES: nbytes - sum(known.values())}


class Rates:
    """Advances the clock by the times of operations and collectives on given machines."""

    def __init__(self, clock: Clock, machines: Machines | None) -> None:
        self._clock, self._machines = clock, machines
        self.hear, self.host_room = None, 0
        if machines is not None:
            self.hear, self.host_room = self._hear, machines.host_room

    def _hear(self, flops: int, nbytes: int, dtype: torch.dtype, on_host: bool) -> None:
        assert self._machines is not None
        if on_host:
            self._clock.spend(nbytes / self._machines.host_rate, UPDATE)
            return
        self._clock.spend(self._machines.device.op_seconds(flops, nbytes, NAMES.get(dtype, "fp32")))

    def compute(self, nbytes: int, operations: int) -> None:
        """Advance the clock by the time of skipped operations, from the bytes they would move."""
        if self._machines is not None:
            each = self._machines.device.op_seconds(0, nbytes / operations)
            self._clock.spend(each * operations)

    def job(self, job: Job) -> float:
        """Seconds of a copy between tiers, or of a job of the host."""
        if self._machines is None:
            return 0.0
        if job.copies:
            return self._machines.copy_seconds(job.nbytes)
        update = self._machines.update_seconds(job.nbytes)
        return update if job.cause == UPDATE else max(update, self._machines.disk_seconds(job.nbytes))

    def wire(self, operation: str, nbytes: int, members: Sequence[int]) -> float:
        """Seconds of a collective among some ranks, or of a message or a signal to them."""
        if self._machines is None or len(members) < 2:
            return 0.0
        if operation == "signal":
            return self._machines.inside.latency
        ranks, stride = len(members), members[1] - members[0]
        if operation == "all-reduce":
            return self._machines.all_reduce_seconds(nbytes, ranks, stride)
        kind: Operation = "gather" if operation == "gather" else "exchange" if operation == "exchange" else "send"
        return self._machines.wire_seconds(kind, nbytes, ranks, stride)

    def link(self, members: Sequence[int]) -> str:
        """Whether a collective among some ranks leaves the node."""
        leaves = self._machines and len(members) > 1 and self._machines.leaves(len(members), members[1] - members[0])
        return "between" if leaves else "inside"


def by_cause(spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the planner's causes, which merge all copies between tiers."""
    found: dict[str, float] = {}
    for cause, seconds in spent.items():
        name = CAUSES.get(cause, str(cause))
        found[name] = found.get(name, 0.0) + seconds
    return found


def _waits_inside(waits: Sequence[tuple[float, float]], spans: Sequence[Span]) -> tuple[float, float]:
    """Seconds of waits, as (end, seconds), that lie in forwards or backwards: of all, and of one microbatch."""
    passes = [span for span in spans if span[0].kind in COMPUTE]
    ends, inside = [end for _, _, end in passes], [0.0 for _ in passes]
    for end, seconds in waits:
        at = bisect_left(ends, end)
        if at < len(ends) and passes[at][1] < end:
            inside[at] += seconds
    stretches = [(action, 0.0, seconds) for (action, _, _), seconds in zip(passes, inside, strict=True)]
    return sum(inside), sum(medians([stretches]).values())


def _nbytes(batch: Any) -> int:
    """Bytes of a batch's storages, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(batch)}
    return sum(storages.values())


def highest_of(phases: Mapping[str, Mapping[str, int]]) -> Mapping[str, int]:
    """Bytes by category in the phase with the most."""
    return max(phases.values(), key=lambda memory: sum(memory.values()))


def message_bytes(wire: Mapping[str, tuple[int, int, int]], purposes: Iterable[Purpose]) -> int:
    """Bytes of the largest message among some purposes; messages of one purpose are equally large."""
    counts = [wire[str(purpose)] for purpose in purposes if str(purpose) in wire]
    return max((nbytes // calls for _, nbytes, calls in counts if calls), default=0)


def states_of(memory: Mapping[str, int]) -> int:
    """Bytes of model states among bytes by category."""
    wanted = (Category.PARAMETERS, Category.GRADIENTS, Category.MASTER_WEIGHTS, Category.OPTIMIZER_STATES)
    return sum(memory.get(str(category), 0) for category in wanted)


def _thin(events: Sequence[Event]) -> list[Event]:
    """At most `EVENTS` of the events: of each stretch the highest."""
    size = -(-len(events) // EVENTS) or 1
    stretches = (events[start : start + size] for start in range(0, len(events), size))
    return [max(stretch, key=lambda event: sum(event.nbytes.values())) for stretch in stretches]


STATES_EACH = 16  # bytes per parameter in fp32, AdamW
ROOM = 0.7  # of this machine's free memory


def refuse_too_large(task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> None:
    """Refuse a rehearsal on tensors with values that this machine cannot hold.

    Raises:
        PlanError: with the needed and the free bytes.
    """
    few = choices_of(plan).stages.fewest(2)
    less, few_rows = replace(plan, microbatches=few), rows // plan.microbatches * few
    try:
        without = replace(task, values="integers" if task.integers else False)
        needed = rehearse(without, less, 0, machines.count, few_rows).peak_bytes
    except RuntimeError:  # torch lacks an operation without values: assume twice the states
        needed = 2 * STATES_EACH * task.facts.parameters
    room = int(ROOM * psutil.virtual_memory().available)
    if needed > room:
        raise PlanError(
            f"A rehearsal on tensors with values needs {needed:,} bytes and {room:,} are free here. Use fewer rows, or "
            f"a model of the same kind with smaller layers."
        )
