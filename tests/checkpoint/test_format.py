"""What is in a checkpoint folder, read by json and safetensors alone, and back by ranges."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint.faults import COPIES, SHAPES, content, expected, pieces_of, save, save_as, values_of
from safetensors import safe_open

from zeroshard.checkpoint import (
    FORMAT,
    MANIFEST,
    CheckpointDisk,
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
    with pytest.raises(CheckpointError, match=r"'x' is torch.complex128, which safetensors files do not hold"):
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
