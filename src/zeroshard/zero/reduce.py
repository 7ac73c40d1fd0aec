"""How gradients get from the gradient buffer into the sum of the rank that owns the slice.

[Note: in flight] A reduction is started, finished and released: when it is finished, this rank's sum holds the mean;
when it is released, all other ranks have read this rank's gradients, and the buffer may be written again.
"""

from functools import partial

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.pending import Exchange, InPlace, Pending
from zeroshard.memory.ledger import Arena
from zeroshard.parts.gradients import GradientSum
from zeroshard.parts.planned import Wire, Work
from zeroshard.platform.transport import same_place
from zeroshard.units import Flat
from zeroshard.zero.gradients import GradientBuffer


class OwnSlice:
    """The reduction of a single rank whose sum is the gradient buffer: nothing to reduce.

    Attributes:
        needed: whether gradients have to be reduced before the update.
        local: whether no other rank takes part, so that a rank without gradients need not start it.
        lasts: whether the tensor that `whole` returned takes no memory that `used` hands back.
    """

    needed, local, lasts = False, True, True

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not finished."""
        return False

    def start(self) -> None:
        """Single rank: nothing to reduce."""

    def finish(self, seconds: float | None = None) -> bool:
        """Nothing is under way."""
        return True

    def release(self) -> None:
        """Single rank: no other rank reads the buffer."""

    def meet(self) -> None:
        """No other rank waits."""

    def start_whole(self) -> None:
        """Start to gather what `whole` returns: nothing to gather."""

    def whole(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient over the elements that this rank updates: its sum [S]."""
        return total

    def pieces(self, total: torch.Tensor) -> list[torch.Tensor]:
        """What `whole` returns, one piece behind the other, to be read alone: where it is, if ranks share memory."""
        return [self.whole(total)]

    def used(self) -> None:
        """What `whole` or `pieces` returned is not needed any more."""

    def reserve(self, total: torch.Tensor) -> None:
        """The sum takes no scratch."""

    def wire(self, work: Work) -> Wire:
        """Nothing is sent."""
        yield Purpose.REDUCE_GRADIENTS, 0


class Direct(OwnSlice):
    """One rank that has the slice alone, and whose sum is not the gradient buffer.

    Args:
        divisor: data ranks behind the loss, where they are more than the ranks that hold the slice.
    """

    needed = True

    def __init__(self, buffer: GradientBuffer, total: GradientSum, divisor: int) -> None:
        self._buffer, self._sum, self._divisor = buffer, total, divisor
        self._leaving = False

    def start(self) -> None:
        """Begin to add the gradients to the sum."""
        buffer = self._buffer.ready()
        if self._divisor > 1:
            buffer.mul_(1.0 / self._divisor)
        self._sum.put(buffer)
        self._leaving = True

    def release(self) -> None:
        """Wait until the gradients are added."""
        if self._leaving:
            self._leaving = False
            self._sum.release()
            self._buffer.drop()


