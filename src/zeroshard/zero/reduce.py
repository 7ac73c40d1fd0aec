"""Reductions, from the gradient buffer to the owner of each slice, and the sums of means there.

[Note: in flight] A reduction is started, finished and released: when it is finished, this rank's sum holds the mean;
when it is released, all other ranks have read this rank's gradients, and the buffer may be written again.
"""

from collections.abc import Iterator
from functools import partial

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.pending import Exchange, InPlace, Pending, add_mean
from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.parts.gradients import GradientSum
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.platform.transport import same_place
from zeroshard.units import Flat, norm_of
from zeroshard.zero.gradients import GradientBuffer


class BufferSum:
    """The sum of a single rank: the gradient buffer itself.

    Attributes:
        adds: whether a mean was added since the last `consume`.
    """

    def __init__(self, buffer: GradientBuffer) -> None:
        self._buffer = buffer
        self.adds = False

    @property
    def total(self) -> torch.Tensor:
        """The sum [S] as it is."""
        return self._buffer.ready()

    @property
    def apart(self) -> bool:
        """Whether it lies outside of the gradient buffer."""
        return False

    @property
    def wide(self) -> bool:
        """Whether it has a buffer of its own in fp32 or wider."""
        return False

    def slot(self) -> torch.Tensor:
        """Memory for the next mean."""
        return self.total

    def put(self, mean: torch.Tensor) -> None:
        """Note that a mean was written into the slot."""
        self.adds = True

    def make_way(self) -> None:
        """Nothing: autograd adds to the sum in place."""

    def widen(self, empty: bool = False) -> None:
        """Nothing: the gradient buffer is widened itself."""

    def release(self) -> None:
        """Nothing is in flight."""

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`."""
        return self.total

    def norm(self) -> torch.Tensor:
        """Its 2-norm, a scalar; in fp32 at least."""
        return norm_of(self.settle())

    def clear(self, low: int, high: int) -> None:
        """Nothing: elements [low, high) in the gradient buffer are zero already."""

    def changed(self, filled: bool = False) -> None:
        """Note a change of the sum in place; with `filled`, it holds gradients of other ranks."""
        self.adds = self.adds or filled

    def consume(self) -> None:
        """Begin a new sum with the next mean."""
        self.adds = False

    def planned(self) -> Iterator[Planned]:
        """None besides the gradient buffer."""
        yield from ()

    def wire(self, work: Work) -> Wire:
        """None: it stays on the device."""
        yield from ()


class DeviceSum(BufferSum):
    """The sum in this rank's slice of the gradient buffer, or in a buffer of its own.

    Args:
        dtype: of a buffer of its own from the start; None to use the gradient buffer for as long as possible.
    """

    def __init__(
        self, buffer: GradientBuffer, flat: Flat, comm: Comm, ledger: Ledger, dtype: torch.dtype | None
    ) -> None:
        super().__init__(buffer)
        self._flat, self._ledger, self._device = flat, ledger, comm.mesh.device
        self._rank, self._interval = comm.mesh.rank, flat.index.interval(comm.mesh.rank)
        self._own = None if dtype is None else self._make(dtype)
        self._planned = dtype

    @property
    def total(self) -> torch.Tensor:
        """The sum [S]; it may lie in the gradient buffer, whose other slices are unused then."""
        if self._own is not None:
            return self._own
        start, stop = self._interval
        whole = self._buffer.ready()
        return whole if stop - start == whole.numel() else whole[start:stop]

    @property
    def apart(self) -> bool:
        """Whether it lies outside of the gradient buffer."""
        return self._own is not None

    @property
    def wide(self) -> bool:
        """Whether it has a buffer of its own in fp32 or wider."""
        return self._own is not None and self._own.itemsize >= 4

    def make_way(self) -> None:
        """Prepare for a write into the gradient buffer: a sum that lies in it moves out."""
        if self.adds and self._own is None:
            self._separate()

    def put(self, mean: torch.Tensor) -> None:
        """Copy a mean, or add it to the sum, unless it was written into the slot."""
        total = self.total
        if not same_place(mean, total):
            total.add_(mean) if self.adds else total.copy_(mean)
        self.adds = True

    def widen(self, empty: bool = False) -> None:
        """Sum in fp32 or wider from now on.

        Args:
            empty: also while it is empty and lies in the gradient buffer, unless that is as wide.
        """
        empty = empty and self._buffer.dtype.itemsize < 4
        narrow = self.adds or empty if self._own is None else self._own.itemsize < 4
        if narrow:
            self._separate()

    def settle(self) -> torch.Tensor:
        """The sum [S] since the last `consume`, zeros if there was none."""
        if not self.adds:
            self.total.zero_()
        return self.total

    def clear(self, low: int, high: int) -> None:
        """Zero elements [low, high) of the slice."""
        if self.adds:
            self.total[low:high].zero_()

    def planned(self) -> Iterator[Planned]:
        """A slice, where it has a buffer of its own from the start."""
        if self._planned is not None:
            index = self._flat.index
            yield on_device(index, Category.GRADIENTS, self._planned.itemsize, self._rank)

    def _make(self, dtype: torch.dtype) -> torch.Tensor:
        index, label = self._flat.index, f"gradient slice {self._flat.label}"
        start, stop = self._interval
        padding = index.padding_in(start, stop)
        return self._ledger.empty(stop - start, dtype, self._device, Category.GRADIENTS, label, padding)

    def _separate(self) -> None:
        old, before = self._own, self.total
        total = self._make(torch.promote_types(self._flat.dtype, torch.float32))
        total.copy_(before)
        self._own = total
        if old is not None:
            padding = self._flat.index.padding_in(*self._interval) * old.itemsize
            self._ledger.give(Category.GRADIENTS, old.nbytes, f"gradient slice {self._flat.label}", padding)


class OwnSlice:
    """The reduction of a single rank whose sum is the gradient buffer: nothing to reduce.

    Attributes:
        needed: whether gradients are reduced before the update.
        local: whether no other rank takes part, so that a rank without gradients need not start it.
        lasts: whether the tensor of `whole` stays valid after `used`.
    """

    needed, local, lasts = False, True, True

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""
        return False

    def start(self) -> None:
        """Nothing: a single rank has nothing to reduce."""

    def finish(self, seconds: float | None = None) -> bool:
        """True: nothing is in flight."""
        return True

    def release(self) -> None:
        """Nothing: no other rank reads the buffer."""

    def meet(self) -> None:
        """Nothing: no other rank waits."""

    def start_whole(self) -> None:
        """Nothing to gather."""

    def whole(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient over the elements that this rank updates: its sum [S]."""
        return total

    def pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        """The contents of `whole` as consecutive pieces, for reads only: in place where ranks share memory."""
        return [self.whole(total)]

    def used(self) -> None:
        """Nothing: no memory is freed."""

    def reserve(self, total: torch.Tensor) -> None:
        """Nothing: the sum needs no scratch."""

    def wire(self, work: Work) -> Wire:
        """Nothing is sent."""
        yield Purpose.REDUCE_GRADIENTS, 0


class Direct(OwnSlice):
    """The reduction of a rank that holds the slice alone, with a sum outside of the gradient buffer.

    Args:
        divisor: data ranks behind the loss, where they are more than the ranks that hold the slice.
    """

    needed = True

    def __init__(self, buffer: GradientBuffer, total: GradientSum, divisor: int) -> None:
        self._buffer, self._sum, self._divisor = buffer, total, divisor
        self._leaving = False

    def start(self) -> None:
        """Start to add the gradients to the sum."""
        buffer = self._buffer.ready()
        if self._divisor > 1:
            buffer.mul_(1.0 / self._divisor)
        self._sum.put(buffer)
        self._leaving = True

    def release(self) -> None:
        """Wait until the gradients are in the sum."""
        if self._leaving:
            self._leaving = False
            self._sum.release()
            self._buffer.drop()


class Scatter(OwnSlice):
    """Sends each slice to its owner, which adds the ranks' copies in rank order (1910.02054, section 5).

    Args:
        wire_dtype: dtype on the wire; None for that of the gradients.
        divisor: data ranks behind the loss, by which the sum of the ranks' copies is divided.
    """

    needed, local = True, False

    def __init__(
        self,
        flat: Flat,
        comm: Comm,
        arena: Arena,
        buffer: GradientBuffer,
        total: GradientSum,
        wire_dtype: torch.dtype | None,
        divisor: int,
    ) -> None:
        self._flat, self._comm, self._arena = flat, comm, arena
        self._buffer, self._sum, self._wire_dtype, self._divisor = buffer, total, wire_dtype, divisor
        self._exchange: tuple[Exchange, torch.Tensor] | None = None
        self._unread: tuple[Exchange, torch.Tensor] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""
        return self._exchange is not None

    def start(self) -> None:
        """Start to send; a rank without gradients sends zeros, for which the others wait."""
        wire, index, arena, label = self._buffer.ready(), self._flat.index, self._arena, self._flat.label
        if self._wire_dtype is not None and self._wire_dtype != wire.dtype:
            buffer, wire = wire, arena.take(index.padded_numel, self._wire_dtype, f"wire {label}")
            wire.copy_(buffer)
        scratch = partial(_take, arena, wire.dtype, f"reduce {label}")
        self._exchange = (self._comm.exchange(wire, scratch, label, index.padding, bounds=index.bounds), wire)
        if self._comm.shared is not None:
            self._comm.shared.under_way.append((self._exchange, self))

    def finish(self, seconds: float | None = None) -> bool:
        """Wait for the other ranks' copies of this rank's slice, and add their mean to the sum.

        Where ranks share memory, reductions of other flats that were started before are finished first.

        Args:
            seconds: give up when the other ranks take longer: one of them may wait for this rank's next gather.

        Returns:
            whether nothing is in flight any more.
        """
        if self._exchange is None:
            return True
        if not self._finish_earlier(seconds):
            return False
        if seconds is not None and not self._exchange[0].arrives_within(seconds):
            return False
        if self._comm.shared is not None:
            self._comm.shared.under_way.popleft()
        (exchange, wire), self._exchange = self._exchange, None
        exchange.wait()
        # In place, unless the sum overlaps a copy that is read later.
        apart = self._sum.apart or len(exchange.copies) == 2
        into = self._sum.slot()
        add_mean(self._comm, into, exchange.copies, self._arena, self._sum.adds, apart, self._divisor)
        exchange.done()
        if exchange.scratch is not None:
            self._arena.give(exchange.scratch)
        self._unread = (exchange, wire)
        if self._comm.shared is None:
            self._release_read()
        self._sum.put(into)
        return True

    def _finish_earlier(self, seconds: float | None) -> bool:
        """Finish reductions in the order of starts on all ranks: the order of gradients may depend on a rank's data."""
        shared = self._comm.shared
        while shared is not None and shared.under_way[0][0] is not self._exchange:
            exchange, earlier = shared.under_way[0]
            if earlier._exchange is not exchange:  # dropped after an error
                shared.under_way.popleft()
            elif not earlier.finish(seconds):
                return False
        return True

    def release(self) -> None:
        """Free the buffers once the other ranks and the sum have read them."""
        self._release_read()
        self._sum.release()

    def meet(self) -> None:
        """Finish and release in shared memory, where each rank waits until the others have read."""
        if self._comm.shared is not None:
            self.finish()
            self.release()

    def wire(self, work: Work) -> Wire:
        """Each reduction is a reduce-scatter (section 7)."""
        yield Purpose.REDUCE_GRADIENTS, self._flat.index.numel * work.reductions * work.updates

    def _release_read(self) -> None:
        if self._unread is None:
            return
        (exchange, wire), self._unread = self._unread, None
        exchange.wait_until_read()
        if wire is not self._buffer.tensor:
            self._arena.give(wire)
        self._buffer.drop()


class AllReduce(Scatter):
    """Stage 0: every rank updates all elements, so the slices of the mean are gathered for the update."""

    _wide: torch.Tensor | None = None
    _gather: Pending | None = None
    _shown: InPlace | None = None  # that gather where ranks share memory, until the others have read

    def start_whole(self) -> None:
        """Start to gather the slices of the mean, where the gradient buffer holds them."""
        total = self._sum.settle()
        if self._buffer.kept and total.dtype == self._buffer.dtype:
            self._start_gather(self._buffer.ready(), total)

    def whole(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient over the elements that this rank updates: all [N*S], gathered."""
        whole = self._buffer.ready()
        if self._gather is None and total.dtype != whole.dtype:
            whole = self._wide = self._take_wide(total)
            self.lasts = False
        for part, other in zip(self._parts(whole), self._arrived(whole, total), strict=False):
            if not same_place(part, other):
                part.copy_(other)
        self._release_shown()
        return whole

    def pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        """As `whole`, each slice in its rank's memory."""
        if self._comm.shared is None or total.dtype != self._buffer.dtype:
            return [self.whole(total)]
        return self._arrived(self._buffer.ready(), total)

    def used(self) -> None:
        """Note that the update has read the tensors of `whole` or `pieces`."""
        if self._shown is not None:
            self._shown.done()
        if self._wide is not None:
            self._arena.give(self._wide)
            self._wide, self.lasts = None, True

    def release(self) -> None:
        """Free the buffers once the other ranks have read the gradients and this rank's slice of the mean."""
        super().release()
        self._release_shown()

    def reserve(self, total: torch.Tensor) -> None:
        """Reserve the scratch for slices of a dtype that the gradient buffer cannot hold."""
        if total.dtype != self._buffer.dtype:
            self._arena.give(self._take_wide(total))

    def wire(self, work: Work) -> Wire:
        """The reduction, and the gather for the update: an all-reduce."""
        yield from super().wire(work)
        yield Purpose.GATHER_GRADIENTS, self._flat.index.numel * work.updates

    def _take_wide(self, total: torch.Tensor) -> torch.Tensor:
        return self._arena.take(self._flat.index.padded_numel, total.dtype, f"sums {self._flat.label}")

    def _start_gather(self, whole: torch.Tensor, total: torch.Tensor) -> None:
        own, comm = self._parts(whole)[self._comm.mesh.rank], self._comm
        if not same_place(own, total):
            own.copy_(total)
        purpose, label, padding = Purpose.GATHER_GRADIENTS, self._flat.label, self._flat.index.padding
        if comm.shared is None:
            self._gather = comm.gather(whole, own, purpose, label, padding)
        else:
            self._gather = self._shown = comm.show(comm.shared, whole, own, purpose, label, padding)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        index = self._flat.index
        return [whole[slice(*index.interval(rank))] for rank in range(self._comm.mesh.ranks)]

    def _arrived(self, whole: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's slice, by rank, once all are complete: in `whole`, or in the shared memory of the other ranks."""
        if self._gather is None:
            self._start_gather(whole, total)
        assert self._gather is not None
        self._gather.wait()
        self._gather, shown = None, self._shown
        parts = self._parts(whole)
        if shown is None:
            return parts
        ranks = enumerate(parts)
        return [p if rank == self._comm.mesh.rank else shown.of(rank, p.numel(), p.dtype) for rank, p in ranks]

    def _release_shown(self) -> None:
        """Wait until the other ranks have read this rank's slice, which may be written again then."""
        if self._shown is not None:
            self._shown.done()
            self._shown.wait_until_read()
            self._shown = None


def average(total: torch.Tensor, comm: Comm, arena: Arena, label: str) -> None:
    """Replace `total` [S] by its mean over the ranks of `comm`; a collective call."""
    ranks = comm.mesh.ranks
    size = -(-total.numel() // ranks)
    padded = arena.take(size * ranks, total.dtype, label)
    padded[: total.numel()].copy_(total)
    padded[total.numel() :].zero_()
    purpose, padding = Purpose.AVERAGE_REPLICAS, padded.numel() - total.numel()
    exchange = comm.exchange(padded, partial(_take, arena, total.dtype, label), label, padding, purpose)
    exchange.wait()
    own = padded[comm.mesh.rank * size : (comm.mesh.rank + 1) * size]
    add_mean(comm, own, exchange.copies, arena, add=False, apart=ranks == 2, divisor=ranks)
    exchange.done()
    comm.gather(padded, own, purpose, label, padding).wait()
    total.copy_(padded[: total.numel()])
    for used in (padded, exchange.scratch):
        assert used is not None
        arena.give(used)


def _take(arena: Arena, dtype: torch.dtype, label: str, numel: int) -> torch.Tensor:
    return arena.take(numel, dtype, label)
