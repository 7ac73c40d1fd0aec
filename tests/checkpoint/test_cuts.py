"""Tensors that are written under one cut and read under another: ranges, rows, columns, and ranges of these.

The numbers are checked against numpy's slices. Blocks are a few bytes here, so that most chunks have several.
"""

import contextlib
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint.faults import Desk, pieces_of, raw, read_box, seal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from selection import by_default

from zeroshard.checkpoint import MANIFEST, Box, Reader, WriteOrder, manifest, reader, stream, write
from zeroshard.checkpoint.boxes import BoxValues
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError

NAME = "weight:w"
BLOCK = 16
Part = tuple[Box, int, int]  # elements [low, high) of a box of the tensor
FACTS = {"step": 1, "optimizer": {}, "extra": {}}
EXAMPLES = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for module in (manifest, reader, stream):
            patches.enter_context(mock.patch.object(module, "BLOCK", BLOCK))
        yield


def split(box: Box, axis: int, ranks: int) -> list[Box]:
    """A box in as many parts along one dimension, some of which may be empty."""
    size, parts = box.shape[axis], []
    for rank in range(ranks):
        low, high = size * rank // ranks, size * (rank + 1) // ranks
        start = (*box.start[:axis], box.start[axis] + low, *box.start[axis + 1 :])
        parts.append(Box(start, (*box.shape[:axis], high - low, *box.shape[axis + 1 :])))
    return parts


