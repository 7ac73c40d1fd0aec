"""Whatever is not as it was written is found, and named; and a disk that fails stops no training."""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint.faults import broken, content, remade, save, save_as
from engine.models import OPTIMIZERS, batch, build

import zeroshard as zs
from zeroshard.checkpoint import MANIFEST, CheckpointDisk, Reader, committed, name_of
from zeroshard.errors import CheckpointError, CheckpointWarning, DamagedError
from zeroshard.memory.ledger import Category

FLIPS = 200


def tensor_at(file: Path, offset: int) -> str | None:
    """The key of the tensor that holds a byte of a safetensors file, by its header; None for the header."""
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8:start])
    places = {key: entry["data_offsets"] for key, entry in table.items()}
    return next((key for key, (a, b) in places.items() if a <= offset - start < b), None)


def test_every_bit_that_flips_is_found_and_named(tmp_path: Path) -> None:
    path = save_as(2, tmp_path, 3)
    files = sorted(path.iterdir())
    places = [(file, bit) for file in files for bit in range(8 * file.stat().st_size)]
    flipped = set()
    for file, bit in random.Random(0).sample(places, FLIPS):
        good = file.read_bytes()
        tensor = None if file.name == MANIFEST else tensor_at(file, bit // 8)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        try:
            problems = list(Reader(path).problems())
        except DamagedError as error:
            problems = [str(error)]
        assert len(problems) == 1 and str(file) in problems[0], (file.name, bit, problems)
        if tensor is not None:
            assert f"damaged in '{tensor.partition('[')[0]}'" in problems[0]
        flipped.add((file.name, tensor is not None))
        file.write_bytes(good)
    assert flipped == {(files[0].name, False), *((file.name, there) for file in files[1:] for there in (False, True))}
    assert list(Reader(path).problems()) == []


def cut(path: Path) -> None:
    os.truncate(path / "rank-00001-of-00002.safetensors", 100)


def other_step(path: Path) -> None:
    shutil.copy(save_as(2, path.parent / "other", 4) / MANIFEST, path)


def other_ranks(path: Path) -> None:
    shutil.copy(save_as(3, path.parent / "other", 3) / MANIFEST, path)


WRONG: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "truncated": (cut, DamagedError, r"rank-00001-of-00002.safetensors has 100 bytes and [\d,]+ were written"),
    "missing": (lambda path: (path / "rank-00001-of-00002.safetensors").unlink(), DamagedError, "No such file"),
    "extra": (lambda path: (path / "rank-00002-of-00003.safetensors").touch(), DamagedError, "is not in the manifest"),
    "other step": (other_step, DamagedError, "is damaged in '"),
    "other ranks": (other_ranks, DamagedError, "rank-00000-of-00003.safetensors cannot be read"),
    "ranks": (lambda path: remade(path, lambda t: t.update(ranks=3)), DamagedError, "2 files of 3 ranks"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), CheckpointError, f"has no {MANIFEST}"),
    "older": (
        lambda path: (path / MANIFEST).write_text('{"format": 1, "step": 3}'),
        CheckpointError,
        "format 1, .* 2 and 3;",
    ),
    "newer": (lambda path: remade(path, lambda t: t.update(format=4)), CheckpointError, "format 4, .* reads 2 and 3;"),
    "empty": (lambda path: (path / MANIFEST).write_bytes(b""), DamagedError, "is damaged"),
    "a pipe": (
        lambda path: [
            (path / "rank-00001-of-00002.safetensors").unlink(),
            os.mkfifo(path / "rank-00001-of-00002.safetensors"),
        ],
        DamagedError,
        "has 0 bytes and",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, what: str) -> None:
    change, kind, words = WRONG[what]
    path = save_as(2, tmp_path, 3)
    change(path)

    def read() -> None:
        for problem in Reader(path).problems():
            raise DamagedError(problem)

    with pytest.raises(kind, match=words) as caught:
        read()
    assert type(caught.value) is kind and str(path) in str(caught.value)


def test_a_folder_that_goes_while_it_is_read(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path, 1))
    shutil.rmtree(reader.path)
    assert [problem.partition(" cannot")[0] for problem in reader.problems()] == [
        str(reader.path / "rank-00000-of-00001.safetensors"),
        str(reader.path),
    ]


def engine_of() -> zs.Engine:
    return zs.Engine(build("Tied"), OPTIMIZERS["adamw"], zs.Plan(zero=0), mesh=zs.Mesh())


def train(engine: zs.Engine, steps: int = 1) -> float:
    for _ in range(steps):
        loss = engine.train_step((batch(engine.steps, 0, 1), engine.steps)).loss
    return float(loss)


