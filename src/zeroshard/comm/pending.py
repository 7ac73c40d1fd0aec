"""Collectives in flight, which end with a watched wait; and passes and calls that a rank left without ending them.

[Note: left passes] A loop that catches errors (`except Exception: continue`) on one rank alone is a batch ahead of the
others from then on, and each step would sum gradients of unlike batches. So each rank counts the forwards for training
whose outputs never got a gradient, and the backwards that ended in an error; the agreement on a step compares the
counts, in a message that is sent anyway. A step does not reset them: ranks that left equally many passes are at the
same batch again, as after `discard_batch` on all. Forwards without gradients do not count, nor those in evaluation
mode, unless the model is trained in it.

[Note: left calls] Stages send each other messages in the middle of a step, so an error of one rank leaves the others in
waits that never end. That rank writes its error into the store, with the number of the call, and a rank that waits long
raises it, unless it met an error in that call itself. What was sent in such a call would be taken for a message of the
next, so once a call has ended with something under way, no rank goes on. Evaluations are counted for each data rank.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zeroshard.comm.disagreement import at_unlike_batches, note_error
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.over_budget import announce_over_budget
from zeroshard.comm.process_groups import ABANDONED
from zeroshard.comm.rendezvous import give_up
from zeroshard.errors import BudgetExceeded, CommError
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


SHOWN = 300  # letters of an error


class Agreeing(Protocol):
    """The method of `Comm` that a comparison calls."""

    def agree_on(self, value: list[str], label: str) -> list[list[str]]:
        """Every rank's value."""


class LeftPasses:
    """The forwards of one engine for training, and their backwards.

    Args:
        mesh: has the list of errors, for the first since the ranks last agreed.

    Attributes:
        counts: whether passes count; not inside of `join`, where ranks agree on each call.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._caught, self.counts = mesh, mesh.caught, True
        self._left, self._agreed, self._updates = 0, 0, 0
        self._open: dict[int, bool] = {}  # forwards without a gradient since the last update: whether in training mode
        self._latest = 0
        self._evaluated = self._reached = False  # whether backwards come through forwards in evaluation mode; this one

    @property
    def left(self) -> int:
        """How many passes this rank has left so far, in 32 bits."""
        return (self._left + sum(mode or self._evaluated for mode in self._open.values())) % 2**32

    @property
    def latest(self) -> int:
        """The number of the latest forward."""
        return self._latest

    def begin(self, mode: bool, updates: int) -> None:
        """Begin a forward for training.

        Args:
            mode: whether the model is in training mode.
            updates: of the weights so far; an earlier forward has no backward after one.
        """
        if self.counts:
            if updates != self._updates:
                self._close(self.left, updates)
            self._latest += 1
            self._open[self._latest] = mode

    def reach(self, number: int) -> None:
        """Note that the backward under way comes through this forward."""
        if self.counts:
            self._reached = True
            self._evaluated |= not self._open.pop(number, True)

    def end(self) -> None:
        """End a backward; one through no output, of a loss on inner activations or on none, is that of the latest."""
        if self.counts and not self._reached and self._open:
            self._evaluated |= not self._open.popitem()[1]
        self._reached = False

    def leave(self) -> None:
        """Count one, however many passes were begun since the ranks last agreed."""
        if self.counts:
            self._agreed += 1
            self._close(self._agreed, self._updates)

    def restart(self) -> None:
        """Count from 0 on all ranks, which go on from one checkpoint."""
        self._agreed = 0
        self._close(0, self._updates)
        self._mesh.forget_errors()

    def interrupt(self) -> None:
        """Count a backward that ended in an error; its forward counts already if it did not come so far."""
        self._left += self.counts and (self._reached or not self._open)
        self._reached = False

    def fail(self, error: BaseException) -> None:
        """Remember an error of this rank's own, for the errors of the other ranks."""
        if not (isinstance(error, CommError) or getattr(error, "expected", False) or self._caught):
            note_error(self._mesh, f"{type(error).__name__}: {error}".partition("\n")[0][:SHOWN])

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Remember an error inside."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    @contextmanager
    def train_step(self, discard: Callable[[], None], world: Mesh) -> Iterator[None]:
        """Count a step that raises, and drop its gradients, unless a connection broke, which ends training."""
        before = self.left
        try:
            yield
        except Exception as error:
            if isinstance(error, BudgetExceeded) and not isinstance(error, CommError):
                announce_over_budget(world, error)
            self.fail(error)
            try:
                if not isinstance(error, CommError):
                    with suppress(CommError):  # ranks that this one waits for may have met another error
                        discard()
            finally:
                if self.counts:
                    self._close(before + 1, self._updates)
            raise

    def check(self, counts: Sequence[int], comm: Agreeing, step: int) -> CommError | None:
        """The error of ranks that left unlike numbers of passes, which each of them raises; None without.

        Args:
            counts: of all ranks; the same on each.
        """
        if len(set(counts)) == 1:
            self._agreed = counts[0]
            if self._caught:
                self._mesh.forget_errors()
            return None
        return at_unlike_batches(counts, comm.agree_on(self._caught, "errors of passes"), step)

    def _close(self, left: int, updates: int) -> None:
        """Count the open forwards for good."""
        self._left, self._updates, self._open = left, updates, {}


