"""What is in a checkpoint folder, read by json and safetensors alone, and back by ranges."""

import gc
import json
import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.faults import COPIES, SHAPES, content, expected, order, pieces_of, save, save_as, values_of
from safetensors import safe_open

from zeroshard.checkpoint import (
    FORMAT,
    MANIFEST,
    CheckpointDisk,
    Fetched,
    Notes,
    Reader,
    Slot,
    Snapshot,
    TensorPiece,
    WriteOrder,
    write,
    write_tensors,
)
from zeroshard.checkpoint.stream import BLOCK, CODES, in_order
from zeroshard.checkpoint.writer import ALWAYS
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError
from zeroshard.memory.ledger import Category, Ledger


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_holds_what_was_saved(tmp_path: Path, ranks: int) -> None:
    path = save_as(ranks, tmp_path, 5)
    assert content(path) == expected(5, ranks)
    shards = [f"rank-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, *shards]
    assert list(Reader(path).problems()) == []
    facts = json.loads((path / MANIFEST).read_bytes())
    assert (facts["format"], facts["step"], facts["ranks"], facts["extra"]) == (FORMAT, 5, ranks, {"seen": 5})


def test_any_range_of_any_rank_count(tmp_path: Path) -> None:
    """Every range of a tensor that three ranks wrote."""
    reader = Reader(save_as(3, tmp_path, 5))
    whole = values_of("weight:a", 5).reshape(-1)
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            into = torch.empty(stop - start, dtype=torch.float64)
            reader.read("weight:a", into, start)
            assert into.tolist() == whole[start:stop].tolist()
    with pytest.raises(CheckpointError, match=r"20 of the 21 elements of 'weight:a\[0:3,0:7\]' from 1; it is not"):
        reader.read("weight:a", torch.empty(21), 1)
    with pytest.raises(CheckpointError, match="holds no tensor 'weight:b'"):
        reader.read("weight:b", torch.empty(1), 0)
    assert reader.shape("weight:a") == (3, 7) and reader.shape("weight:none") == (0, 2)
    assert reader.shape("weight:b") is None
    assert sorted(reader.names("weight")) == ["a", "half", "none"] and sorted(reader.kinds("a")) == [
        "exp_avg",
        "weight",
    ]
    assert torch.equal(reader.whole("buffer:seen", 7), values_of("buffer:seen", 5))


def test_tensors_of_several_blocks(tmp_path: Path) -> None:
    """One byte more than two blocks: three digests, and only the blocks that are asked for are read."""
    values = torch.arange(2 * BLOCK + 1).to(torch.uint8)
    piece = TensorPiece.whole("weight:w", values)
    facts = {"step": 1, "optimizer": {}, "extra": {}}
    write(WriteOrder(tmp_path / "c", "t", [piece], facts, lambda all_facts: all_facts[0]), Mesh(), Notes(Mesh(), "t"))
    entry = json.loads((tmp_path / "c" / MANIFEST).read_bytes())["tensors"]["weight:w"]
    assert len(entry["chunks"][0][3]) == 3
    file = tmp_path / "c" / "rank-00000-of-00001.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1  # in the last block
    file.write_bytes(damaged)
    into = torch.empty(2 * BLOCK, dtype=torch.uint8)
    Reader(tmp_path / "c").read("weight:w", into, 0)
    assert torch.equal(into, values[:-1])
    with pytest.raises(CheckpointError, match=rf"damaged in 'weight:w' \(elements {2 * BLOCK} to {2 * BLOCK + 1} of"):
        Reader(tmp_path / "c").read("weight:w", into[:2], 2 * BLOCK - 1)
    assert list(Reader(tmp_path / "c").problems(sample=True)) == []
    assert len(list(Reader(tmp_path / "c").problems())) == 1


@pytest.mark.parametrize("dtype", sorted(CODES, key=str), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library reads what is written, bit for bit, beside tensors of other sizes."""
    slots = [Slot("x", dtype, (2, 3)), Slot("none", dtype, (0,)), Slot("byte", torch.uint8, (1,))]
    slots.sort(key=lambda slot: in_order(slot.dtype))
    numbers = torch.arange(6 * dtype.itemsize).to(torch.uint8) % (2 if dtype == torch.bool else 100)
    values = {"x": numbers.view(dtype).view(2, 3), "none": torch.empty(0, dtype=dtype), "byte": torch.ones(1).byte()}
    write_tensors(CheckpointDisk(), tmp_path / "f", slots, (values[slot.key] for slot in slots), {"format": "pt"})
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for key, value in values.items():
            found = file.get_tensor(key)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert torch.equal(found.view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_a_dtype_that_files_do_not_hold(tmp_path: Path) -> None:
    values = torch.zeros(1, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match=r"'x' is torch.complex128, which safetensors .* complex64"):
        write_tensors(CheckpointDisk(), tmp_path / "f", [Slot("x", values.dtype, (1,))], [values])


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    files = [sorted(save(tmp_path / name, 3).iterdir()) for name in ("a", "b")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_bytes_on_disk_are_those_of_the_tensors_and_little_more(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    tensors = sum(values_of(name, 1).nbytes for name in (*SHAPES, *COPIES))
    shard = next(path.glob("*.safetensors"))
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    assert shard.stat().st_size == 8 + header + tensors
    assert (8 + header) % 8 == 0


def test_a_snapshot_is_a_copy_in_buffers_that_stay() -> None:
    ledger = Ledger()
    snapshot, values = Snapshot(ledger), torch.arange(6.0).view(2, 3)
    account = ledger.account(Category.BUFFERS, "host")
    first = snapshot.take(
        [TensorPiece.whole("weight:w", values), *pieces_of("weight:v", (6,), 0, values.view(-1)[::2])]
    )
    values.zero_()
    assert [piece.values.tolist() for piece in first] == [[0, 1, 2, 3, 4, 5], [0, 2, 4]]
    assert account.current == 36
    again = snapshot.take([TensorPiece.whole("weight:w", values)])
    assert again[0].values is first[0].values and again[0].values.tolist() == [0] * 6
    assert account.current == 24 and account.peak == 36


def test_pieces_without_room_for_a_copy_stay_as_they_are() -> None:
    ledger = Ledger()
    snapshot, large = Snapshot(ledger), torch.arange(2.0 * ALWAYS)
    pieces = [TensorPiece.whole(name, values) for name, values in (("a", large), ("b", large[:2]), ("c", large))]
    first, tiny, last = snapshot.take(pieces, room=large.nbytes + 8)
    assert first.lasting and tiny.lasting and not last.lasting and last is pieces[2]
    assert ledger.account(Category.BUFFERS, "host").current == large.nbytes + 8
    assert [piece.lasting for piece in snapshot.take(pieces, room=0)] == [True, True, False]  # in the same buffers
    assert all(piece.lasting for piece in snapshot.take(pieces, room=large.nbytes))
    assert ledger.account(Category.BUFFERS, "host").current == 2 * large.nbytes + 8


@pytest.mark.parametrize("room", [0, 1000 * ALWAYS])
def test_fetched_values_are_in_memory_one_part_at_a_time(room: int, tmp_path: Path) -> None:
    fetched, made, reads = Fetched(), list[weakref.ref[torch.Tensor]](), list[int]()

    def read(part: int) -> list[torch.Tensor]:
        gc.collect()
        assert sum(each() is not None for each in made) <= 1  # the last piece of the part before, while it is written
        values = [torch.full((ALWAYS,), 10.0 * part + number) for number in range(3)]
        made.extend(map(weakref.ref, values))
        reads.append(part)
        return values

    stand_ins = [TensorPiece.whole("", torch.zeros(()).expand(ALWAYS))] * 3
    pieces = [
        replace(piece, name=f"weight:{part}.{number}")
        for part in range(4)
        for number, piece in enumerate(fetched.pieces(part, stand_ins, partial(read, part)))
    ]
    assert not reads and {piece.values.untyped_storage().nbytes() for piece in pieces} == {4}
    step = order(tmp_path, 5, CheckpointDisk())
    step.pieces = Snapshot(Ledger()).take(pieces, room)
    assert {piece.lasting for piece in step.pieces} == {room > 0} and reads == [0, 1, 2, 3] * (room > 0)
    write(step, Mesh(), Notes(Mesh(), "t"))
    assert reads == [0, 1, 2, 3]
    reader = Reader(step.path)
    assert [reader.whole(piece.name)[0] for piece in pieces] == [10 * p + n for p in range(4) for n in range(3)]


def test_training_waits_for_pieces_that_are_no_copies_alone(tmp_path: Path) -> None:
    class Gate(CheckpointDisk):
        """A disk that stops in the middle of the file."""

        def __init__(self) -> None:
            self.written, self.go = [], threading.Event()

        def write(self, file: Any, content: Any) -> None:
            self.written.append(len(content))
            if len(self.written) == 3:  # the header, then the piece that is no copy, then the next
                self.go.wait(60)
            super().write(file, content)

    gate = Gate()
    pieces = [TensorPiece.whole(name, torch.ones(size)) for name, size in (("weight:y", 5), ("weight:z", 7))]
    pieces[0] = replace(pieces[0], lasting=True)
    half = order(tmp_path, 5, gate)
    half.pieces = pieces
    thread = threading.Thread(target=write, args=(half, Mesh(), Notes(Mesh(), "t")))
    thread.start()
    assert half.written.wait(60) and gate.written[1:] in ([28], [28, 20])
    gate.go.set()
    thread.join()
    assert half.path.is_dir()


def test_a_file_that_fails_lets_training_go_on(tmp_path: Path) -> None:
    pieces = [TensorPiece.whole("x", torch.zeros(1, dtype=torch.complex128))]
    torn = WriteOrder(tmp_path / "c", "t", pieces, {"step": 0}, lambda facts: facts[0])
    with pytest.raises(CheckpointError, match="complex128"):
        write(torn, Mesh(), Notes(Mesh(), "t"))
    assert torn.written.is_set()
