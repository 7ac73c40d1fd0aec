"""The search: all ways to share a job out over the machines, pruned by exact states, the rest rehearsed.

For each number of stages, ZeRO stage and schedule, the rows of a microbatch are found by bisection: memory rises with
them. What needs more for its states alone than a device has is refused without a rehearsal. Deterministic.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zeroshard.errors import PlanError, ZeroshardError
from zeroshard.pipeline.cluster import format_size
from zeroshard.plan import Plan
from zeroshard.planner.company import company
from zeroshard.planner.cuts import Layers, layers_of
from zeroshard.planner.estimate import Estimator
from zeroshard.planner.hardware import Machines
from zeroshard.planner.predict import predict
from zeroshard.planner.progress import Progress
from zeroshard.planner.really import predict_really
from zeroshard.planner.rehearse import Task
from zeroshard.planner.result import Found, Prediction, Refusal
from zeroshard.planner.states import Sizes, least_bytes, sizes_of
from zeroshard.planner.words import short

FASTER: tuple[dict[str, Any], ...] = ({"schedule": "interleaved", "chunks": 2}, {"schedule": "zb-h1"})
LEANER: dict[str, Any] = {"recompute": "chunk"}
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the parameters whose states are offloaded: the fewest first, as they move
MOST_DEEP = 32  # blocks times microbatches, or stages, that are all rehearsed for the best plan
MOST_TIMED = 8  # plans that are tried out on this machine, the best by the rates of its profile
NEAR = 1.05  # times the shortest expected step: plans with stages up to there are all looked at
FINEST = 4  # microbatches per stage, from which on the bubble is small
Say = Callable[[str], None]
Key = tuple[Plan, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """A plan but for its microbatches, and the rows of one lane."""

    plan: Plan
    rows: int


def search(
    task: Task,
    machines: Machines,
    base: Plan | None = None,
    top: int = 5,
    plans: Iterable[tuple[Plan, int]] | None = None,
    say: Say = lambda text: None,
    offload: bool = False,
    first: Callable[[Found], None] = lambda found: None,
) -> Found:
    """The plans that fit, the fastest first, and the refused ones with the way out.

    Where none fits, plans with offload are tried: of the optimizer's states, of few parameters first and then of more,
    then of the parameters too, and then of activations; the first that fits ends it.

    Args:
        base: what all plans have in common (precision, clipping and the like).
        top: how many to keep.
        plans: plans and rows per lane to look at, instead of all there are.
        say: told what is being looked at.
        offload: whether to try plans with offload even where others fit.
        first: given the first estimates, before any plan is rehearsed; not called where nothing can be estimated.
    """
    began = time.perf_counter()
    hunt = _Hunt(task, machines, base or Plan(), say)
    if plans is None:
        shapes = list(hunt.shapes())
        found = hunt.estimates(shapes)
        if found:
            first(Found(tuple(found[:top]), (), len(found), time.perf_counter() - began))
        for shape in shapes:
            hunt.progress.begin(shape.plan)
            hunt.try_shape(shape)
        if offload or not hunt.fitting:
            hunt.try_offload()
    else:
        for plan, rows in plans:
            hunt.try_plan(plan, rows)
    order = sorted(hunt.fitting, key=lambda p: (p.seconds, p.peak_bytes))
    if machines.here:
        with company(min(machines.count, os.cpu_count() or 1) - 1):
            timed = [hunt.timed(prediction) for prediction in order[:MOST_TIMED]]
        order = [*sorted(timed, key=lambda p: (p.time_mode == "roofline", p.seconds)), *order[MOST_TIMED:]]
    best = [hunt.whole(order[0]), *order[1:top]] if order else []
    return Found(tuple(best), tuple(hunt.refused), hunt.looked_at, time.perf_counter() - began)


@dataclass
class _Hunt:
    """One search under way."""

    task: Task
    machines: Machines
    base: Plan
    say: Say
    fitting: list[Prediction] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    looked_at: int = 0
    progress: Progress = field(default_factory=lambda: Progress({}))
    _seen: dict[Key, Prediction] = field(default_factory=dict)
    _layers: Layers | str | None = None
    _sizes: Sizes | None = None
    _guesses: dict[Shape, list[int]] = field(default_factory=dict)
    _no_chain: bool = False

    def shapes(self) -> Iterator[Shape]:
        """Every way to share out the ranks, those without stages first."""
        ranks, rows = self.machines.count, self.task.rows
        for zero in (0, 1, 2, 3) if ranks > 1 else (0,):
            groups: list[int | None] = [None]
            if zero and self.machines.nodes > 1 and ranks % self.machines.per_node == 0:
                groups.append(self.machines.per_node)
            if rows % ranks:
                why = f"{rows} rows of a step do not divide among {ranks} ranks."
                self._refuse(replace(self.base, zero=zero), 0, why, f"Use a multiple of {ranks} rows.")
                continue
            for group in groups:
                yield Shape(replace(self.base, zero=zero, shard_ranks=group, reduce_every="auto"), rows // ranks)
        for stages in (d for d in _divisors(ranks) if d > 1):
            yield from self._pipelines(stages)

    def _pipelines(self, stages: int) -> Iterator[Shape]:
        replicas = self.machines.count // stages
        if self.task.rows % replicas or self._no_chain:
            return
        try:
            blocks = self._blocks()
        except PlanError as error:
            self._no_chain = True
            self._refuse(replace(self.base, stages=stages, zero=0, microbatches=stages), 0, str(error), "")
            return
        if blocks < stages:
            why, way_out = f"The model has {blocks} blocks for {stages} stages.", f"Use {blocks} stages or fewer."
            self._refuse(replace(self.base, stages=stages, zero=0, microbatches=stages), 0, why, way_out)
            return
        common = replace(self.base, transport="auto", reduce_every="auto", zero=1 if replicas > 1 else 0)
        yield Shape(replace(common, stages=stages, microbatches=stages), self.task.rows // replicas)

    def try_offload(self) -> None:
        """Offload more and more, until it fits."""
        ranks = self.machines.count
        if self.task.rows % ranks:
            return
        for below in _offloads(ranks):
            before = len(self.fitting)
            self.try_shape(Shape(replace(self.base, reduce_every="auto", **below), self.task.rows // ranks))
            if len(self.fitting) > before:
                return

    def estimates(self, shapes: Sequence[Shape]) -> list[Prediction]:
        """The first estimate of each shape that is expected to fit, the fastest first; the search starts from them."""
        self.say("one rank alone, for first estimates")
        try:
            estimator = Estimator.of(self.task, self.base, self.machines, self._sizes_of())
        except ZeroshardError:  # of which the search tells, plan by plan
            return []
        chosen, expected = [], {}
        for shape in shapes:
            counts = self._counts(shape)
            each = (estimator.prediction(self._with(shape, count), shape.rows) for count in counts)
            fitting = [one for one in each if one.fits]
            if fitting:
                order = sorted(fitting, key=lambda one: one.seconds) if shape.plan.pipelined else fitting[:1]
                chosen.append(order[0])
                near = [one for one in order if one.seconds <= NEAR * order[0].seconds]
                self._guesses[shape] = [one.plan.microbatches for one in near]
            expected[shape.plan] = self._expected(shape, counts)
        self.progress = Progress(expected)
        return sorted(chosen, key=lambda one: (one.seconds, one.peak_bytes))

    def _expected(self, shape: Shape, counts: Sequence[int]) -> int:
        """Looks that a shape will take."""
        guesses = self._guesses.get(shape)
        if not guesses:
            return 1
        return len(guesses) + len(FASTER) if shape.plan.pipelined else 1 + (guesses[0] != counts[0])

    def try_shape(self, shape: Shape) -> None:
        """Find the microbatches of a shape: the fewest that fit; with stages, those that make it fastest."""
        counts = self._counts(shape)
        if not counts:
            stages = shape.plan.stages
            why = f"{shape.rows} rows per lane do not make the {stages} microbatches that fill the stages."
            self._refuse(shape.plan, shape.rows, why, "Use more rows per step, or fewer stages.")
            return
        if not shape.plan.pipelined:
            self._keep(self._fewest(shape, counts))
            return
        found = self._fastest(shape, counts)
        if found is not None and not found.fits and shape.plan.recompute != "chunk":
            self.try_shape(Shape(replace(shape.plan, **LEANER), shape.rows))
        if not self._keep(found):
            return
        assert found is not None
        for other in FASTER:
            m, stages = found.plan.microbatches, found.plan.stages
            if (other.get("chunks", 1) == 1 or m % stages == 0) and stages * other.get("chunks", 1) <= self._blocks():
                again = self._look(Shape(replace(shape.plan, **other, microbatches=m), shape.rows), m)
                if again is not None and again.fits:
                    self.fitting.append(again)

    def _keep(self, found: Prediction | None) -> bool:
        """Keep a plan that fits, and refuse one that does not."""
        if found is not None and not found.fits:
            self._refuse_size(found)
        elif found is not None:
            self.fitting.append(found)
        return found is not None and found.fits

    def _fastest(self, shape: Shape, counts: Sequence[int]) -> Prediction | None:
        """The fastest of those that are expected to be; else of finer ones, or the finest, which does not fit."""
        near = self._guesses.get(shape, [])
        found = [one for count in near if (one := self._look(shape, count)) is not None]
        fitting = [one for one in found if one.fits]
        if fitting:
            return min(fitting, key=lambda one: one.seconds)
        if near and not found:  # refused for something else than its size
            return None
        last: Prediction | None = None
        for count in [m for m in counts if m > max(near, default=0)] if near else counts[-1:]:
            last = self._look(shape, count)
            if last is None or last.fits:
                return last
        return last or found[-1]

    def _fewest(self, shape: Shape, counts: Sequence[int]) -> Prediction | None:
        """The fewest microbatches that fit, by bisection from those expected: memory falls with their number.

        None fits where the finest that was looked at is returned, and does not.
        """
        guesses = self._guesses.get(shape, [])
        at, low, high = counts.index(guesses[0]) if guesses else len(counts) - 1, 0, len(counts)
        best: Prediction | None = None
        while low < high:
            last = self._look(shape, counts[at])
            if last is None:
                return best
            if last.fits or best is None or not best.fits:
                best = last
            low, high = (low, at) if last.fits else (at + 1, high)
            at = high - 1 if guesses else (low + high) // 2
            guesses = []
        return best

    def try_plan(self, plan: Plan, rows: int) -> None:
        """Look at one given plan."""
        self._keep(self._look(Shape(plan, rows), plan.microbatches))

    def timed(self, prediction: Prediction) -> Prediction:
        """The prediction with a time that was measured on few blocks, where this machine can hold them."""
        self.say(f"timing {short(prediction.plan, self.machines.count)}")
        try:
            found = predict_really(self.task, prediction.plan, self.machines, prediction.batch)
        except ZeroshardError:
            return prediction
        return replace(prediction, causes=found.causes, time_mode=found.time_mode)

    def whole(self, prediction: Prediction) -> Prediction:
        """The prediction again, from a rehearsal of every stage, and of every block where they are not too many."""
        plan = prediction.plan
        depth = sum(stack.depth for stack in self.task.look.stacks)
        if (plan.stages if plan.pipelined else depth * plan.microbatches) > MOST_DEEP:
            return prediction
        self.say("the best once more, whole")
        found = predict(self.task, plan, self.machines, prediction.batch, deep=True)
        if prediction.time_mode == found.time_mode:
            return found
        return replace(found, causes=prediction.causes, time_mode=prediction.time_mode)

    def _counts(self, shape: Shape) -> list[int]:
        """Numbers of microbatches that divide the rows of a lane, ascending, so that memory falls along them."""
        counts = _divisors(shape.rows)
        plan = shape.plan
        if not plan.pipelined:
            return counts
        counts = [m for m in counts if m >= plan.stages and (plan.chunks == 1 or m % plan.stages == 0)]
        return [m for m in counts if m <= FINEST * plan.stages] or counts[:1]

    def _with(self, shape: Shape, count: int) -> Plan:
        return replace(shape.plan, microbatches=count)

    def _look(self, shape: Shape, count: int) -> Prediction | None:
        """Rehearse a plan, unless its states alone are too much or the engine refuses it."""
        plan = self._with(shape, count)
        key = (plan, shape.rows)
        if key in self._seen:
            return self._seen[key]
        self.looked_at += 1
        try:
            if self._too_large(plan, shape.rows):
                return None
            if plan.pipelined and not plan.split:
                layers = self._layers_of(max(1, shape.rows // count))
                plan = replace(plan, split=layers.split(plan.stages * plan.chunks))
            words = f"{short(plan, self.machines.count)}, {shape.rows} rows per lane"
            self.say(f"{self.progress.look(plan)}{words}")
            self._seen[key] = predict(self.task, plan, self.machines, shape.rows)
        except ZeroshardError as error:
            self._refuse(plan, shape.rows, str(error), "")
            return None
        return self._seen[key]

    def _sizes_of(self) -> Sizes:
        if self._sizes is None:
            self._sizes = sizes_of(self.task)
        return self._sizes

    def _too_large(self, plan: Plan, rows: int) -> bool:
        """Refuse what needs more for its states than a device has."""
        room = self.machines.device.capacity_bytes
        needed = least_bytes(self._sizes_of(), plan, self.machines.count)
        last = plan.offloads and plan.offload_share == 1  # of its kind, and rehearsed for the smallest budget
        if needed <= room or last:
            return False
        why = f"Its model states alone take {format_size(needed)} on every rank, and a device has {format_size(room)}."
        self._refuse(plan, rows, why, self._way_out(plan, needed))
        return True

    def _way_out(self, plan: Plan, needed: int) -> str:
        """The smallest single change with which the states would fit."""
        assert self._sizes is not None
        room, ranks = self.machines.device.capacity_bytes, self.machines.count
        if plan.offloads:
            return "A larger offload_share would leave less."
        for zero in (z for z in (1, 2, 3) if z > plan.zero and ranks > 1 and not plan.pipelined):
            if least_bytes(self._sizes, replace(plan, zero=zero), ranks) <= room:
                return f"zero={zero} would bring the states down to fit."
        for times in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            if least_bytes(self._sizes, replace(self.base, zero=3), ranks * times) <= room:
                return f"zero=3 on {ranks * times} devices would hold them."
        return f"Devices with {format_size(needed)} or more would hold them."

    def _refuse_size(self, found: Prediction) -> None:
        if not found.fits_host:
            held, room = format_size(found.host_bytes), format_size(found.host_capacity_bytes or 0)
            what = "A checkpoint on its way to the disk needs"
            if found.plan.offloads:
                what = "What is offloaded, and a checkpoint on its way to the disk, need"
            why = f"{what} {held} of each node's host memory, which is {room}."
            self._refuse(found.plan, found.batch, why, f"Nodes with {held} of host memory would hold it.")
            return
        need = found.smallest_capacity_bytes
        held, room = format_size(found.peak_bytes), format_size(found.capacity_bytes)
        why = f"The fullest rank needs {held} of {room} at the peak."
        way_out = f"A device with {format_size(need)} for tensors would hold it."
        if found.plan.offloads:
            way_out = f"The smallest budget that works for it is device_memory={need}."
        self._refuse(found.plan, found.batch, why, way_out)

    def _refuse(self, plan: Plan, rows: int, why: str, way_out: str) -> None:
        self.refused.append(Refusal(plan, rows, why, way_out))

    def _blocks(self) -> int:
        """Blocks of the model.

        Raises:
            PlanError: it is no chain.
        """
        return len(self._layers_of(1).names)

    def _layers_of(self, rows: int) -> Layers:
        """The layers of the model, rehearsed once; relative times hardly depend on the rows."""
        if self._layers is None:
            try:
                self._layers = layers_of(self.task, self.machines, rows)
            except ZeroshardError as error:
                self._layers = str(error)
        if isinstance(self._layers, str):
            raise PlanError(self._layers)
        return self._layers


def _offloads(ranks: int) -> Iterator[dict[str, Any]]:
    """What plans with offload set, those that move least first; with ZeRO-2 as in 2101.06840, section 4.2, or 3."""
    for zero in (2, 3) if ranks > 1 else (2,):
        yield from ({"zero": zero, "offload": "optimizer", "offload_share": share} for share in SHARES)
    yield {"zero": 3, "offload": "optimizer,parameters"}
    yield {"zero": 3, "offload": "optimizer,parameters,activations"}


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
