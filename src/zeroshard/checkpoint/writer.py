"""Pieces that ranks write into a checkpoint, snapshots of them, and the exchange of reports between the ranks.

[Note: two exchanges] Ranks that wait for the disk exchange their reports by a collective of the engine. Threads that
write while training goes on use the key-value store, since they must not start collectives.
"""

import atexit
import contextlib
import json
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from zeroshard.checkpoint.boxes import Box
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.comm.rendezvous import give_up
from zeroshard.errors import CheckpointError, CheckpointWarning
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.platform import accelerator

ALWAYS = 2**16  # bytes of a piece that is copied in any case
POLLS = 0.005, 0.1  # seconds between polls of the store, at first and at most


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The values of one box of the tensor `name` of shape `shape`, in the shape of the box; a view, of any strides.

    Attributes:
        values: of a piece with `fetch`, a stand-in of the same dtype, shape and device.
        lasting: whether later steps leave the values as they are.
        fetch: reads or converts the values.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    lasting: bool = False
    fetch: Callable[[], torch.Tensor] | None = None

    @property
    def present(self) -> torch.Tensor:
        """The values, which are fetched if they are not in memory."""
        return self.values if self.fetch is None else self.fetch()

    @classmethod
    def whole(cls, name: str, values: torch.Tensor) -> "TensorPiece":
        """All of a tensor."""
        return cls(name, tuple(values.shape), Box.whole(tuple(values.shape)), values)