ANNOUNCED = 2000  # letters of an error that ends a call on all ranks
BROKEN = "broken"  # the key of an engine that takes no further call
_engines: WeakKeyDictionary[Store, "WeakSet[LeftCalls]"] = WeakKeyDictionary()


class LeftCalls:
    """The calls of one engine over stages, which its ranks make together ([Note: left calls]).

    Args:
        key: of the engine in the store; place: of this rank, for errors.
        kinds: of calls, each with a name that only the ranks that make them together have.

    Attributes:
        numbers: of calls so far, by kind.
        caught: the last error of this rank's own in a call.
    """

    def __init__(self, mesh: Mesh, key: str, place: str, kinds: Sequence[str]) -> None:
        self._failures, self._key, self._place = mesh.failures, key, place
        self.numbers, self._left = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self._broken, self.caught = "", list[str]()
        if mesh.failures is not None:
            _engines.setdefault(mesh.failures, WeakSet()).add(self)

    @contextmanager
    def call(self, kind: str, name: str, under_way: Callable[[], frozenset[object]]) -> Iterator[None]:
        """Count a call, which an error of this rank's own ends on all of them; refuse it after one that was broken off.

        Args:
            under_way: the microbatches and messages under way.
        """
        self.numbers[kind] += 1
        before = under_way()
        try:
            if self._broken:
                raise CommError(self._broken)
            yield
        except Exception as error:
            self._left[kind] = self.numbers[kind]
            if not isinstance(error, BudgetExceeded | CommError):
                self.caught = [_text(error)]
                self._write(kind, f"{self.numbers[kind]} {self._place} left {name} in an error ({_text(error)})")
            if under_way() - before:
                self.break_off(error)
            raise

    def break_off(self, error: BaseException) -> None:
        """Refuse all later calls of the engine, on all ranks, after an error in the middle of one."""
        if not self._broken:
            self._broken = (
                f"A call of this engine ended in its middle on {self._place} ({_text(error)}), and messages between "
                f"stages are still under way, so it takes no further call. Let errors end the job; or make a new "
                f"engine on all ranks and load a checkpoint."
            )
            self._write(BROKEN, f"0 {self._broken[0].lower()}{self._broken[1:]}")

    def elsewhere(self) -> str | None:
        """The error with which another rank left a call that this one has not left by an error."""
        assert self._failures is not None
        for kind, left in {**self._left, BROKEN: 0 if self._broken else -1}.items():
            if self._failures.check([f"{self._key}/{kind}"]):
                number, _, text = self._failures.get(f"{self._key}/{kind}").decode().partition(" ")
                if int(number) > left:
                    return text
        return None

    def _write(self, kind: str, text: str) -> None:
        if self._failures is not None:
            try:
                self._failures.set(f"{self._key}/{kind}", text)
            except dist.DistError:
                give_up(self._failures)


def engines_over_stages(mesh: Mesh) -> tuple[LeftCalls, ...]:
    """The calls of these ranks' engines over stages."""
    return () if mesh.failures is None else tuple(_engines.get(mesh.failures, ()))


def left_elsewhere(mesh: Mesh) -> str | None:
    """The error with which another rank left a call of an engine; None without one.

    Raises:
        DistError: the store is gone.
    """
    return next(filter(None, (engine.elsewhere() for engine in engines_over_stages(mesh))), None)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ANNOUNCED]
