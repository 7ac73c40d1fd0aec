"""Memory that ranks share: what is common, what each can read of the others, who is told what, and what is left."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Forks
from pool import Pool

import zeroshard as zs
from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.errors import PlanError
from zeroshard.platform import shared_memory as shared
from zeroshard.platform.shared_memory import Signal


def moved(mesh: zs.Mesh) -> Any:
    comm = Comm(mesh)
    assert comm.share(10_000) is None and comm.shared is not None
    n, rank = mesh.ranks, mesh.rank
    common, mine = comm.shared.memory.common(3 * n, torch.float32), comm.buffer(3 * n, torch.bfloat16)
    zeros = not common.any() and not mine.any()
    comm.agree(b"", "looked")
    common[3 * rank : 3 * rank + 3] = torch.arange(3) + 10.0 * rank
    comm.gather(common, common[3 * rank : 3 * rank + 3], Purpose.GATHER_PARAMETERS, "common").wait()
    mine.copy_(torch.arange(3 * n) + 16 * rank)
    exchange = comm.exchange(mine, partial(torch.empty, dtype=mine.dtype), "a", padding=1)
    exchange.wait()
    copies = torch.stack(exchange.copies)
    exchange.done()
    exchange.wait_until_read()
    mine.fill_(rank + 1)  # now that everyone has read
    full = torch.zeros(3 * n, dtype=mine.dtype)
    comm.gather(full, mine[:3], Purpose.GATHER_GRADIENTS, "private").wait()
    counts = {str(purpose): (c.elements, c.sent_nbytes) for purpose, c in comm.counts.items() if "gradients" in purpose}
    return zeros, common.clone(), copies.float(), full.float(), counts, common.untyped_storage().nbytes()


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_common_is_seen_and_what_is_mine_is_read(pool: Pool, ranks: int) -> None:
    for rank, (zeros, common, copies, full, counts, storage) in enumerate(pool.run(moved, ranks)):
        assert zeros
        assert common.tolist() == [10.0 * r + k for r in range(ranks) for k in range(3)]
        assert copies.tolist() == [[3.0 * rank + k + 16 * r for k in range(3)] for r in range(ranks)]
        assert full.tolist() == [r + 1.0 for r in range(ranks) for _ in range(3)]
        assert counts == {"reduce gradients": (3 * ranks - 1, 0), "gather gradients": (3 * ranks, 0)}
        assert storage == 12 * ranks  # and not that of everything that is mapped


def posted(mesh: zs.Mesh) -> Any:
    """Rank 0 posts twice at once, the others take one each time, the second too early at first."""
    comm = Comm(mesh)
    assert comm.share(0) is None and comm.shared is not None
    memory = comm.shared.memory
    if mesh.rank == 0:
        memory.post(Signal.READ)
        comm.agree(b"", "one")
        comm.agree(b"", "two")
        memory.post(Signal.READ)
        return None
    memory._posted[Signal.READ] = 1
    first = memory.work(Signal.READ)
    memory._posted[Signal.READ] = 2
    second = memory.work(Signal.READ)
    comm.agree(b"", "one")
    first.wait(timedelta(seconds=5))
    early = second.is_completed()
    with pytest.raises(TimeoutError):
        second.wait(timedelta(seconds=0.1))
    comm.agree(b"", "two")
    second.wait(timedelta(seconds=5))
    return early, first.is_completed(), second.is_completed()


def test_signals_are_counted(pool: Pool) -> None:
    assert pool.run(posted, 2)[1] == (False, True, True)


def refused(mesh: zs.Mesh, transport: str) -> Any:
    """One rank's /dev/shm is full."""
    real, shared.room = shared.room, lambda: 4096
    try:
        engine = zs.Engine(
            torch.nn.Linear(64, 64),
            partial(torch.optim.SGD, lr=0.1),
            zs.Plan(transport=transport),  # type: ignore[arg-type]
            mesh=mesh,
        )
    except PlanError as error:
        return str(error)
    finally:
        shared.room = real
    return engine.comm.shared is None


def test_too_little_room_is_refused_with_the_way_out_or_avoided(pool: Pool) -> None:
    assert pool.run(refused, 2, "auto") == [True, True]
    for words in pool.run(refused, 2, "shared"):
        assert all(found in words for found in ("4,096 free", "/dev/shm", "--shm-size", "transport='network'"))