class Scatter(OwnSlice):
    """Every slice goes to the rank that owns it, which adds the ranks' copies in rank order (1910.02054, section 5).

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
        """Start to send; a rank without gradients sends its zeros, which the others wait for."""
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

        Those of other flats that were started before are finished first, where ranks share memory.

        Args:
            seconds: give up when the other ranks take longer; a rank that blocked here could wait for one that waits
                for this rank's next gather.

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
        into = self._sum.room()
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
        """Which gradients come first after a reduction may depend on a rank's data; all read in the order of starts."""
        shared = self._comm.shared
        while shared is not None and shared.under_way[0][0] is not self._exchange:
            exchange, earlier = shared.under_way[0]
            if earlier._exchange is not exchange:  # dropped after an error
                shared.under_way.popleft()
            elif not earlier.finish(seconds):
                return False
        return True

    def release(self) -> None:
        """Wait until the other ranks and the sum have read the buffers, and hand those back."""
        self._release_read()
        self._sum.release()

    def meet(self) -> None:
        """In shared memory each rank waits until the others have read, which they do when they finish."""
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
    """Every rank updates everything (stage 0), so the slices of the mean are gathered for the update."""

    _wide: torch.Tensor | None = None
    _gather: Pending | None = None
    _shown: InPlace | None = None  # that gather where ranks share memory, until the others have read

    def start_whole(self) -> None:
        """Start to gather the slices of the mean, where the gradient buffer holds them."""
        total = self._sum.settle()
        if self._buffer.kept and total.dtype == self._buffer.dtype:
            self._start_gather(self._buffer.ready(), total)

    def whole(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient over the elements that this rank updates: everything [N*S], gathered."""
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
        """As `whole`, where each rank's slice is."""
        if self._comm.shared is None or total.dtype != self._buffer.dtype:
            return [self.whole(total)]
        return self._arrived(self._buffer.ready(), total)

    def used(self) -> None:
        """What `whole` or `pieces` returned is not needed any more."""
        if self._shown is not None:
            self._shown.done()
        if self._wide is not None:
            self._arena.give(self._wide)
            self._wide, self.lasts = None, True

    def release(self) -> None:
        """As that of `Scatter`; the others have read this rank's slice of the mean, too."""
        super().release()
        self._release_shown()

    def reserve(self, total: torch.Tensor) -> None:
        """Have the scratch in which slices are gathered that the gradient buffer cannot hold."""
        if total.dtype != self._buffer.dtype:
            self._arena.give(self._take_wide(total))

    def wire(self, work: Work) -> Wire:
        """With the gather for the update it is an all-reduce."""
        yield from super().wire(work)
        yield Purpose.GATHER_GRADIENTS, self._flat.index.numel * work.updates

    def _take_wide(self, total: torch.Tensor) -> torch.Tensor:
        return self._arena.take(self._flat.index.padded_numel, total.dtype, f"sums {self._flat.label}")

    def _start_gather(self, whole: torch.Tensor, total: torch.Tensor) -> None:
        own, comm = self._parts(whole)[self._comm.mesh.rank], self._comm
        if not same_place(own, total):
            own.copy_(total)
        given = (whole, own, Purpose.GATHER_GRADIENTS, self._flat.label, self._flat.index.padding)
        if comm.shared is None:
            self._gather = comm.gather(*given)
        else:
            self._gather = self._shown = comm.show(comm.shared, *given)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        index = self._flat.index
        return [whole[slice(*index.interval(rank))] for rank in range(self._comm.mesh.ranks)]

    def _arrived(self, whole: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's slice, by rank, once they are there: in `whole`, or in shared memory where the others are."""
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
        """Wait until the others have read this rank's slice, which may be written again after it."""
        if self._shown is not None:
            self._shown.done()
            self._shown.wait_until_read()
            self._shown = None


def average(total: torch.Tensor, comm: Comm, arena: Arena, label: str) -> None:
    """Let `total` [S] be its mean over the ranks of `comm`, in place; a collective call."""
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


CHUNK = 2**16  # elements that are added over the ranks at a time, so that sums stay in the cache
LAUNCH = 2**24  # on GPUs, so that each launch has enough to do


def add_mean(
    comm: Comm, into: torch.Tensor, copies: list[torch.Tensor], arena: Arena, add: bool, apart: bool, divisor: int
) -> None:
    """Set `into` [S] to the mean of the ranks' copies [S], or add that to it; summed in rank order, in fp32 at least.

    Args:
        apart: whether `into` overlaps no copy after the second.
        divisor: of the sum; the number of data ranks behind it.
    """
    sums = torch.promote_types(copies[0].dtype, torch.float32)
    at_once = apart and not add and into.dtype == sums
    chunk = CHUNK if into.device.type == "cpu" else LAUNCH
    scratch = None if at_once else arena.take(min(chunk, into.numel()), sums, "sum over ranks")
    platform, moved = comm.mesh.platform, (len(copies) + 1) * copies[0].nbytes + into.nbytes
    if not (platform.imitates and platform.skips(moved, len(copies) + 1)):
        _sum(into, copies, chunk, scratch, add, divisor)
    if scratch is not None:
        arena.give(scratch)


def _sum(
    into: torch.Tensor, copies: list[torch.Tensor], chunk: int, scratch: torch.Tensor | None, add: bool, divisor: int
) -> None:
    sums = torch.promote_types(copies[0].dtype, torch.float32)
    for part, *others in zip(into.split(chunk), *(copy.split(chunk) for copy in copies), strict=True):
        mean = part if scratch is None else scratch[: part.numel()]
        if others[0].dtype == sums:
            torch.add(others[0], others[1], out=mean)
        else:
            mean.copy_(others[0]).add_(others[1])
        for other in others[2:]:
            mean.add_(other)
        mean.mul_(1.0 / divisor)
        if scratch is not None:
            part.add_(mean) if add else part.copy_(mean)
