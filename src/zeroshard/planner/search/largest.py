"""The largest model of a family that fits under a plan, by its model states alone or by a whole step.

The bytes of a member grow by the same amount with every further layer, so two shallow members give an estimate of the
limit: the peak of few layers may be at another moment of the step. So the found member is
rehearsed whole, and so is the next: one fits, the other does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of, schedule_of
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rank_costs import owner_ranks
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse, states_of
from zeroshard.planner.predict.result import MARGIN, Prediction
from zeroshard.planner.predict.shallow import FEW
from zeroshard.planner.predict.single_stage import on_machines

Counts = Literal["states", "step"]
Say = Callable[[str], None]

FEW_STATES = 2  # layers from which on states grow evenly: a single layer is no list of units


@dataclass(frozen=True)
class Rung:
    """Models that differ in their number of layers only.

    Attributes:
        name: of the common shape.
        fewest: layers of the smallest, which is larger than all models of the rung below.
        most: layers of the largest.
        of: gives the task of the model with a number of layers, which may also be below `fewest`.
    """

    name: str
    fewest: int
    most: int
    of: Callable[[int], TrainingTask]


@dataclass(frozen=True)
class Family:
    """Models in the order of their size.

    Attributes:
        source: of the rule by which they grow.
        rungs: ascending.
    """

    name: str
    source: str
    rungs: tuple[Rung, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A model of a family, rehearsed whole.

    Attributes:
        name: its rung and its layers.
        parameters: each counted once.
        needed_bytes: most bytes of a rank: of model states after a step, or the peak of a step.
        prediction: of the step, where the peak counts.
    """

    name: str
    layers: int
    parameters: int
    needed_bytes: int
    prediction: Prediction | None = field(default=None, compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        prediction = None if self.prediction is None else self.prediction.as_dict()
        return {
            "name": self.name,
            "layers": self.layers,
            "parameters": self.parameters,
            "needed_bytes": self.needed_bytes,
            "prediction": prediction,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest member that fits under one plan.

    Attributes:
        counts: the bytes that must fit: "states", the model states, into all of a device's memory, as in ZeRO's table
            2; or "step", the peak of a whole step, into the part of it for tensors, with a margin left free.
        rows: of one data rank in one step.
        room_bytes: the most that `needed_bytes` may be.
        member: the largest that fits; None if the smallest does not fit.
        beyond: the next one, which does not fit; None at the end of the family.
    """

    plan: Plan
    counts: Counts
    ranks: int
    rows: int
    room_bytes: int
    member: Member | None
    beyond: Member | None

    @property
    def limit(self) -> float | None:
        """Parameters that would fill `room_bytes`, on the line from `member` to `beyond`; None without both."""
        if self.member is None or self.beyond is None:
            return None
        low, high = self.member, self.beyond
        share = (self.room_bytes - low.needed_bytes) / (high.needed_bytes - low.needed_bytes)
        return low.parameters + share * (high.parameters - low.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {
            "plan": self.plan.as_dict(),
            "counts": self.counts,
            "ranks": self.ranks,
            "rows": self.rows,
            "room_bytes": self.room_bytes,
            "member": self.member and self.member.as_dict(),
            "beyond": self.beyond and self.beyond.as_dict(),
        }


def largest(
    family: Family,
    plan: Plan,
    machines: Machines,
    rows: int = 1,
    counts: Counts = "step",
    say: Say = lambda text: None,
) -> Largest:
    """The largest member of a family that fits.

    Args:
        rows: of one data rank in one step.
        counts: the bytes that must fit; see `Largest`.
        say: called with the name of each model before it is rehearsed.

    Raises:
        ZeroshardError: the engine refuses a model.
    """
    return _Climb(family, on_machines(plan, machines), machines, rows, counts, say).run()


def state_bytes_of(task: TrainingTask, plan: Plan, ranks: int, rows: int = 1) -> int:
    """Bytes of model states on the fullest rank after a step, from the ledger of the engine, rehearsed whole."""
    layout, slicing = schedule_of(plan, ranks).layout, choices_of(plan).slicing
    places = zip(layout.first_ranks, map(slicing.slices_of, layout.replicas), strict=True)
    chosen = [rank for first, slices in places for rank in owner_ranks(task, plan, first, slices)]
    return max(states_of(rehearse(task, plan, rank, ranks, rows).states) for rank in chosen)


def states_along(of: Callable[[int], TrainingTask], plan: Plan, ranks: int, layers: int, rows: int = 1) -> int:
    """`state_bytes_of` the member with so many layers, from two and three layers; for plans without stages."""
    if layers <= FEW_STATES + 1:
        return state_bytes_of(of(layers), plan, ranks, rows)
    low, high = (state_bytes_of(of(depth), plan, ranks, rows) for depth in (FEW_STATES, FEW_STATES + 1))
    return low + (layers - FEW_STATES) * (high - low)


def parameters_of(task: TrainingTask) -> int:
    """Parameters of the model, each counted once."""
    return task.facts.parameters


@dataclass
class _Climb:
    """One search for the largest member."""

    family: Family
    plan: Plan
    machines: Machines
    rows: int
    counts: Counts
    say: Say
    _lines: dict[int, tuple[float, float]] = field(default_factory=dict)
    _members: dict[tuple[int, int], Member] = field(default_factory=dict)

    def run(self) -> Largest:
        """Estimate by lines, then rehearse whole members until one fits and the next does not."""
        places = [
            (n, layers) for n, rung in enumerate(self.family.rungs) for layers in range(rung.fewest, rung.most + 1)
        ]
        fits, fails = -1, len(places)
        at = places.index(self._likely_member())
        while fails - fits > 1:
            left = self._room - self._member(places[at]).needed_bytes
            more = int(left // self._line(places[at][0])[1])
            if left >= 0:
                fits, at = at, at + max(1, more)
            else:
                fails, at = at, at + min(-1, more)
            at = min(max(at, fits + 1), fails - 1)
        return Largest(
            plan=self.plan,
            counts=self.counts,
            ranks=self.machines.count,
            rows=self.rows,
            room_bytes=self._room,
            member=self._member(places[fits]) if fits >= 0 else None,
            beyond=self._member(places[fails]) if fails < len(places) else None,
        )

    @property
    def _room(self) -> int:
        device = self.machines.device
        return device.memory_bytes if self.counts == "states" else int(device.capacity_bytes * (1 - MARGIN))

    def _likely_member(self) -> tuple[int, int]:
        """The highest rung whose smallest member fits by its line, and the layers with which it fits."""
        rungs = self.family.rungs
        low, high = 0, len(rungs) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._estimate(middle) >= rungs[middle].fewest else (low, middle - 1)
        return low, min(max(self._estimate(low), rungs[low].fewest), rungs[low].most)

    def _estimate(self, rung: int) -> int:
        start, step = self._line(rung)
        return int((self._room - start) // step)

    def _line(self, rung: int) -> tuple[float, float]:
        """Bytes of a member without layers, and of each layer, by two shallow members."""
        if rung not in self._lines:
            more = self.plan.pipeline.stages * self.plan.pipeline.virtual_stages
            few = more * (FEW_STATES if self.counts == "states" else FEW)
            task_of = self.family.rungs[rung].of
            self.say(f"{self.family.rungs[rung].name}, {few} and {few + more} layers")
            low, high = (self._needed(task_of(depth))[0] for depth in (few, few + more))
            step = max(1.0, (high - low) / more)
            self._lines[rung] = (low - few * step, step)
        return self._lines[rung]

    def _member(self, at: tuple[int, int]) -> Member:
        if at not in self._members:
            rung, layers = self.family.rungs[at[0]], at[1]
            task = rung.of(layers)
            self.say(f"{task.name}, whole")
            self._members[at] = Member(task.name, layers, parameters_of(task), *self._needed(task))
        return self._members[at]

    def _needed(self, task: TrainingTask) -> tuple[int, Prediction | None]:
        if self.counts == "states":
            return state_bytes_of(task, self.plan, self.machines.count, self.rows), None
        every_layer = not self.plan.pipelined  # a pipeline's first and last stage are rehearsed with all their layers
        prediction = predict(task, self.plan, self.machines, self.rows, deep=every_layer)
        return prediction.peak_bytes, prediction