def test_the_engine_loads_nothing_that_is_damaged(tmp_path: Path) -> None:
    engine = engine_of()
    train(engine, 2)
    engine.save(tmp_path / "c", wait=True)
    after = train(engine, 2)
    shard = tmp_path / "c" / "rank-00000-of-00001.safetensors"
    for file, offset in ((shard, -1), (shard, 20), (shard, -4000), (tmp_path / "c" / MANIFEST, 300)):
        good = file.read_bytes()
        bad = bytearray(good)
        bad[offset] ^= 4
        file.write_bytes(bad)
        with pytest.raises(DamagedError, match=file.name):
            engine.load(tmp_path / "c")
        file.write_bytes(good)
    engine.load(tmp_path / "c")
    assert engine.steps == 2 and train(engine, 2) == after


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fails(engine: zs.Engine, path: Path, words: str) -> None:
    """A checkpoint that cannot be written is a warning in a later step, and there is nothing of it."""
    before = content(path.parent / name_of(1)) if (path.parent / name_of(1)).exists() else None
    names = sorted(path.parent.glob("*"))
    saving = engine.save(path, keep=2)
    saving.join()
    with pytest.warns(CheckpointWarning, match=words):
        train(engine)
    train(engine)  # and is said once
    assert sorted(path.parent.glob("*")) == names
    if before is not None:
        assert content(path.parent / name_of(1)) == before


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    engine = engine_of()
    train(engine)
    engine.save(tmp_path / name_of(1), wait=True)
    with small_files(20_000):
        fails(engine, tmp_path / name_of(2), r"was not written: OSError: \[Errno 27\] File too large")
    engine.save(tmp_path / name_of(3), wait=True)
    assert list(Reader(tmp_path / name_of(3)).problems()) == []


def test_a_full_or_read_only_file_system_is_a_warning(tmpfs: Path) -> None:
    engine = engine_of()
    train(engine)
    engine.save(tmpfs / name_of(1), wait=True)
    fails(engine, tmpfs / name_of(2), r"was not written: OSError: \[Errno 28\] No space left on device")
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    with pytest.raises(CheckpointError, match=r"was not written: OSError: \[Errno 30\] Read-only file system"):
        engine.save(tmpfs / name_of(2))
    train(engine)
    subprocess.run(["mount", "-o", "remount,rw,size=1m", tmpfs], check=True)
    engine.save(tmpfs / name_of(2), wait=True)
    assert [step for step, _ in committed(tmpfs)] == [1, 2]


def test_a_folder_that_vanishes_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, folder = engine_of(), tmp_path / "c"

    def vanish(disk: CheckpointDisk, operation: str, path: Path) -> None:
        if operation == "sync":
            shutil.rmtree(folder)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDisk, "reached", vanish)
        fails(engine, folder / name_of(2), r"was not written: FileNotFoundError: \[Errno 2\] No such file or directory")
    engine.save(folder / name_of(3), wait=True)
    assert list(Reader(folder / name_of(3)).problems()) == []


def test_a_failure_that_the_next_save_meets_first_is_a_warning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    with monkeypatch.context() as patch:
        patch.setattr(
            CheckpointDisk, "reached", lambda disk, operation, path: broken() if operation == "write" else None
        )
        engine.save(tmp_path / name_of(1)).join()
    with pytest.warns(CheckpointWarning, match="Input/output error"):
        engine.save(tmp_path / name_of(2), wait=True)
    assert [path.name for path in tmp_path.iterdir()] == [name_of(2)]


def test_nothing_stays_open(tmp_path: Path) -> None:
    """Neither files nor maps, of checkpoints written, read and found damaged."""

    def open_now() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum(str(tmp_path) in line for line in maps)

    path, before = save(tmp_path, 1), open_now()
    for step in range(2, 6):
        assert list(Reader(save(tmp_path, step)).problems()) == []
    os.truncate(path.with_name(name_of(5)) / "rank-00000-of-00001.safetensors", 9)
    assert list(Reader(path.with_name(name_of(5))).problems())
    assert open_now() == before


def test_a_slow_disk_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on, one checkpoint is under way at a time, and one copy of the states is kept."""
    go, tokens, most = threading.Event(), set[str](), [0]

    def wait(disk: CheckpointDisk, operation: str, path: Path) -> None:
        if operation == "write":
            assert go.wait(60)
        if operation == "create":
            tokens.add(path.parent.name)
        if operation == "rename":
            tokens.remove(path.name)
        most[0] = max(most[0], len(tokens))

    monkeypatch.setattr(CheckpointDisk, "reached", wait)
    engine, plain = engine_of(), engine_of()
    train(engine, 2), train(plain, 2)
    before = engine.state_dict()
    first = engine.save(tmp_path / name_of(1))
    held = engine.ledger.account(Category.BUFFERS, "host")
    snapshot = held.current
    assert train(engine, 3) == train(plain, 3) and not first.done
    threading.Timer(0.2, go.set).start()
    second = engine.save(tmp_path / name_of(2))  # which waits for the first
    assert first.done and go.is_set()
    second.wait()
    assert (held.current, held.peak, most) == (snapshot, snapshot, [1])
    tensors = [part for parts in content(tmp_path / name_of(1)).values() for part in parts]
    assert snapshot == sum(len(values) for _, _, values in tensors)
    again = engine_of()
    again.load(tmp_path / name_of(1))
    assert all(torch.equal(value, before[key]) for key, value in again.state_dict().items())
    again.load(tmp_path / name_of(2))
    assert train(again, 2) == train(plain, 2) == train(engine, 2)


def test_a_path_below_a_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory: .*; remove the cause, or choose another path\.$"):
        engine_of().save(tmp_path / "file" / "c")
