"""Waits that do not block the host, as NCCL's: work whose wait returns at once, and which ends later or never."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool, impatient

import zeroshard as zs
from zeroshard.comm import hang_detector
from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.heartbeat import Heartbeat, read_failure
from zeroshard.comm.mesh import beside
from zeroshard.comm.process_groups import _PlaceholderGroup
from zeroshard.errors import CommError

PATIENCE = 60.0  # seconds that a verdict may take on a busy machine
Done = Callable[[], bool]


class Late(dist.Work):
    """Work on a device: its wait returns at once."""

    def __init__(self, done: Done) -> None:
        super().__init__()
        self.is_completed = done  # type: ignore[method-assign]

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Device:
    """A stand-in for an accelerator with one stream, which waits for all work so far."""

    def __init__(self) -> None:
        self.waits: list[Done] = []
        self.aborted = 0

    def current_stream(self, device: torch.device) -> None:
        """There is one."""

    def record(self, device: torch.device, on: Any = None) -> Any:
        """An event after the waits so far."""
        before = list(self.waits)
        event = type("Event", (), {})()
        event.query = lambda: all(done() for done in before)
        return event

    def abort(self) -> None:
        """Count the call."""
        self.aborted += 1


class Paper:
    """A `Comm` on such a device.

    Attributes:
        ends: gives the end of the next operation, by its label.
    """

    def __init__(self, mesh: zs.Mesh, stack: ExitStack) -> None:
        self.device, self.comm = Device(), Comm(mesh)
        self.comm.on_accelerator = True
        self.ends: dict[str, Done] = {}
        stack.enter_context(patch.object(hang_detector, "accelerator", self.device))
        stack.enter_context(patch.object(hang_detector, "abort_all", self.device.abort))
        stack.enter_context(impatient())

    def start(self, group: str, label: str) -> Any:
        """A reduction or a gather, for which the stream waits."""
        done = self.ends.get(label, lambda: True)
        self.comm._network.all_reduce = lambda *_: Late(done)  # type: ignore[method-assign]
        self.comm._network.gather = lambda *_: Late(done)  # type: ignore[method-assign]
        self.device.waits.append(done)
        if group == "reduce":
            self.comm.all_reduce(torch.ones(2), Purpose.SUM_ACTIVATIONS, label).wait()
        else:
            self.comm.gather(torch.ones(4), torch.ones(2), Purpose.GATHER_PARAMETERS, label).wait()

    def until(self, condition: Done) -> None:
        """Let the host stand elsewhere."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def found(self) -> CommError | None:
        """The verdict."""
        assert self.comm._stream_watch is not None
        return self.comm._stream_watch.found


def slow(mesh: zs.Mesh) -> Any:
    """An operation that ends after it was published, and one after it."""
    own = beside(mesh, "slow")
    store = own.store
    assert store is not None
    with ExitStack() as stack:
        paper = Paper(own, stack)
        ended = [False]
        paper.ends["a"] = lambda: ended[0]
        paper.start("reduce", "a")
        paper.start("reduce", "b")
        paper.until(lambda: store.check([f"where/{mesh.rank}"]))
        paper.comm.agree(b"", "both have published")
        ended[0] = True
        paper.until(lambda: not store.check([f"where/{mesh.rank}"]))
        assert paper.comm._stream_watch is not None
        paper.until(lambda: paper.comm._stream_watch._event is None)  # type: ignore[union-attr]
        return paper.found, paper.device.aborted, paper.comm._stream_watch.place.label


def test_an_operation_that_ends_late_is_published_and_withdrawn(pool: Pool) -> None:
    for found, aborted, latest in pool.run(slow, 2):
        assert (found, aborted) == (None, 0) and latest.endswith("of b")


def parted(mesh: zs.Mesh, folder: str) -> Any:
    """The ranks start another operation each, and their hosts go on."""
    heartbeat = Heartbeat(Path(folder) / f"rank-{mesh.rank}.heartbeat", mesh.rank)
    own = replace(beside(mesh, "parted"), heartbeat=heartbeat, failures=None)
    with ExitStack() as stack:
        paper = Paper(own, stack)
        paper.ends["x"] = lambda: False
        paper.start("reduce", "before")
        paper.start("gather" if mesh.rank else "reduce", "x")
        paper.until(lambda: paper.device.aborted > 0)
        failure = read_failure(heartbeat.path)
        with pytest.raises(CommError) as raised:
            paper.start("reduce", "after")
        return str(paper.found), str(raised.value), failure and failure.message


def test_ranks_that_wait_for_unlike_operations_are_named_and_their_groups_aborted(pool: Pool, tmp_path: Path) -> None:
    for rank, (found, raised, written) in enumerate(pool.run(parted, 2, str(tmp_path))):
        assert found == raised == written
        mine = f"{'gather parameters' if rank else 'sum activations'} of x"
        assert f"The ranks disagree about what comes next: rank {rank} waits for '{mine}', rank {1 - rank} for" in found


def alone(mesh: zs.Mesh, folder: str) -> Any:
    """Rank 1 never starts the operation."""
    own = replace(beside(mesh, "alone"), timeout=0.5, failures=None)
    with ExitStack() as stack:
        paper = Paper(own, stack)
        if mesh.rank == 0:
            paper.ends["x"] = lambda: False
            paper.start("reduce", "x")
            paper.until(lambda: paper.found is not None)
        Comm(mesh).agree(b"", "the end")
        return str(paper.found) if mesh.rank == 0 else None


def test_a_rank_that_does_not_come_is_named_after_the_timeout(pool: Pool, tmp_path: Path) -> None:
    found, _ = pool.run(alone, 2, str(tmp_path))
    assert found.startswith("Rank 0 waited 0 s for 'sum activations of x' and gave up; rank 1 is silent.")


def test_torch_may_abort_all_entries_of_its_table_of_groups() -> None:
    _PlaceholderGroup().abort()
    _PlaceholderGroup().shutdown()
