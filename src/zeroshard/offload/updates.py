"""All updates below the device of one engine: the order of their runs, and the copies of new weights to the device.

The life of one update: an updater enqueues it (`enqueue`); the end of the step starts it (`start`); its new weights are
copied to where forwards read them (`progress`); the first use of its unit waits for it (`_settle`), and its slice is
published to the ranks that keep whole weights (`Weights.publish`).

[Note: after the norm] A step ends when its updates are started, in the order of the forward. The next forward waits for
each unit's weights where it needs them, and so does a read of a parameter ([Note: arriving]). A slice that
other ranks need is published then, in one fixed order.

[Note: speculation] As soon as a slice's gradient is on the host, its new weights can be made beside the backward, as if
nothing were to be clipped or skipped ([Note: weights first] in `tiers`). If the step's verdict is the expected one,
they leave at once, and the states are written after all weights of the step, those that the next backward reaches first
before the others; else they are dropped and the update runs with the right factor. After too many wrong speculations
none begins for a while, nor for a slice whose states the host has had no time to write.

[Note: delayed update] ZeRO-Offload's one-step delay (2101.06840, section 5): after a warm-up, the update of step t runs
beside step t+1, and its weights reach the device when that one ends. Its rate, decay and clipping are those of step t.

[Note: norm] A step's first mean is copied straight into the sum on the host, and its norm is taken on the device before
the copy; the main thread waits for it only when all norms are read at once. Each further mean is copied into a slot
beside the sum and added there, so gradients are copied to the host once per reduction and never back; the norm of such
a sum is taken on the host.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Arena, Category
from zeroshard.memory.transfers import Task, Transfers
from zeroshard.offload.tiers import HostTiers, SlicePiece, StagingMemory
from zeroshard.optim.slices.spans import SpanOptimizer
from zeroshard.parts.part import LateUpdates, SpeculationCounts
from zeroshard.parts.planned import Planned, Wire, Work, on_lower_tier
from zeroshard.parts.weights import Weights, arrived, withhold
from zeroshard.traffic import UPDATE, Purpose
from zeroshard.units import Flat, norm_of

WINDOW, MOST_WRONG = 50, 5  # steps that are remembered, and wrong speculations among them, beyond which none begins


class HostSum:
    """The sum of the means of one slice [S] on the host.

    Args:
        arena: of the device, for a mean before it leaves.
        rank: of the slice.
        spare: keep a second sum, for an update that still reads the first when the next step begins.

    Attributes:
        adds: False: means are added on the host.
        apart: True: means are made outside of the gradient buffer.
        dtype: of the sum.
        follow: called with True when a mean was added, or will be by tasks in flight; with False before the sum is
            changed otherwise.
    """

    adds, apart = False, True

    def __init__(
        self, link: Transfers, host: HostMemory, arena: Arena, flat: Flat, dtype: torch.dtype, rank: int,
        spare: bool = False,
    ) -> None:  # fmt: skip
        self._link, self._host, self._arena, self._flat, self.dtype = link, host, arena, flat, dtype
        self._numel = flat.index.slice_numel(rank)
        self._padding = flat.index.padding_in(*flat.index.interval(rank))
        self._sums = [self._slab() for _ in range(2 if spare else 1)]
        self._tasks: list[Task] = []
        self._puts = 0
        self._norm: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None
        self._leaving: Task | None = None
        self._slot: torch.Tensor | None = None  # of the last mean that is added from it
        self._reader: Task | None = None
        self.follow: Callable[[bool], None] = lambda added: None

    @property
    def puts(self) -> int:
        """Number of means added since the last `consume`."""
        return self._puts

    @property
    def arrived(self) -> list[Task]:
        """Tasks that must have run before the sum may be read."""
        return self._tasks[-1:]

    @property
    def sum(self) -> torch.Tensor:
        """The sum [S]; valid after `arrived`."""
        return self._sums[0]

    @property
    def wide(self) -> bool:
        """Whether it is in fp32 or wider."""
        return self.dtype.itemsize >= 4

    @property
    def lends(self) -> bool:
        """Whether an update may put new weights into its memory, on their way to the device."""
        return not self.wide and self.dtype == self._flat.dtype and len(self._sums) == 1

    def slot(self) -> torch.Tensor:
        """Device memory for the next mean [S]."""
        self._scratch = self._arena.take(self._numel, self.dtype, f"mean of {self._flat.label}")
        return self._scratch

    def put(self, mean: torch.Tensor) -> None:
        """Begin to add `mean` [S], which must stay unchanged until `release`."""
        if mean.dtype.itemsize > self.dtype.itemsize:
            self.widen()
        self._leaving = self._send(mean)

    def release(self) -> None:
        """Wait until the last mean is not read any more."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        if self._scratch is not None:
            self._arena.give(self._scratch)
            self._scratch = None

    def make_way(self) -> None:
        """Nothing: the gradient buffer holds no part of this sum."""

    def clear(self, low: int, high: int) -> None:
        """Zero elements [low, high) of the sum."""
        if self._puts:
            self.settle()[low:high].zero_()

    def _send(self, mean: torch.Tensor) -> Task:
        self._puts += 1
        label, after = self._flat.label, [] if self._reader is None else [self._reader]
        if self._puts == 1 and mean.dtype == self.dtype:
            self._norm = norm_of(mean)
            task = self._link.copy(mean, self.sum, Purpose.GRADIENTS_DOWN, label, after, self._padding)
            self._tasks.append(task)
            self.follow(True)
            return task
        if self._slot is not None:  # its mean was added while the device computed the next
            self._empty()
        self._slot = slot = self._host.borrow(mean.nbytes)
        on_host = slot.view(mean.dtype)
        task = self._link.copy(mean, on_host, Purpose.GRADIENTS_DOWN, label, padding=self._padding)
        into, first = self.sum, self._puts == 1

        def add() -> None:
            into.copy_(on_host) if first else into.add_(on_host)

        self._tasks.append(
            self._link.run(add, UPDATE, f"sum of {label}", mean.nbytes, [task, *self._tasks[-1:], *after])
        )
        self._norm = None
        self.follow(True)
        return task

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`, zeros if there was none; readable by the host."""
        self._empty()
        if not self._puts:
            if self._reader is not None:
                self._reader.wait_on_host()
            self.sum.zero_()
        return self.sum

    def norm(self) -> torch.Tensor:
        """Its 2-norm, a scalar on the device or the host ([Note: norm])."""
        if self._norm is None:
            self._norm = norm_of(self.settle())
        return self._norm

    def widen(self, empty: bool = False) -> None:
        """Keep the sum in fp32 from now on, `empty` or not."""
        if self.dtype.itemsize >= 4:
            return
        before, puts = self.settle(), self._puts
        old, self.dtype = self._sums, torch.float32
        self._sums = [self._slab() for _ in old]
        if puts:
            self.sum.copy_(before)
        for slab in old:
            self._host.free(slab)

    def changed(self, filled: bool = False) -> None:
        """Drop the speculative update, whose gradient changes now.

        Args:
            filled: from now on the sum holds gradients of other ranks.
        """
        self.follow(False)
        self._norm = None
        self._puts += bool(self._puts) or filled

    @property
    def reader(self) -> Task | None:
        """The task that reads the memory of the sum, where the next sum has to wait for it."""
        return self._reader

    @reader.setter
    def reader(self, task: Task) -> None:
        """Make the next sum wait for a task that reads this one, or use the spare one."""
        self._reader = task if len(self._sums) == 1 else None
        self._sums.reverse()

    def consume(self) -> None:
        """Begin a new sum with the next mean."""
        self._empty()
        self._puts, self._norm = 0, None

    def planned(self) -> Iterator[Planned]:
        """A slice of gradients on the host; two under the delayed update."""
        index = self._flat.index
        for _ in self._sums:
            yield on_lower_tier(index, "host", Category.GRADIENTS, self._numel * self.dtype.itemsize)

    def wire(self, work: Work) -> Wire:
        """Each reduction is copied to the host once."""
        yield Purpose.GRADIENTS_DOWN, (self._numel - self._padding) * work.reductions * work.updates

    def _empty(self) -> None:
        for task in self._tasks:
            task.wait_on_host()
        self._tasks.clear()
        if self._slot is not None:
            self._host.give_back(self._slot)
            self._slot = None

    def _slab(self) -> torch.Tensor:
        numel, label = self._numel, f"gradients of {self._flat.label}"
        return self._host.slab(numel, self.dtype, Category.GRADIENTS, label, self._padding)


@dataclass(slots=True)
class HostUpdate:
    """One slice's update in flight.

    Attributes:
        unit: the number of its unit.
        start: the place of the slice in the flat.
        task: None for a finished one.
        source: the new weights on the host.
        staging: memory that is free again once they have reached the device.
        placed: whether they are in their final memory already.
        lender: the sum of gradients whose memory holds them, and which must not be written before they are copied.
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
    """New weights made before the verdict, and the inputs of that update."""

    update: HostUpdate
    pieces: Sequence[SlicePiece]
    factor: float
    puts: int


class Speculates(Protocol):
    """An updater with speculative updates."""

    def spans_installed(self) -> None:
        """Prepare for the optimizer's spans, which are complete."""

    def forget(self) -> int:
        """Drop updates that ran and were not kept; returns their number."""

    def settle(self) -> None:
        """Wait until the states are written."""


class Speculations:
    """Updates before the verdict: when one may start, and whether its weights are kept ([Note: speculation]).

    Args:
        unclipped: the factor on the gradients of the current step, unless they are clipped.
    """

    def __init__(self, lower: HostTiers, unclipped: Callable[[], float], speculation_counts: SpeculationCounts) -> None:
        self._lower, self._unclipped, self._speculation_counts = lower, unclipped, speculation_counts
        self._wrong: deque[bool] = deque(maxlen=WINDOW)
        self._later: list[Callable[[], None]] = []
        self._left: int | None = None  # bytes of host memory for further slices

    @property
    def likely_factor(self) -> float:
        """The factor of speculations: unclipped, with the token count of the last step."""
        return self._unclipped()

    def decide(self, factor: float | None) -> None:
        """Record the verdict: the factor on the gradients of the current step; None for no update."""
        self._wrong.append(factor != self.likely_factor)

    @property
    def likely(self) -> bool:
        """Whether an update may start before the verdict."""
        policy = self._lower.policy
        return policy.speculate and not policy.delayed_update and sum(self._wrong) <= MOST_WRONG

    def reserve(self, nbytes: int) -> bool:
        """Reserve host memory for the new weights of a slice, once; False where states leave too little."""
        if self._left is None:
            self._left = self._lower.spare()
        fits = nbytes <= self._left
        self._left -= nbytes if fits else 0
        return fits

    def take_over(self, write_states: Callable[[], None]) -> None:
        """Count right weights; `write_states` is called after all weights of the step."""
        self._speculation_counts.taken += 1
        self._later.append(write_states)

    def write_states(self) -> None:
        """Start to write the states of updates whose weights were right."""
        while self._later:
            self._later.pop()()

    def undo(self, wrong: Speculation) -> None:
        """Wait for an update before the verdict that was wrong, and free its memory."""
        assert wrong.update.task is not None
        wrong.update.task.wait()
        if wrong.update.staging is not None:
            self._lower.host.give_back(wrong.update.staging)


class HostUpdates(LateUpdates):
    """The updates below the device.

    Args:
        unclipped: the factor on the gradients of the current step, unless they are clipped.
        units: number of units; the last is the root.
        gathers: whether all units are gathered for use, which waits for their updates.

    Attributes:
        link: to the host.
        host: memory of the updates.
        staging: memory of new weights on their way to the device.
        arena: scratch on the device.
        speculations: of updates before the verdict.
        in_place: whether parameters are offloaded too, so that updates write the weights directly.
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
        self._queued: list[tuple[int, Callable[[float, bool], HostUpdate]]] = []
        self._in_progress: list[tuple[HostUpdate, Task]] = []
        self._seen: set[int] = set()  # units whose parameters the user sees without asking them
        self.staging = StagingMemory(lower.host)
        self._late: list[HostUpdate] = []
        self.speculations = Speculations(lower, unclipped, self.speculation_counts)
        self._adams: list[Speculates] = []

    def join(self, updater: Speculates) -> None:
        """Register an updater with speculative updates."""
        self._adams.append(updater)

    def spans_installed(self) -> None:
        """Prepare for the optimizer's spans, which are complete."""
        for updater in self._adams:
            updater.spans_installed()

    def enqueue(self, unit: int, start: Callable[[float, bool], HostUpdate]) -> None:
        """Register an update of a unit; the end of the step calls start(factor on the gradients, delayed)."""
        self._queued.append((self._turn(unit), start))

    def start(self, factor: float, step: int) -> None:
        """Start the updates of a step, with gradients times `factor`, after `step` earlier steps."""
        self._commit()
        self.speculations.decide(factor)
        late = self._policy.delayed_update and step >= self._policy.delayed_warmup
        queued, self._queued = sorted(self._queued, key=lambda item: item[0]), []
        for _, start in queued:
            update = start(factor, late)
            self._late.append(update) if late else self.progress(update)
        self.speculations.write_states()
        self.forget()
        self._finish_seen()
        if queued:
            self._optimizer.touch()

    def skip(self) -> None:
        """Count a step without an update."""
        self._commit()
        self.speculations.decide(None)
        self.forget()
        self._finish_seen()

    def forget(self) -> None:
        """Drop updates that ran before the verdict and were not kept."""
        for updater in self._adams:
            self.speculation_counts.undone += updater.forget()

    def flush(self) -> None:
        """Wait for all new weights on the device, and for the states."""
        self._commit()
        self.finish()
        self.forget()  # speculative updates read states that may be loaded now
        for updater in self._adams:
            updater.settle()

    def finish(self) -> None:
        """Wait for all new weights on the device, except those of delayed updates."""
        self._settle(list(self._in_progress))

    def entering(self, root: int, trains: bool) -> None:
        """Begin a forward: to train it uses weights that may be one update old, else the latest."""
        if not trains:
            self._commit()
            self._finish_seen()
        if not self._gathers:
            self.need(root)

    def need(self, unit: int) -> None:
        """Wait for the new weights of a unit, and of all units before it."""
        last = self._turn(unit)
        self._settle([item for item in self._in_progress if self._turn(item[0].unit) <= last])

    def awaited(self, units: Iterable[int]) -> Iterable[int]:
        """All units, if any are updated on the host; none where units are gathered for use, since the gather waits."""
        return units if self._policy.optimizer and not self._gathers else ()

    def progress(self, update: HostUpdate) -> None:
        """Start to copy new weights to the memory that forwards read."""
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
        weights.update.begin(task)
        self._in_progress.append((update, task))
        if not withhold(weights, partial(self.need, update.unit)):
            self._seen.add(update.unit)

    def _turn(self, unit: int) -> int:
        """The position of a unit in a forward, in which the root comes first."""
        return 0 if unit == self._root else unit + 1

    def _commit(self) -> None:
        """Copy the weights of delayed updates to the device ([Note: delayed update])."""
        for update in self._late:
            self.progress(update)
        self._late.clear()

    def _finish_seen(self) -> None:
        """Wait for weights that the user can read without a watched parameter."""
        seen, self._seen = self._seen, set()
        for unit in seen:
            self.need(unit)

    def _settle(self, items: Sequence[tuple[HostUpdate, Task]]) -> None:
        for item in items:
            update, task = item
            self._in_progress.remove(item)
            task.wait()
            if update.staging is not None:
                self.staging.leave(update.staging, task)
            update.weights.update.end(task)
            update.weights.publish()
        for update, _ in items:
            update.weights.published()
            arrived(update.weights)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)