def ranges(box: Box, ranks: int) -> list[Part]:
    """A box as ZeRO shares it."""
    return [(box, box.numel * rank // ranks, box.numel * (rank + 1) // ranks) for rank in range(ranks)]


def cuts(shape: tuple[int, ...]) -> dict[str, list[Part]]:
    """Ways to share a tensor out, each as what every rank has."""
    whole = Box.whole(shape)
    found = {"whole": ranges(whole, 1), "ranges": ranges(whole, 3), "many ranges": ranges(whole, 7)}
    for axis in range(len(shape)):
        for ranks in (2, 3):
            parts = split(whole, axis, ranks)
            found[f"{ranks} along {axis}"] = [(part, 0, part.numel) for part in parts]
            found[f"ranges of {ranks} along {axis}"] = [share for part in parts for share in ranges(part, 2)]
    if len(shape) > 1:
        quarters = [part for half in split(whole, 0, 2) for part in split(half, 1, 2)]
        found["ranges of quarters"] = [share for part in quarters for share in ranges(part, 2)]
    return found


def values_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def held(part: Part, values: torch.Tensor) -> torch.Tensor:
    """The elements of a part, by numpy."""
    box, low, high = part
    inside = values.numpy()[box.slices(Box.whole(tuple(values.shape)))]
    return torch.tensor(inside.reshape(-1)[low:high].tolist())


def write_format_3(folder: Path, values: torch.Tensor, parts: list[Part]) -> Path:
    """What ranks with such parts write."""
    desk, shape = Desk(), tuple(values.shape)
    for rank in (*range(1, len(parts)), 0):
        box, low, _ = parts[rank]
        pieces = list(pieces_of(NAME, shape, low, held(parts[rank], values), box))
        if rank or values.numel():
            assert sum(piece.values.numel() for piece in pieces) == held(parts[rank], values).numel()
        order = WriteOrder(folder, "t", pieces, FACTS, lambda everyone: everyone[0])
        write(order, Mesh(rank, len(parts)), desk)
    return folder


def write_format_2(folder: Path, values: torch.Tensor, parts: list[Part]) -> Path:
    """What they wrote in format 2, by hand; the boxes are the whole tensor."""
    folder.mkdir(parents=True)
    files, chunks = {}, []
    for rank, part in enumerate(parts):
        (_, low, high), mine = part, held(part, values)
        file = f"rank-{rank:05d}-of-{len(parts):05d}.safetensors"
        save_file({f"{NAME}[{low}:{high}]": mine}, folder / file)
        content, data = (folder / file).read_bytes(), raw(mine)
        files[file] = [len(content), zlib.crc32(content[: 8 + int.from_bytes(content[:8], "little")])]
        chunks.append([file, low, high, [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]])
    tensors = {NAME: {"shape": list(values.shape), "dtype": "float32", "chunks": chunks}}
    table = {"format": 2, **FACTS, "ranks": len(parts), "files": files, "tensors": tensors}
    seal(folder / MANIFEST, json.dumps(table)[:-1])
    return folder


def check(folder: Path, values: torch.Tensor, parts: list[Part]) -> None:
    """Every part comes back, into a tensor of another dtype."""
    checkpoint = Reader(folder)
    for part in parts:
        box, low, high = part
        into = torch.full((high - low,), -1, dtype=torch.float64)
        read_box(checkpoint, NAME, into, low, box)
        assert into.tolist() == held(part, values).tolist()


SHAPES = [(), (5,), (6, 8), (3, 7), (7, 1), (1, 9), (2, 3, 4), (3, 1, 5), (2, 3, 2, 3), (0, 4), (4, 0), (1, 1, 1)]


@pytest.mark.parametrize("shape", by_default(SHAPES, *SHAPES[:4], (2, 3, 4), *SHAPES[9:]), ids=str)
def test_each_cut_is_read_under_each_other(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = values_of(shape)
    with small_blocks():
        for number, written in enumerate(cuts(shape).values()):
            folder = write_format_3(tmp_path / str(number), values, written)
            assert list(Reader(folder).problems()) == []
            for wanted in cuts(shape).values():
                check(folder, values, wanted)
        for ranks in (1, 2, 5):
            folder = write_format_2(tmp_path / f"format-2-{ranks}", values, ranges(Box.whole(shape), ranks))
            assert list(Reader(folder).problems()) == []
            for wanted in cuts(shape).values():
                check(folder, values, wanted)


@EXAMPLES
@given(st.data())
def test_any_range_of_any_box_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple))
    values, whole = values_of(shape), Box.whole(shape)
    folder = tmp_path_factory.mktemp("any") / "c"
    with small_blocks():
        if data.draw(st.booleans()):
            write_format_2(folder, values, ranges(whole, data.draw(st.integers(1, 4))))
        else:
            write_format_3(folder, values, data.draw(st.sampled_from(list(cuts(shape).values()))))
        for _ in range(5):
            ends = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
            box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
            low, high = sorted((data.draw(st.integers(0, box.numel)), data.draw(st.integers(0, box.numel))))
            check(folder, values, [(box, low, high)])


def test_what_is_not_in_the_box_or_the_tensor_is_refused(tmp_path: Path) -> None:
    checkpoint = Reader(write_format_3(tmp_path / "c", values_of((6, 8)), cuts((6, 8))["ranges"]))
    half = Box((0, 4), (6, 4))
    read_box(checkpoint, NAME, torch.empty(24), 0, half)
    with pytest.raises(CheckpointError, match=r"holds 47 of the 48 elements of 'weight:w\[0:6,0:8\]' from 1;"):
        checkpoint.read(NAME, torch.empty(48), 1)
    for start in (-1, 49):
        with pytest.raises(CheckpointError, match="holds 0 of the 3 elements"):
            checkpoint.read(NAME, torch.empty(3), start)
    for box in (Box((0, 4), (6, 5)), Box((-1, 0), (6, 8)), Box((0,), (6,))):
        with pytest.raises(CheckpointError, match=r"holds 24 of the \d+ elements of 'weight:w\[0:6,4:8\]; \[.*\]'"):
            checkpoint.fill(NAME, [BoxValues(each, torch.empty(each.shape)) for each in (half, box)])


@pytest.mark.parametrize("written", [write_format_2, write_format_3])
def test_blocks_without_a_part_in_the_box_are_not_read(tmp_path: Path, written: object) -> None:
    """Rows of two blocks: the left half of the columns is in every other one."""
    values = values_of((6, 8))
    with small_blocks():
        checkpoint = Reader(written(tmp_path / "c", values, cuts((6, 8))["whole"]))  # type: ignore[operator]
        seen, block = [], Reader._block

        def watched(self: Reader, name: str, chunk: manifest.Chunk, number: int) -> torch.Tensor:
            seen.append(number)
            return block(self, name, chunk, number)

        with mock.patch.object(Reader, "_block", watched):
            into = torch.empty(8)
            read_box(checkpoint, NAME, into, 8, Box((0, 0), (6, 4)))
            checkpoint.read(NAME, into[:0], 0)
    assert seen == [4, 6] and into.tolist() == [16, 17, 18, 19, 24, 25, 26, 27]


def test_boxes_are_views_in_the_order_of_their_range() -> None:
    values = torch.arange(11.0)
    pieces = list(pieces_of(NAME, (4, 10), 3, values, Box((0, 5), (4, 5))))
    assert [str(piece.box) for piece in pieces] == ["0:1,8:10", "1:2,5:10", "2:3,5:9"]
    assert [piece.values.tolist() for piece in pieces] == [[[0, 1]], [[2, 3, 4, 5, 6]], [[7, 8, 9, 10]]]
    assert all(piece.values.untyped_storage().data_ptr() == values.data_ptr() for piece in pieces)
    assert all(piece.shape == (4, 10) for piece in pieces)
    assert list(pieces_of(NAME, (4, 10), 0, values[:0], Box((0, 5), (0, 5)))) == []
    assert [str(piece.box) for piece in pieces_of(NAME, (0, 2), 0, values[:0])] == ["0:0,0:2"]