def copied(mesh: zs.Mesh, folder: Path) -> Any:
    """Each rank's part of a buffer comes from a file, by the kernel; then rank 1 copies over all parts."""
    comm = Comm(mesh)
    assert comm.share(0) is None and comm.shared is not None
    memory, each = comm.shared.memory, shared.LEAST_PART + 12_345
    size = each * mesh.ranks
    words = bytes(torch.arange(size, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8).tolist())
    file = folder / f"rank-{mesh.rank}"
    file.write_bytes(b"head" + words)
    common, start = memory.common(size, torch.uint8), mesh.rank * each
    part = common[start : start + each]
    comm.agree(b"", "made")
    before = [os.fstat(descriptor).st_blocks for descriptor in memory._descriptors]
    with file.open("rb") as opened:
        counts = [shared.copy_to_shared(opened.fileno(), 4 + start, part)]
        comm.agree(b"", "copied")
        whole = bytes(common.tolist()) == words
        comm.agree(b"", "compared")
        if mesh.rank == 1:
            common.zero_()
            counts += [shared.copy_to_shared(opened.fileno(), 4, common)]
        comm.agree(b"", "copied again")
        whole &= bytes(common.tolist()) == words
        comm.agree(b"", "compared again")
        counts += [shared.copy_to_shared(opened.fileno(), 4 + size - 100_000, part[: 2**17])]  # the file ends earlier
        counts += [shared.copy_to_shared(opened.fileno(), 4, torch.empty(2**17, dtype=torch.uint8))]
        counts += [shared.copy_to_shared(os.pidfd_open(os.getpid()), 0, part)]
    blocks = [os.fstat(descriptor).st_blocks for descriptor in memory._descriptors]
    return whole, counts, [512 * count for count in blocks], blocks == before, each


@pytest.mark.parametrize("ranks", [2, 4])
def test_files_are_copied_into_pages_of_each_rank(pool: Pool, tmp_path: Path, ranks: int) -> None:
    for rank, (whole, counts, nbytes, reserved, each) in enumerate(pool.run(copied, ranks, tmp_path)):
        assert whole and reserved
        assert counts == [each, *([each * ranks] if rank == 1 else []), 100_000, 0, 0]
        assert min(nbytes[1:]) >= each - 2 * shared.PAGE, "each rank's pages are in its own file"
        assert nbytes[0] < 2 * each + shared._region(0, ranks)


def exhausted(mesh: zs.Mesh) -> str:
    comm = Comm(mesh)
    assert comm.share(0) is None
    real, os.posix_fallocate = os.posix_fallocate, _full
    try:
        with pytest.raises(PlanError) as caught:
            comm.buffer(10, torch.float32)
        return str(caught.value)
    finally:
        os.posix_fallocate = real


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_room_that_runs_out_later_is_an_error_and_no_crash(pool: Pool) -> None:
    for words in pool.run(exhausted, 2):
        assert "need 40 more bytes in /dev/shm" in words and "No space left on device" in words


def test_ranks_of_several_machines_do_not_share() -> None:
    there = [[["boot", "pid:[1]"], 1], [["other boot", "pid:[1]"], 1]]
    assert shared.share(0, 2, lambda value, label: there, 0) == "the ranks are on different machines"


def test_a_file_that_is_not_the_one_offered_is_refused() -> None:
    descriptor, offered = shared.offer(2)
    with pytest.raises(OSError, match="is another file"):
        shared.accept(os.getpid(), {**offered, "file": [0, 0]})
    os.close(descriptor)


SCRIPT = """
import os, sys, torch, zeroshard as zs
from functools import partial
mesh = zs.init_mesh(30.0)
engine = zs.Engine(torch.nn.Linear(256, 256), partial(torch.optim.SGD, lr=0.1), zs.Plan(transport="shared"), mesh=mesh)
step = 0
while True:
    engine.backward(engine(torch.randn(2, 256)).sum())
    if step == 5 and mesh.rank == 1:
        os.kill(os.getpid(), 9)
    engine.step()
    step += 1
"""


def test_a_rank_that_is_killed_is_named_and_leaves_nothing(port: int, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    forks = Forks(tmp_path)
    (code, words), (killed, _) = forks.run(SCRIPT, ranks=2, port=port, seconds=60)
    forks.stop()
    assert (code, killed) == (1, -signal.SIGKILL)
    assert "CommError" in words
    assert "rank 1 is gone" in words or "a connection broke" in words
    deadline = time.monotonic() + 60.0  # others on this machine have files there for a while, too
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_older_weights_are_not_shared() -> None:
    zs.Plan(transport="shared", pipeline_parallel=2)
    with pytest.raises(PlanError, match="transport='shared' and schedule='pipedream' do not combine"):
        zs.Plan(transport="shared", pipeline_parallel=zs.Pipeline(2, schedule="pipedream"))
