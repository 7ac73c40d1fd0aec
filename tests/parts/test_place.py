"""Parts of tensors as boxes: any run of the elements of any pieces, and whole tensors out of parts."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint.boxes import Box, tiles
from zeroshard.parts.place import DENSE, Partial, Piece, PlaceKind, Split, boxes_of

EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Some pieces along some dimension, which may be empty, out of order and twice the same."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    dimension = draw(st.integers(0, len(shape) - 1))
    ends = st.tuples(st.integers(0, shape[dimension]), st.integers(0, shape[dimension])).map(sorted)
    pieces = draw(st.lists(st.tuples(ends, st.booleans()), max_size=4))
    return Split("axis", shape, dimension, tuple(Piece(*ends, counted) for ends, counted in pieces))


@EXAMPLES
@given(splits(), st.data())
def test_any_run_of_a_part_is_few_boxes_of_the_whole(split: Split, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(split.shape)).view(split.shape)
    part = split.part_of(whole)
    assert tuple(part.shape) == split.part_shape and part.is_contiguous()
    counts = [torch.full((piece.length,), piece.counted) for piece in split.pieces]
    shape = [1] * len(split.shape)
    shape[split.dimension] = -1
    wanted = torch.cat([torch.empty(0, dtype=torch.bool), *counts]).view(shape).expand(part.shape).reshape(-1)
    low, high = sorted((data.draw(st.integers(0, part.numel())), data.draw(st.integers(0, part.numel()))))
    values = part.reshape(-1)[low:high].clone()
    found = list(boxes_of(part.shape, split, low, values))
    seen = torch.zeros(high - low, dtype=torch.bool)
    for (box, inside), counted in found:
        assert torch.equal(inside, whole[box.slices(Box.whole(split.shape))])
        place = torch.as_strided(seen, inside.shape, inside.stride(), inside.storage_offset())
        mine = torch.as_strided(wanted[low:high].clone(), inside.shape, inside.stride(), inside.storage_offset())
        assert not bool(place.any()) and bool((mine == counted).all())
        place.fill_(True)
    assert bool(seen.all())
    assert len(found) <= len(split.pieces) * (2 * len(split.shape) - 1)


def test_a_range_of_three_pieces_of_columns_is_nine_boxes_at_most() -> None:
    """GPT-2's projection [D, 3D] over 4 ranks: each rank's part is three boxes, a slice of it at most nine."""
    width, ranks, slices = 64, 4, 3
    for rank in range(ranks):
        each = width // ranks
        pieces = tuple(Piece(n * width + rank * each, n * width + (rank + 1) * each) for n in range(3))
        split = Split("tensor", (width, 3 * width), 1, pieces)
        numel = math.prod(split.part_shape)
        assert len(list(boxes_of(split.part_shape, split, 0, torch.empty(numel)))) == 3
        cuts = [numel * n // slices for n in range(slices + 1)]
        for low, high in itertools.pairwise(cuts):
            assert 3 <= len(list(boxes_of(split.part_shape, split, low, torch.empty(high - low)))) <= 9


def test_parts_of_all_ranks_tile_the_whole_and_make_it_again() -> None:
    shape, sizes = (5, 7, 2), [(0, 3), (3, 5), (5, 7)]
    whole, again, boxes = torch.rand(shape), torch.empty(shape), []
    for low, high in sizes:
        split = Split("tensor", shape, 1, (Piece(low, high),))
        part = split.part_of(whole)
        split.put(part, again)
        boxes += [each.box for each, _ in boxes_of(part.shape, split, 0, part.reshape(-1))]
    assert torch.equal(whole, again) and tiles(boxes, shape) and len(boxes) == 3


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_a_whole_parameter_is_one_box(shape: tuple[int, ...]) -> None:
    values = torch.rand(math.prod(shape))
    ((found, counted),) = boxes_of(shape, None, 0, values)
    assert found.box == Box.whole(shape) and counted and torch.equal(found.values.reshape(-1), values)


def test_kinds_of_places_are_told_by_their_axis() -> None:
    split = Split("tensor", (2,), 0, (Piece(0, 1, counted=False),))
    kinds = [PlaceKind.of(cut) for cut in (None, split, Partial("tensor"))]
    assert list(map(str, kinds)) == ["", "tensor", "partial tensor"] and kinds[0] is DENSE
    assert not split.counted
