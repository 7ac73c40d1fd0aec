"""Collectives in flight, which end with a watched wait."""

import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from zeroshard.comm.left_passes import engines_over_stages
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.process_groups import ABANDONED
from zeroshard.errors import CommError
from zeroshard.memory.ledger import Arena
from zeroshard.platform import ranges
from zeroshard.platform.shared_memory import Signal
from zeroshard.platform.shared_operands import Operands
from zeroshard.platform.transport import Arrival, Shared
from zeroshard.traffic import Count, Purpose


class Position(NamedTuple):
    """The place of one collective: its group, its number there (from 1), and its name.

    The group of a message is its channel, "source>destination"; its number counts the messages there.
    """

    group: str
    number: int
    label: str

    def action(self, rank: int) -> str:
        """Its name in a profile: "gather blocks.3" or, of a message, "send" or "receive" and the label."""
        source, message, _ = self.group.partition(">")
        if message:
            return f"{'send' if int(source) == rank else 'receive'} {self.label}"
        purpose, of, label = self.label.partition(" of ")
        return f"{purpose.split()[0]} {label}" if of and self.group != "control" else self.label


def cause_of(error: BaseException) -> str:
    """The cause of a backend's error in words of our own; its text stays with the error that caused this one."""
    if "nbytes" in str(error):  # gloo's "op.preamble.length <= op.nbytes"
        return (
            "another rank sent another number of bytes: the ranks have models or batches of unlike shapes, where "
            "ranks of one data rank (engine.data_rank) must be given the same batch"
        )
    return "a connection broke: another rank has ended, or the network between them was cut; see each rank's log"


class WaitingComm(Protocol):
    """The methods of `Comm` that collectives in flight call."""

    mesh: Mesh
    on_accelerator: bool
    counts: dict[Purpose, Count]
    shared: Shared | None

    def wait(self, work: dist.Work, place: Position) -> None:
        """Wait for `work`; find the reason when it takes long."""

    def failure(self) -> str | None:
        """The first rank's failure."""


class Naming:
    """Turns a backend's error into a `CommError` that names the operation; passes a timeout on as `TimeoutError`.

    A profiler sees the start of the operation as a range of its name.
    """

    def __init__(self, comm: WaitingComm, place: Position, starts: bool) -> None:
        self._comm, self._place = comm, place
        self._range: AbstractContextManager[object] | None = None
        if starts and ranges.profiler._is_profiler_enabled:
            self._range = ranges.named(place.action(comm.mesh.rank))

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        if not isinstance(error, RuntimeError) or isinstance(error, CommError):
            return
        if str(error).startswith("Operation timed out"):
            raise TimeoutError from error
        first = self._comm.failure()
        reason = f"{first}" if first else cause_of(error)
        raise CommError(f"Rank {self._comm.mesh.rank} stopped in '{self._place.label}' because {reason}") from error


CHUNK = 2**16  # elements that are added over the ranks at a time, so that sums stay in the cache
LAUNCH = 2**24  # on GPUs, so that each launch has enough to do


class Pending:
    """A collective in flight; `wait` returns when its result may be used."""

    def __init__(self, comm: WaitingComm, work: dist.Work | None, place: Position, purpose: Purpose) -> None:
        self._comm = comm
        self._work = work
        self._place = place
        self._purpose = purpose

    def __del__(self) -> None:
        """Keep an operation that will never end: gloo waits for it when it is freed."""
        if self._work is not None and not self._work.is_completed():
            lease = self._comm.mesh.lease
            ABANDONED.append((lease.name if lease else "", self._work))

    def arrives_within(self, seconds: float) -> bool:
        """Wait at most so long; False if the result is not complete yet."""
        if self._work is not None and not self._work.is_completed() and not self._comm.on_accelerator:
            try:
                self._work.wait(timedelta(seconds=seconds))
            except (RuntimeError, TimeoutError):
                return self._work.is_completed()  # a timeout, or an error that `wait` will report
        return True

    def wait(self) -> None:
        """Wait for the result (on CUDA: make the current stream wait).

        Raises:
            CommError: ranks wait for different operations, a rank is silent, or a connection broke.
        """
        if self._work is None:
            return
        start, heartbeat = time.perf_counter(), self._comm.mesh.heartbeat
        if heartbeat is not None:
            heartbeat.enter(self._place)
        try:
            if ranges.profiler._is_profiler_enabled:
                with ranges.named("wait for", self._place.action(self._comm.mesh.rank)):
                    self._comm.wait(self._work, self._place)
            else:
                self._comm.wait(self._work, self._place)
        except CommError as error:
            if self._comm.mesh.lease is not None:
                self._comm.mesh.lease.broken = True
            for engine in engines_over_stages(self._comm.mesh):
                engine.break_off(error)
            raise
        if heartbeat is not None:
            heartbeat.leave()
        self._comm.counts[self._purpose].seconds += time.perf_counter() - start  # of the step that waits
        self._work = None


class InPlace(Pending):
    """Memory of all ranks that each rank reads after `wait`, where they share it, and releases with `done`.

    Args:
        signal: of the end of a rank's reads; signals of one kind are sent in the same order by all ranks.
    """

    def __init__(self, comm: WaitingComm, work: dist.Work, place: Position, purpose: Purpose, signal: Signal) -> None:
        super().__init__(comm, work, place, purpose)
        self._signal, self._memory = signal, None if comm.shared is None else comm.shared.memory
        self._read: Pending | None = None

    def of(self, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """After `wait`: another rank's values [numel]."""
        assert self._memory is not None
        return self._memory.theirs(rank, self._place.label, 0, numel, dtype)

    def done(self) -> None:
        """Release the memory, unless that was done; in the order of starts."""
        if self._memory is not None and self._read is None:
            self._memory.post(self._signal)
            self._read = Pending(self._comm, self._memory.work(self._signal), self._place, self._purpose)

    def wait_until_read(self) -> None:
        """Wait until all ranks have read this rank's own buffer, which may be written again then.

        Raises:
            CommError: as `wait`.
        """
        if self._read is not None:
            self._read.wait()
            self._read = None


class Exchange(InPlace):
    """An exchange in flight, which receives every rank's copy of this rank's slice.

    Attributes:
        scratch: the buffer of the copies, returned to its arena after `done`; None if they are read in place.
    """

    def __init__(self, comm: WaitingComm, work: dist.Work, place: Position, purpose: Purpose, arrival: Arrival) -> None:
        super().__init__(comm, work, place, purpose, Signal.READ)
        self._arrival = arrival
        self.scratch = arrival.scratch

    @property
    def copies(self) -> list[torch.Tensor]:
        """After `wait`: [S] each, in rank order."""
        return self._arrival.copies


class SideBySide(Pending):
    """Tensors of all ranks in shared memory; valid after `wait` and until `done`."""

    def __init__(self, comm: WaitingComm, work: Operands, place: Position, purpose: Purpose) -> None:
        super().__init__(comm, work, place, purpose)
        self._operands = work

    def of(self, rank: int, shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
        """A rank's tensor; of another rank, the elements of this shape from `first` on in its pieces."""
        return self._operands.of(rank, shape, first)

    def done(self) -> None:
        """Release them, once this rank has read all; in the same order on all ranks."""
        self._operands.done()


def add_mean(
    comm: WaitingComm,
    into: torch.Tensor,
    copies: list[torch.Tensor],
    arena: Arena,
    add: bool,
    apart: bool,
    divisor: int,
) -> None:
    """Set `into` [S] to the mean of the ranks' copies [S], or add it to `into`; summed in rank order, in fp32 at least.

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
