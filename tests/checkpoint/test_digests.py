"""Digests of boxes add up to those of whole tensors, and any change of an element changes them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.digests import FACTOR, MODULUS, WIDTH, digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64]


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2**31, shape, generator=generator).to(torch.int32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_that_of_the_definition(dtype: torch.dtype) -> None:
    values = filled((3, 5), dtype)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    plain = values.real.contiguous().view(torch.int32) if values.is_complex() else values.view(bits)
    wanted = sum(int(b) * pow(FACTOR, i, MODULUS) for i, b in enumerate(plain.flatten())) % MODULUS
    assert digest(values, Box.whole((3, 5)), (3, 5)) == wanted


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_boxes_add_up(shape: list[int], data: st.DataObject) -> None:
    size = tuple(shape)
    values, total = filled(size), 0
    cuts = [sorted({0, data.draw(st.integers(0, n)), n}) for n in size]
    ranges = [[(a, b) for a, b in itertools.pairwise(c)] for c in cuts]
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for axis in ranges:
        boxes = [(*box, piece) for box in boxes for piece in axis]
    for pieces in boxes:
        box = Box(tuple(a for a, _ in pieces), tuple(b - a for a, b in pieces))
        inside = values[tuple(slice(a, b) for a, b in pieces)]
        total += digest(inside, box, size)
    assert total % MODULUS == digest(values, Box.whole(size), size)


def test_long_runs_and_a_changed_bit() -> None:
    shape = (2, WIDTH + 37)
    values = filled(shape)
    whole = digest(values, Box.whole(shape), shape)
    halves = [digest(values[:, a:b], Box((0, a), (2, b - a)), shape) for a, b in ((0, 1000), (1000, shape[1]))]
    assert sum(halves) % MODULUS == whole
    values[1, WIDTH + 3] = -values[1, WIDTH + 3]
    assert digest(values, Box.whole(shape), shape) != whole
