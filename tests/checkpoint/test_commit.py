"""A checkpoint is there whole or not at all, wherever its writing is cut off, on any rank."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.faults import (
    KEEP,
    STEPS,
    Faulty,
    Kill,
    Powered,
    broken,
    check,
    content,
    expected,
    killed,
    operations,
    order,
    pieces_of,
    save,
)
from pool import Pool
from selection import by_default

from zeroshard.checkpoint import (
    Meeting,
    Notes,
    Reader,
    Saving,
    TensorPiece,
    WriteOrder,
    clear,
    committed,
    name_of,
    put_aside,
    write,
)
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: these tests end no machine."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def points(dry: Path, below: Path = Path("c")) -> list[tuple[int, int, bool]]:
    """(step, number, whether retention's) of every operation of every save into a folder that is not there at first."""
    found = []
    for step in range(1, STEPS + 1):
        (dry / str(step)).mkdir(parents=True)
        log = operations(dry / str(step) / below, step)
        there = len(log) - log[::-1].index("sync folder")  # from here on it is committed
        found += [(step, at, at >= there) for at in range(len(log))]
    return found


def test_every_kind_of_operation_is_reached(quick: None, tmp_path: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    counts = Counter(operations(tmp_path / "a" / "b", STEPS))
    assert counts == {
        **{"make folder": 1, "create": 2, "write": 7, "flush": 2, "sync": 2},
        **{"sync folder": 2, "rename": 2, "remove": 1},
    }
    assert [step for step, _ in committed(tmp_path / "a" / "b")] == [STEPS - 1, STEPS]


def test_a_kill_anywhere_leaves_this_checkpoint_or_the_one_before(quick: None, tmp_path: Path) -> None:
    seen = set()
    for step, at, retention in points(tmp_path / "dry"):
        (tmp_path / f"{step}-{at}").mkdir()
        folder = tmp_path / f"{step}-{at}" / "c"
        for before in range(1, step):
            save(folder, before)
        with pytest.raises(Kill):
            save(folder, step, Faulty(at))
        seen.add((step, check(folder, step)))
        assert (step, step) in seen or not retention
    assert seen == {(step, newest) for step in range(1, STEPS + 1) for newest in (step - 1, step)}


def test_a_real_kill_anywhere(tmp_path: Path) -> None:
    """SIGKILL, in one process that is forked for each operation."""
    script = "import sys; from pathlib import Path; from checkpoint.faults import *; kill_for_real(Path(sys.argv[1]))"
    place = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, env=place, text=True)
    assert done.returncode == 0, done.stderr
    newest = json.loads(done.stdout)
    assert newest == sorted(newest) and set(newest) == {2, 3}


@pytest.mark.parametrize("names", ["durable", "live"])
def test_a_loss_of_power_anywhere_leaves_this_checkpoint_or_the_one_before(
    quick: None, tmp_path: Path, names: str
) -> None:
    """All that was not synced is lost; or all names are there, but of files only what was synced."""
    below = Path("runs", "one", "checkpoints")  # nothing of which is there before the first save
    seen = set()
    ends = [(step, None) for step in range(1, STEPS + 1)]  # the power goes right after the save
    for step, at in [*((step, at) for step, at, _ in points(tmp_path / "dry", below)), *ends]:
        root, left = tmp_path / f"{step}-{at}", tmp_path / f"{step}-{at}-left"
        root.mkdir()
        disk = Powered(root)
        for before in range(1, step):
            save(root / below, before, disk)
        disk.at = None if at is None else len(disk.log) + at
        if at is None:
            save(root / below, step, disk)
        else:
            with pytest.raises(Kill):
                save(root / below, step, disk)
        disk.leave(left, names)
        newest = check(left / below, step) if (left / below).exists() else 0
        assert newest == step or (at is not None and newest == step - 1)
        seen.add((step, newest))
    assert seen == {(step, newest) for step in range(1, STEPS + 1) for newest in (step - 1, step)}


def test_a_disk_that_fails_anywhere(quick: None, tmp_path: Path) -> None:
    """Either the save says so and there is nothing of it, or it went well; what was there before is untouched."""
    for step, at, retention in points(tmp_path / "dry"):
        (tmp_path / f"{step}-{at}").mkdir()
        folder = tmp_path / f"{step}-{at}" / "c"
        for before in range(1, step):
            save(folder, before)
        earlier = [path for _, path in committed(folder)]
        disk = Faulty(at, broken)
        if retention:
            save(folder, step, disk)
            assert (folder / name_of(step)).is_dir()
        else:
            with pytest.raises(CheckpointError, match=r"was not written: OSError: \[Errno 5\] Input/output error"):
                save(folder, step, disk)
            assert sorted(folder.iterdir()) == earlier if folder.exists() else not earlier
        check(folder, step)


class NoJson:
    """What JSON cannot hold."""


def save_together(folder: Path, disks: list[Faulty], timeout: float = 20.0) -> list[str]:
    """Two ranks save, each in its thread, with a store between them; what each is told."""
    store, failures = dist.HashStore(), dist.HashStore()
    savings = []
    for rank, disk in enumerate(disks):
        mesh = Mesh(rank, 2, store=store, failures=failures, timeout=timeout)
        savings.append(saving_of(order(folder, 1, disk, rank, 2), mesh))
    told = []
    for saving in savings:
        try:
            saving.wait()
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
    return told


def saving_of(work: WriteOrder, mesh: Mesh) -> Saving:
    """One rank's part, on its way."""
    work.token = "token"
    work.path.parent.mkdir(exist_ok=True)
    saving = Saving(work.path, lambda: write(work, mesh, Notes(mesh, "token")))
    saving.start()
    return saving


def test_a_saving_prints_its_path_and_its_state(tmp_path: Path) -> None:
    gate = threading.Event()
    saving = Saving(tmp_path / "a", lambda: gate.wait(20) and None)
    saving.start()
    assert repr(saving) == f"Saving(path='{tmp_path}/a', being written)"
    gate.set()
    saving.join()
    assert repr(saving).endswith("/a', complete)")


@pytest.mark.parametrize("culprit", by_default([0, 1], 0))
def test_whatever_happens_to_one_rank_all_learn_it(quick: None, tmp_path: Path, culprit: int) -> None:
    dry = [Faulty(), Faulty()]
    assert save_together(tmp_path / "dry", dry) == ["", ""]
    assert content(tmp_path / "dry" / name_of(1)) == expected(1, ranks=2)
    for at, operation in enumerate(dry[culprit].log):
        for fault in (broken, killed):
            folder = tmp_path / f"{at}-{fault.__name__}"
            disks = [Faulty(at if rank == culprit else None, fault) for rank in range(2)]
            told = save_together(folder, disks, 20.0 if fault is broken else 0.1)
            there = [path for _, path in committed(folder)]
            assert all(not list(Reader(path).problems()) and content(path) == expected(1, 2) for path in there)
            if fault is broken:
                assert "Input/output error" in told[0] and told[0] == told[1], operation
                assert list(folder.iterdir()) == []
            else:
                assert "Kill()" in told.pop(culprit) and "was silent for 0.1 s" in told[0], operation
                clear(folder)
                assert list(folder.iterdir()) == there
                assert len(there) == (culprit == 0 and operation == "sync folder" and at == len(dry[0].log) - 1)


def test_a_rank_may_be_slow_while_training_goes_on(quick: None, tmp_path: Path) -> None:
    """And from when training waits for it, no slower than any collective."""
    go = threading.Event()
    folder, store = tmp_path / "c", dist.HashStore()
    slow = Faulty(3, lambda: None if go.wait(20) else broken())
    fast, late = (
        saving_of(order(folder, 1, disk, rank, 2), Mesh(rank, 2, store=store, failures=dist.HashStore(), timeout=0.1))
        for rank, disk in enumerate([Faulty(), slow])
    )
    time.sleep(0.4)  # several times the timeout
    assert not fast.done and not late.done
    with pytest.raises(CheckpointError, match=r"another rank was silent for 0.1 s\. Earlier ones are as they were"):
        fast.wait()
    go.set()
    with pytest.raises(CheckpointError, match=r"another rank was silent"):
        late.wait()
    assert list(folder.iterdir()) == []


def test_an_error_of_another_kind_is_told_too(tmp_path: Path) -> None:
    folder, store = tmp_path / "c", dist.HashStore()
    parts = [order(folder, 1, None, rank, 2) for rank in range(2)]
    parts[1].facts["optimizer"] = NoJson()
    meshes = [Mesh(rank, 2, store=store, failures=dist.HashStore(), timeout=20.0) for rank in range(2)]
    for saving in [saving_of(part, mesh) for part, mesh in zip(parts, meshes, strict=True)]:
        with pytest.raises(CheckpointError, match="TypeError: Object of type NoJson is not JSON serializable"):
            saving.wait()
    assert list(folder.iterdir()) == []


def together(mesh: Mesh, folder: str) -> str:
    """Ranks that wait for each other, of which rank 1 cannot write."""
    work = order(Path(folder), 1, Faulty(2, broken) if mesh.rank else None, mesh.rank, mesh.ranks)
    work.token = "token"
    with pytest.raises(CheckpointError) as caught:
        write(work, mesh, Meeting(Comm(mesh), "step 1"))
    return str(caught.value)


def test_ranks_that_wait_for_each_other_learn_it_too(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(together, 2, str(tmp_path))
    assert first == second and "Input/output error" in first
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_back_is_withdrawn_and_nothing_is_removed(tmp_path: Path) -> None:
    for step in range(1, KEEP + 1):
        save(tmp_path, step)

    class Lying(Faulty):
        """Flips a bit of the shard between its digest and the disk."""

        def write(self, file: Any, content: bytes | memoryview) -> None:
            if len(self.log) == 3:
                content = bytes([content[0] ^ 1]) + bytes(content[1:])
            super().write(file, content)

    with pytest.raises(CheckpointError, match=r"was not written: .*damaged in 'buffer:seen'"):
        save(tmp_path, KEEP + 1, Lying())
    assert [step for step, _ in committed(tmp_path)] == list(range(1, KEEP + 1))
    assert len(list(tmp_path.iterdir())) == KEEP


def test_pieces_that_are_not_the_whole_are_no_checkpoint(tmp_path: Path) -> None:
    for change, words in {"gap": "are not the whole of it", "shape": "another shape or dtype"}.items():
        work = replace(order(tmp_path, 1), keep=None)
        if change == "gap":
            del work.pieces[0]
            work.pieces += pieces_of("weight:a", (3, 7), 1, torch.zeros(20))
        else:
            work.pieces.append(TensorPiece.whole("weight:a", torch.zeros(21)))
        with pytest.raises(CheckpointError, match=words):
            write(work, Mesh(), Notes(Mesh(), "alone"))
    assert list(tmp_path.iterdir()) == []


def test_never_overwritten_and_put_aside(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists already, and checkpoints are never overwritten"):
        save(tmp_path, 1)
    assert content(path) == expected(1)
    assert [put_aside(path).name, put_aside(save(tmp_path, 1)).name] == ["step-00000001.bad", "step-00000001.bad-1"]
    assert committed(tmp_path) == []
    clear(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # nothing that was put aside is removed


def test_the_one_just_written_stays_whatever_its_step(tmp_path: Path) -> None:
    """After going back, later steps may be there already."""
    for step in (7, 8, 3):
        save(tmp_path, step)
    assert [step for step, _ in committed(tmp_path)] == [3, 8]