class Fetched:
    """The values of parts whose states are on a disk, or in memory in another form than a checkpoint's.

    Those of one part are held at a time, until each is fetched or one of another part is.
    """

    def __init__(self) -> None:
        self._part, self._held = -1, dict[int, torch.Tensor]()

    def pieces(
        self, part: int, stand_ins: Iterable[TensorPiece], read: Callable[[], Sequence[torch.Tensor]]
    ) -> Iterator[TensorPiece]:
        """Pieces of a part that fetch their values.

        Args:
            stand_ins: the pieces, with values of which nothing but dtype, shape and device is used.
            read: the values of all, in the same order.
        """
        for number, piece in enumerate(stand_ins):
            values = torch.empty((), dtype=piece.values.dtype, device=piece.values.device).expand(piece.values.shape)
            yield replace(piece, values=values, fetch=partial(self._fetch, part, number, read))

    def _fetch(self, part: int, number: int, read: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
        if part != self._part or number not in self._held:
            self._held = {}  # before the next are read
            self._part, self._held = part, dict(enumerate(read()))
        return self._held.pop(number)


class Snapshot:
    """Copies of a rank's pieces on the host, in buffers that all checkpoints reuse.

    [Note: copies in short memory] Copies of all states may need more host memory than is free. Pieces that find no room
    stay as they are: the thread writes them first, and training waits for them alone. Of states on a disk, or in fewer
    bits, the values of one part are in memory at a time (`Fetched`). So a checkpoint holds the states
    of one step with any amount of memory, and the wait is as long as the missing memory is large.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffers: dict[tuple[str, Box], torch.Tensor] = {}

    def take(self, pieces: Iterable[TensorPiece], room: float = math.inf) -> list[TensorPiece]:
        """The pieces, with copies of their values as far as new buffers fit ([Note: copies in short memory]).

        Args:
            room: bytes that new buffers may take; those of fewer than `ALWAYS` bytes are made in any case.
        """
        before, self._buffers = self._buffers, {}
        copies, devices = [], set[torch.device]()
        for piece in pieces:
            values = piece.values
            devices.add(values.device)
            buffer = before.pop((piece.name, piece.box), None)
            if buffer is None or (buffer.dtype, buffer.numel()) != (values.dtype, values.numel()):
                self._enter(buffer, None)
                if values.nbytes > max(room, ALWAYS):
                    copies.append(piece)
                    continue
                self._enter(None, values)
                room -= values.nbytes
                buffer = accelerator.page_locked(values.numel(), values.dtype, values.device)
            buffer.view(values.shape).copy_(piece.present.detach(), non_blocking=True)
            self._buffers[piece.name, piece.box] = buffer
            copies.append(replace(piece, values=buffer, lasting=True, fetch=None))
        for buffer in before.values():
            self._enter(buffer, None)
        for device in devices:
            accelerator.finish_stream(device)
        return copies

    def _enter(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        if old is not None:
            self._ledger.give(Category.BUFFERS, old.nbytes, "checkpoint", tier="host")
        if new is not None:
            self._ledger.take(Category.BUFFERS, new.nbytes, "checkpoint", tier="host")


class Coordination(Protocol):
    """Exchange of reports between ranks; calls come in the same order on all ranks."""

    def collect(self, report: Any) -> list[Any]:
        """On rank 0 the report of every rank (plain JSON values), in rank order; unspecified on the others."""

    def broadcast(self, report: Any) -> Any:
        """The report of rank 0, on every rank."""


class Meeting:
    """The exchange of ranks that wait for each other, by collectives ([Note: two exchanges])."""

    def __init__(self, comm: Comm, name: str) -> None:
        self._comm, self._name = comm, name

    def collect(self, report: Any) -> list[Any]:
        """All reports, on every rank."""
        return self._comm.agree_on(report, f"parts of {self._name}")

    def broadcast(self, report: Any) -> Any:
        """The report of rank 0."""
        return self._comm.agree_on(report, f"end of {self._name}")[0]


class Notes:
    """The exchange of threads: notes in the store, which is polled ([Note: two exchanges]).

    Raises:
        CheckpointError: `collect` or `broadcast` found that a rank has failed, or that the store does not answer.
    """

    def __init__(self, mesh: Mesh, token: str) -> None:
        self._mesh, self._token = mesh, token

    def collect(self, report: Any) -> list[Any]:
        """On rank 0 all reports, which are removed from the store; on the others an empty list."""
        mesh, store = self._mesh, self._mesh.store
        if mesh.ranks == 1 or store is None:
            return [report]
        if mesh.rank:
            with _store_errors(self._mesh):
                store.set(f"save/{self._token}/{mesh.rank}", json.dumps(report))
            return []
        answers = [report]
        for rank in range(1, mesh.ranks):
            answers.append(json.loads(self._wait_for(f"save/{self._token}/{rank}")))
            with _store_errors(self._mesh):
                store.delete_key(f"save/{self._token}/{rank}")
        return answers

    def broadcast(self, report: Any) -> Any:
        """The report of rank 0, which stays in the store."""
        mesh, store = self._mesh, self._mesh.store
        if mesh.ranks == 1 or store is None:
            return report
        if mesh.rank == 0:
            with _store_errors(self._mesh):
                store.set(f"save/{self._token}/end", json.dumps(report))
            return report
        return json.loads(self._wait_for(f"save/{self._token}/end"))

    def _wait_for(self, key: str) -> bytes:
        """Wait for a note; once training has ended or waits for this thread, at most the timeout."""
        mesh, pause, moved = self._mesh, POLLS[0], time.monotonic()
        assert mesh.store is not None and mesh.failures is not None
        while True:
            with _store_errors(self._mesh):
                if mesh.store.check([key]):
                    return mesh.store.get(key)
                if mesh.failures.check(["failure"]):
                    raise CheckpointError(mesh.failures.get("failure").decode())
            if threading.main_thread().is_alive() and not getattr(threading.current_thread(), "awaited", False):
                moved = time.monotonic()
            elif time.monotonic() - moved > mesh.timeout:
                raise CheckpointError(f"another rank was silent for {mesh.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLLS[1])


@contextlib.contextmanager
def _store_errors(mesh: Mesh) -> Iterator[None]:
    """Raise errors of the store as a `CheckpointError`."""
    try:
        yield
    except dist.DistError as error:
        raise CheckpointError(give_up(mesh.store)) from error


class _Writer(threading.Thread):
    """The thread that writes a checkpoint; `awaited` while another thread waits for it."""

    awaited = False


class Saving:
    """A checkpoint that is being written, or is complete.

    Attributes:
        path: its folder once complete.
        exposed_seconds: the caller's wait.
        problem: the failure; None while it is written and after success.
        seen: whether `wait` has raised the problem.
        under_way: savings of all engines of this process, which may be gone before their checkpoints are complete.
    """

    under_way: ClassVar[set["Saving"]] = set()

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self.exposed_seconds = 0.0
        self.problem: CheckpointError | None = None
        self.seen = False
        self._work = work
        self._thread = _Writer(target=self._run, name=f"zeroshard saves {path.name}", daemon=True)

    def __repr__(self) -> str:
        state = "being written" if not self.done else "complete" if self.problem is None else "failed"
        return f"Saving(path={str(self.path)!r}, {state})"

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Start to write, in a thread of its own."""
        Saving.under_way.add(self)
        self._thread.start()

    def wait(self) -> Path:
        """Wait until it is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self.join()
        if self.problem is not None:
            self.seen = True
            raise self.problem
        return self.path

    def join(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` until it is complete or has failed; does not raise the problem."""
        if self._thread.ident is not None:
            self._thread.awaited = True
            self._thread.join(seconds)
            self._thread.awaited = False

    def _run(self) -> None:
        try:
            self._work()
        except CheckpointError as error:
            self.problem = error
        except BaseException as error:  # else the thread would end without a report
            self.problem = CheckpointError(f"The checkpoint {self.path} was not written: {error!r}.")
        finally:
            Saving.under_way.discard(self)


GRACE = 5.0  # seconds for the last checkpoint of a process that failed


class Savings:
    """Begins checkpoints one after the other, and warns of failed ones.

    Attributes:
        last: the latest checkpoint, until its end is noticed.
    """

    def __init__(self) -> None:
        self.last: Saving | None = None
        atexit.register(_finish, weakref.ref(self))

    def begin(self, save: Callable[[], Saving]) -> Saving:
        """Wait for the last checkpoint, then begin another; `exposed_seconds` covers both."""
        started = time.perf_counter()
        if self.last is not None:
            self.last.join()
        self.warn_of_failure()
        self.last = save()
        self.last.exposed_seconds = time.perf_counter() - started
        return self.last

    def wait(self) -> None:
        """Wait for the checkpoints of all engines of this process, which may be read next; warn if the last failed."""
        finish_all()
        self.warn_of_failure()

    def warn_of_failure(self) -> None:
        """Warn of a failed checkpoint, unless its caller has seen the error."""
        if self.last is not None and self.last.done:
            last, self.last = self.last, None
            if last.problem is not None and not last.seen:
                warnings.warn(str(last.problem), CheckpointWarning, stacklevel=4)


def finish_all(seconds: float | None = None) -> None:
    """Wait for the checkpoints that any engine of this process still writes, at most `seconds` for each."""
    for saving in list(Saving.under_way):
        saving.join(seconds)


def _finish(savings: "weakref.ref[Savings]") -> None:
    """At the end of the process, wait for all checkpoints; after an uncaught exception, `GRACE` at most."""
    finish_all(GRACE if getattr(sys, "last_value", None) is not None else None)
    if (alive := savings()) is not None:
        alive.warn_of_failure()
