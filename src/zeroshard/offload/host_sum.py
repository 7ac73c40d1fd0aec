"""Gradients on their way to the host, where the means of a slice add up (ZeRO-Offload, 2101.06840, section 4).

A step's first mean is copied straight into the sum. Every further one is copied into a slot beside it and added there,
so gradients are copied to the host once per reduction, and never back.

[Note: norm] While the sum is one mean, its norm is taken on the device before the copy, and the main thread waits for
it only when all norms are read at once. A sum of several exists on the host alone, and its norm is taken there.
"""

from collections.abc import Callable, Iterator

import torch

from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Arena, Category
from zeroshard.memory.transfers import Task, Transfers
from zeroshard.parts.planned import Planned, Wire, Work, on_lower_tier
from zeroshard.traffic import UPDATE, Purpose
from zeroshard.units import Flat, norm_of


class HostSum:
    """The sum of the means of one slice [S] on the host.

    Args:
        arena: of the device, for a mean before it leaves.
        rank: of the slice.
        spare: keep a second sum, for an update that still reads the first when the next step begins.

    Attributes:
        adds: means are added on the host.
        apart: they are made apart from the gradient buffer.
        dtype: of the sum.
        on_put: called when a mean has been added, or will be by tasks under way.
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
        self._slots: list[torch.Tensor] = []
        self._reader: Task | None = None
        self.on_put: Callable[[], None] = lambda: None

    @property
    def puts(self) -> int:
        """How many means were added since the last `consume`."""
        return self._puts

    @property
    def arrived(self) -> list[Task]:
        """Tasks that must have run before the sum may be read."""
        return self._tasks[-1:]

    @property
    def sum(self) -> torch.Tensor:
        """The sum [S]; to be read after `arrived`."""
        return self._sums[0]

    @property
    def wide(self) -> bool:
        """Whether it is in fp32 or wider."""
        return self.dtype.itemsize >= 4

    @property
    def lends(self) -> bool:
        """Whether an update may leave new weights in its memory, on their way to the device."""
        return not self.wide and self.dtype == self._flat.dtype and len(self._sums) == 1

    def room(self) -> torch.Tensor:
        """Where the next mean [S] is to be put, on the device."""
        self._scratch = self._arena.take(self._numel, self.dtype, f"mean of {self._flat.label}")
        return self._scratch

    def put(self, mean: torch.Tensor) -> None:
        """Begin to add `mean` [S], which stays as it is until `release`."""
        if mean.dtype.itemsize > self.dtype.itemsize:
            self.widen()
        self._leaving = self._send(mean)

    def release(self) -> None:
        """Wait until the mean that was put last is not read any more."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        if self._scratch is not None:
            self._arena.give(self._scratch)
            self._scratch = None

    def make_way(self) -> None:
        """The gradient buffer holds no part of this sum."""

    def clear(self, low: int, high: int) -> None:
        """Let elements [low, high) of the sum be zeros."""
        if self._puts:
            self.settle()[low:high].zero_()

    def _send(self, mean: torch.Tensor) -> Task:
        self._puts += 1
        label, after = self._flat.label, [] if self._reader is None else [self._reader]
        if self._puts == 1 and mean.dtype == self.dtype:
            self._norm = norm_of(mean)
            task = self._link.copy(mean, self.sum, Purpose.GRADIENTS_DOWN, label, after, self._padding)
            self._tasks.append(task)
            self.on_put()
            return task
        slot = self._host.borrow(mean.nbytes)
        on_host = slot.view(mean.dtype)
        task = self._link.copy(mean, on_host, Purpose.GRADIENTS_DOWN, label, padding=self._padding)
        into, first = self.sum, self._puts == 1

        def add() -> None:
            into.copy_(on_host) if first else into.add_(on_host)

        self._slots.append(slot)
        self._tasks.append(
            self._link.run(add, UPDATE, f"sum of {label}", mean.nbytes, [task, *self._tasks[-1:], *after])
        )
        self._norm = None
        self.on_put()
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
        """The sum that `settle` returned was changed in place; updates that began from it as it was count as wrong.

        Args:
            filled: from now on the sum holds gradients of other ranks.
        """
        self._norm = None
        self._puts += bool(self._puts) or filled

    @property
    def reader(self) -> Task | None:
        """The task that reads the memory of the sum, where the next sum has to wait for it."""
        return self._reader

    @reader.setter
    def reader(self, task: Task) -> None:
        """Let the next sum wait for a task that reads this one, or take the spare one."""
        self._reader = task if len(self._sums) == 1 else None
        self._sums.reverse()

    def consume(self) -> None:
        """The next mean begins a new sum."""
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
        for slot in self._slots:
            self._host.give_back(slot)
        self._slots.clear()

    def _slab(self) -> torch.Tensor:
        numel, label = self._numel, f"gradients of {self._flat.label}"
        return self._host.slab(numel, self.dtype, Category.GRADIENTS, label, self._padding)
