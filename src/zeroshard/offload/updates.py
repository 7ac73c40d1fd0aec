"""All updates below the device of one engine: when they run, and when the new weights reach the device.

[Note: after the norm] A step ends when its updates are begun, in the order of the forward. The next forward waits for
each unit's weights where it needs them, and so does a read of a parameter ([Note: arriving]). A slice that
other ranks need is published then, in one fixed order.

[Note: speculation] As soon as a slice's gradient is on the host, its new weights can be made beside the backward, as if
nothing were to be clipped or skipped ([Note: weights first] in `slices`). If the step's verdict is the expected one,
they leave at once, and the states are written after all weights of the step, those that the next backward reaches first
before the others; else they are dropped and the update runs with the right factor. After too many wrong speculations
none begins for a while, nor for a slice whose states the host has had no time to write.

[Note: delayed update] ZeRO-Offload's one-step delay (2101.06840, section 5): after a warm-up, the update of step t runs
beside step t+1, and its weights reach the device when that one ends. Its rate, decay and clipping are those of step t.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Arena
from zeroshard.memory.transfers import Task
from zeroshard.offload.host_sum import HostSum
from zeroshard.offload.slices import SlicePiece
from zeroshard.offload.tiers import HostTiers
from zeroshard.optim.spans import SpanOptimizer
from zeroshard.parts.weights import Weights, arrived, withhold
from zeroshard.step.late_updates import LateUpdates, SpeculationCounts
from zeroshard.traffic import UPDATE, Purpose

WINDOW, MOST_WRONG = 50, 5  # steps that are remembered, and wrong speculations among them, beyond which none begins


@dataclass(slots=True)
class HostUpdate:
    """One slice's update under way.

    Attributes:
        unit: the number of the unit that it is of.
        start: the place of the slice in the flat.
        task: None for one that is done.
        source: the new weights on the host.
        staging: memory that is free again when they have reached the device.
        placed: whether they are in their place already.
        lender: the sum of gradients in whose memory they are, and which must not be written before they have left it.
    """

    weights: Weights
    unit: int
    start: int
    task: Task | None
    source: torch.Tensor
    staging: torch.Tensor | None = None
    placed: bool = False
    lender: HostSum | None = None


@dataclass(slots=True)
class Speculation:
    """New weights that were made before it was known whether they are wanted, and what they were made from."""

    update: HostUpdate
    pieces: Sequence[SlicePiece]
    factor: float
    puts: int


class Speculates(Protocol):
    """An updater whose updates may run before the verdict."""

    def spans_installed(self) -> None:
        """The optimizer has its spans."""

    def forget(self) -> int:
        """Drop updates that ran and were not taken over; returns their number."""

    def settle(self) -> None:
        """Wait until the states are written."""


class Speculations:
    """Updates before the verdict: whether to begin one, and whether its weights are kept ([Note: speculation]).

    Args:
        unclipped: the factor on the gradients of the step under way, unless they are clipped.
    """

    def __init__(self, lower: HostTiers, unclipped: Callable[[], float], speculation_counts: SpeculationCounts) -> None:
        self._lower, self._unclipped, self._speculation_counts = lower, unclipped, speculation_counts
        self._wrong: deque[bool] = deque(maxlen=WINDOW)
        self._later: list[Callable[[], None]] = []
        self._left: int | None = None  # bytes of host memory for further slices

    @property
    def likely_factor(self) -> float:
        """The factor that a speculation takes: not clipped, and of as many tokens as the last step counted."""
        return self._unclipped()

    def decide(self, factor: float | None) -> None:
        """The verdict: the factor on the gradients of the step under way; None for no update."""
        self._wrong.append(factor != self.likely_factor)

    @property
    def likely(self) -> bool:
        """Whether an update may begin before the verdict."""
        policy = self._lower.policy
        return policy.speculate and not policy.delayed_update and sum(self._wrong) <= MOST_WRONG

    def has_room(self, nbytes: int) -> bool:
        """Whether the host has memory for the new weights of a slice, beside all states; to be asked once by each."""
        if self._left is None:
            self._left = self._lower.spare()
        fits = nbytes <= self._left
        self._left -= nbytes if fits else 0
        return fits

    def take_over(self, write_states: Callable[[], None]) -> None:
        """The weights were right; `write_states` begins to write the states."""
        self._speculation_counts.taken += 1
        self._later.append(write_states)

    def write_states(self) -> None:
        """Begin to write the states of updates whose weights were right."""
        while self._later:
            self._later.pop()()

    def undo(self, wrong: Speculation) -> None:
        """An update before the verdict was wrong."""
        assert wrong.update.task is not None
        wrong.update.task.wait()
        if wrong.update.staging is not None:
            self._lower.host.give_back(wrong.update.staging)


class StagingMemory:
    """Memory of the host where new weights wait for their way to the device."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._left: list[tuple[Task, torch.Tensor]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes, of weights that have reached the device where there are any."""
        under_way = []
        for task, staging in self._left:
            if task.ended:
                self._host.give_back(staging)
            else:
                under_way.append((task, staging))
        self._left = under_way
        return self._host.borrow(nbytes)

    def leave(self, staging: torch.Tensor, task: Task) -> None:
        """What `take` returned is free when a task has ended."""
        self._left.append((task, staging))


