"""The index table tiles the padded buffer, for any shapes and any number of ranks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.units import Entry, Index

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(torch.Size), max_size=6)
RANKS = st.integers(1, 9)
PROPERTY = settings(derandomize=True, deadline=None)


def lay_out(shapes: list[torch.Size], ranks: int) -> Index:
    """An index of parameters named by their number."""
    return Index.of([(str(number), shape) for number, shape in enumerate(shapes)], ranks)


def holders(shapes: list[torch.Size]) -> list[int]:
    """By brute force: the number of the parameter that holds each element."""
    return [number for number, shape in enumerate(shapes) for _ in range(torch.zeros(shape).numel())]


def test_a_typed_example() -> None:
    index = Index.of([("a", torch.Size((2, 3))), ("b", torch.Size(())), ("c", torch.Size((4,)))], ranks=4)
    assert [(e.offset, e.stop, e.numel) for e in index.entries] == [(0, 6, 6), (6, 7, 1), (7, 11, 4)]
    assert index.entries[0] == Entry("a", torch.Size((2, 3)), 0, 6)
    assert (index.numel, index.slice_numel(0), index.padded_numel, index.padding) == (11, 3, 12, 1)
    assert [index.interval(rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert list(index.overlaps(3, 9)) == [(0, 3, 6), (1, 6, 7), (2, 7, 9)]


def test_nothing_at_all() -> None:
    index = Index.of([], ranks=3)
    assert (index.numel, index.padded_numel, index.padding, list(index.overlaps(0, 0))) == (0, 0, 0, [])


@PROPERTY
@given(SHAPES, RANKS)
def test_intervals_tile_the_padded_buffer(shapes: list[torch.Size], ranks: int) -> None:
    index = lay_out(shapes, ranks)
    elements = [element for rank in range(ranks) for element in range(*index.interval(rank))]
    assert elements == list(range(index.padded_numel))
    assert index.numel == len(holders(shapes))
    assert index.padding == index.padded_numel - index.numel
    assert 0 <= index.padding < ranks


@PROPERTY
@given(SHAPES, RANKS)
def test_overlaps_cover_every_element_once(shapes: list[torch.Size], ranks: int) -> None:
    index = lay_out(shapes, ranks)
    covered = [
        (element, number)
        for rank in range(ranks)
        for number, low, high in index.overlaps(*index.interval(rank))
        for element in range(low, high)
    ]
    assert covered == list(enumerate(holders(shapes)))


@PROPERTY
@given(SHAPES, RANKS)
def test_padding_of_the_slices_adds_up(shapes: list[torch.Size], ranks: int) -> None:
    index = lay_out(shapes, ranks)
    for rank in range(ranks):
        start, stop = index.interval(rank)
        assert index.padding_in(start, stop) == sum(element >= index.numel for element in range(start, stop))
    assert sum(index.padding_in(*index.interval(rank)) for rank in range(ranks)) == index.padding


@PROPERTY
@given(SHAPES.filter(lambda shapes: bool(shapes)), RANKS)
def test_number_at_finds_the_holder(shapes: list[torch.Size], ranks: int) -> None:
    index, expected = lay_out(shapes, ranks), holders(shapes)
    assert [index.number_at(element) for element in range(index.numel)] == expected
    assert all(index.number_at(element) == len(shapes) - 1 for element in range(index.numel, index.padded_numel))
