"""Boxes of tensors against numpy's slices: cutting a range, intersecting, copying, and telling what tiles a tensor."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint.boxes import Box, copy_common, cut, extent, intersection, one_by_one, tiles

EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True, database=None)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box of a tensor, empty ones included."""
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The flat positions of a box's elements in a tensor."""
    found: list[int] = np.arange(math.prod(shape)).reshape(shape)[box.slices(Box.whole(shape))].reshape(-1).tolist()
    return found


def fewest(positions: list[int], shape: tuple[int, ...]) -> int:
    """The fewest boxes into which consecutive elements can be cut, by trying all."""
    coordinates = [np.unravel_index(position, shape) for position in positions]

    def is_box(low: int, high: int) -> bool:
        hull = [max(axis) - min(axis) + 1 for axis in zip(*coordinates[low:high], strict=True)]
        return math.prod(hull) == high - low

    best = [0]
    for high in range(1, len(positions) + 1):
        best.append(1 + min(best[low] for low in range(high) if is_box(low, high)))
    return best[-1]


@EXAMPLES
@given(st.data())
def test_a_range_is_cut_into_the_fewest_boxes_in_order(data: st.DataObject) -> None:
    """Of a box inside a larger tensor, as a rank's share of it is."""
    shape = data.draw(SHAPES)
    box = data.draw(boxes_in(shape))
    low, high = sorted((data.draw(st.integers(0, box.numel)), data.draw(st.integers(0, box.numel))))
    found = cut(box, low, high)
    wanted = elements(box, shape)[low:high]
    assert [position for part in found for position in elements(part, shape)] == wanted
    assert len(found) == fewest(wanted, shape) <= max(1, 2 * len(shape) - 1)
    assert all(part.numel for part in found)


def test_ranges_of_scalars_and_of_empty_tensors() -> None:
    assert cut(Box((), ()), 0, 1) == [Box((), ())] and cut(Box((), ()), 1, 1) == []
    assert cut(Box.whole((0, 2)), 0, 0) == []
    assert cut(Box.whole((3, 7)), 5, 16) == [Box((0, 5), (1, 2)), Box((1, 0), (1, 7)), Box((2, 0), (1, 2))]
    assert str(Box((0, 5), (1, 2))) == "0:1,5:7" and str(Box((), ())) == ""
    with pytest.raises(AssertionError):
        cut(Box.whole((3, 7)), 5, 22)


@EXAMPLES
@given(st.data())
def test_an_intersection_is_what_both_hold(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    found = intersection(a, b)
    assert (elements(found, shape) if found else []) == sorted({*elements(a, shape)} & {*elements(b, shape)})
    if found:
        places = [elements(a, shape).index(position) for position in elements(found, shape)]
        assert (found.offset(a), found.end(a)) == (places[0], places[-1] + 1)


@EXAMPLES
@given(st.data())
def test_what_two_flat_tensors_have_in_common_is_copied(data: st.DataObject) -> None:
    """A range of one box into a range of another."""
    shape = data.draw(SHAPES)
    ranges = []
    for _ in range(2):
        box = data.draw(boxes_in(shape))
        low, high = sorted((data.draw(st.integers(0, box.numel)), data.draw(st.integers(0, box.numel))))
        ranges.append((cut(box, low, high), elements(box, shape)[low:high]))
    (wanted, into_places), (held, places) = ranges
    into = torch.full((len(into_places),), -1)
    copied = copy_common(one_by_one(wanted, into), torch.tensor(places, dtype=torch.int64), held)
    common = [position for position in places if position in into_places]
    assert into.tolist() == [position if position in common else -1 for position in into_places]
    assert copied == len(common)
    assert [*extent(held, wanted)][:1] == [places.index(position) for position in common[:1]]
    assert [*extent(held, wanted)][-1:] == [places.index(position) for position in common[-1:]]


def partition(data: st.DataObject, box: Box, depth: int = 4) -> list[Box]:
    """Boxes that tile a box, by cutting it in two again and again, along any dimension."""
    axes = [axis for axis, length in enumerate(box.shape) if length > 1]
    if not axes or not depth or data.draw(st.integers(0, 5)) == 0:
        return [box]
    axis = data.draw(st.sampled_from(axes))
    low = data.draw(st.integers(1, box.shape[axis] - 1))
    parts = []
    for start, length in ((0, low), (low, box.shape[axis] - low)):
        starts, lengths = list(box.start), list(box.shape)
        starts[axis], lengths[axis] = starts[axis] + start, length
        parts += partition(data, Box(tuple(starts), tuple(lengths)), depth - 1)
    return parts


@EXAMPLES
@given(st.data())
def test_boxes_tile_a_tensor_if_each_element_is_in_one(data: st.DataObject) -> None:
    """Partitions, and partitions of which some boxes were dropped, doubled, moved or made longer."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = partition(data, Box.whole(shape))
    assert tiles(boxes, shape)
    for _ in range(data.draw(st.integers(0, 3))):
        number = data.draw(st.integers(0, len(boxes) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "other"]))
        if change == "drop" and len(boxes) > 1:
            del boxes[number]
        elif change == "double":
            boxes.append(boxes[number])
        else:
            boxes[number] = data.draw(boxes_in(shape))
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box.slices(Box.whole(shape))] += 1
    assert tiles(boxes, shape) == bool((counts == 1).all())


def test_volumes_that_add_up_are_no_tiling() -> None:
    """One box overlaps another by as much as is missing elsewhere; and one box is there twice for another."""
    assert not tiles([Box((0, 0), (2, 3)), Box((0, 1), (2, 1))], (2, 4))
    assert not tiles([Box((0,), (2,)), Box((0,), (2,))], (4,))
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert not tiles(pinwheel, (3, 3)) and tiles([*pinwheel, Box((1, 1), (1, 1))], (3, 3))
    assert tiles([], (0, 2)) and tiles([Box((0, 0), (0, 2))] * 3, (0, 2)) and not tiles([], (1,))
    assert tiles([Box((), ())], ()) and not tiles([], ()) and not tiles([Box((), ())] * 2, ())


def test_a_hundred_thousand_boxes_are_no_quadratic_work() -> None:
    boxes = [Box((row, low), (1, high - low)) for row in range(1000) for low, high in pairwise(range(0, 301, 3))]
    assert tiles(boxes, (1000, 300))
    assert not tiles([*boxes[:-1], boxes[0]], (1000, 300))
    many = (2,) * 53 + (1,) * 11
    assert tiles([Box.whole(many)], many) and len(cut(Box.whole(many), 1, 2**53 - 1)) == 104