class HostUpdates(LateUpdates):
    """The updates below the device.

    Args:
        unclipped: the factor on the gradients of the step under way, unless they are clipped.
        units: how many there are; the last is the root.
        gathers: whether all units are gathered for use, which waits for their updates.

    Attributes:
        link: to the host.
        host: the memory in which they run.
        staging: of it, where new weights wait for their way to the device.
        arena: scratch on the device.
        speculations: of its updates before the verdict.
        in_place: whether parameters are offloaded too, so that updates write the weights in their place.
    """

    def __init__(
        self, lower: HostTiers, optimizer: SpanOptimizer, arena: Arena, unclipped: Callable[[], float], units: int,
        gathers: bool,
    ) -> None:  # fmt: skip
        super().__init__(lower.link)
        self._policy, self._optimizer, self.in_place = lower.policy, optimizer, lower.policy.parameters
        self.link, self.host, self.arena = lower.link, lower.host, arena
        self._root = units - 1
        self._gathers = gathers
        self._todo: list[tuple[int, Callable[[float, bool], HostUpdate]]] = []
        self._rising: list[tuple[HostUpdate, Task]] = []
        self._seen: set[int] = set()  # units whose parameters the user sees without asking them
        self.staging = StagingMemory(lower.host)
        self._late: list[HostUpdate] = []
        self.speculations = Speculations(lower, unclipped, self.speculation_counts)
        self._adams: list[Speculates] = []

    def join(self, updater: Speculates) -> None:
        """Take in an updater whose updates may run before the verdict."""
        self._adams.append(updater)

    def spans_installed(self) -> None:
        """The optimizer has its spans."""
        for updater in self._adams:
            updater.spans_installed()

    def tell(self, unit: int, begin: Callable[[float, bool], HostUpdate]) -> None:
        """Let `start` begin an update of a unit, with the factor on its gradients and whether it is late."""
        self._todo.append((self._turn(unit), begin))

    def start(self, factor: float, step: int) -> None:
        """Begin the updates of a step, with gradients times `factor`, after `step` steps before."""
        self._commit()
        self.speculations.decide(factor)
        late = self._policy.delayed_update and step >= self._policy.delayed_warmup
        todo, self._todo = sorted(self._todo, key=lambda item: item[0]), []
        for _, begin in todo:
            update = begin(factor, late)
            self._late.append(update) if late else self.rise(update)
        self.speculations.write_states()
        self.forget()
        self._finish_seen()
        if todo:
            self._optimizer.touch()

    def skip(self) -> None:
        """Count a step without an update."""
        self._commit()
        self.speculations.decide(None)
        self.forget()
        self._finish_seen()

    def forget(self) -> None:
        """Drop updates that ran before the verdict and were not taken over."""
        for updater in self._adams:
            self.speculation_counts.undone += updater.forget()

    def flush(self) -> None:
        """Wait for all new weights on the device, and for the states."""
        self._commit()
        self.finish()
        self.forget()  # what ran ahead had states that may be loaded now
        for updater in self._adams:
            updater.settle()

    def finish(self) -> None:
        """Wait for all new weights on the device, but for those of delayed updates."""
        self._settle(list(self._rising))

    def entering(self, root: int, trains: bool) -> None:
        """A forward begins, which to train uses weights that may be one update old, and else the latest."""
        if not trains:
            self._commit()
            self._finish_seen()
        if not self._gathers:
            self.need(root)

    def need(self, unit: int) -> None:
        """Wait for the new weights of a unit, and of all units before it."""
        last = self._turn(unit)
        self._settle([item for item in self._rising if self._turn(item[0].unit) <= last])

    def awaited(self, units: Iterable[int]) -> Iterable[int]:
        """All units, if any are updated on the host; none where units are gathered for use, since the gather waits."""
        return units if self._policy.optimizer and not self._gathers else ()

    def rise(self, update: HostUpdate) -> None:
        """Copy new weights to where forwards find them."""
        weights, link, task = update.weights, self.link, update.task
        after = [] if task is None else [task]
        own, source, label = weights.own, update.source, weights.flat.label
        if not update.placed:
            if self.in_place:
                task = link.run(lambda: _copy(own, source), UPDATE, label, own.nbytes, after)
            else:
                padding = weights.flat.index.padding_in(update.start, update.start + source.numel())
                task = link.copy(source, own, Purpose.PARAMETERS_UP, label, after, padding)
        assert task is not None
        if update.lender is not None:
            update.lender.reader = task
        weights.update = task
        self._rising.append((update, task))
        if not withhold(weights, partial(self.need, update.unit)):
            self._seen.add(update.unit)

    def _turn(self, unit: int) -> int:
        """The place of a unit in a forward, in which the root comes first."""
        return 0 if unit == self._root else unit + 1

    def _commit(self) -> None:
        """Copy the weights of delayed updates to the device ([Note: delayed update])."""
        for update in self._late:
            self.rise(update)
        self._late.clear()

    def _finish_seen(self) -> None:
        """Wait for weights that the user sees without asking the parameters."""
        seen, self._seen = self._seen, set()
        for unit in seen:
            self.need(unit)

    def _settle(self, items: Sequence[tuple[HostUpdate, Task]]) -> None:
        for item in items:
            update, task = item
            self._rising.remove(item)
            task.wait()
            if update.staging is not None:
                self.staging.leave(update.staging, task)
            if update.weights.update is task:
                update.weights.update = None
            update.weights.publish()
        for update, _ in items:
            update.weights.published()
            arrived(update.weights)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)
