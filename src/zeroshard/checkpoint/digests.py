"""Digests of tensors that do not depend on their division among ranks, to recognise a base that is read again.

[Note: sums of powers] The digest of a tensor is the sum of b·g^i modulo 2^64 over all its elements: b is the element's
bits as a whole number, i its place in row-major order, and g is odd. So ranks that hold boxes of a tensor add up their
own elements, in any order, and any one changed element changes the sum. It detects accidents, and no forgery.
"""

import math
from functools import cache

import torch
from torch import Tensor

from zeroshard.checkpoint.boxes import Box

FACTOR = 0x5851F42D4C957F2D  # g, 5 modulo 8, so that its powers repeat after 2^62 elements
WIDTH = 2**16  # elements of a run that are multiplied at once
MODULUS = 2**64
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The sum over one box of a tensor, from 0 to 2^64.

    Args:
        values: of the box, in its shape.
        shape: of the whole tensor.
    """
    if not values.numel():
        return 0
    if values.is_complex():
        pairs = torch.view_as_real(values.contiguous())
        real, imaginary = (digest(pairs[..., part], box, shape) for part in (0, 1))
        return (real + FACTOR * imaginary) % MODULUS
    starts, length = _runs(box, shape)
    rows, total = values.reshape(len(starts), length), 0
    many = max(1, WIDTH // length)
    for column in range(0, length, WIDTH):
        width = min(WIDTH, length - column)
        table = _powers(values.device)[:width]
        for row in range(0, len(starts), many):
            part = rows[row : row + many, column : column + width].contiguous()
            sums = (part.view(BITS[part.element_size()]).to(torch.int64) * table).sum(1)
            if len(sums) == 1:
                total += int(sums) * pow(FACTOR, int(starts[row]) + column, MODULUS)
                continue
            total += int((sums * _power(starts[row : row + many] + column).to(sums.device)).sum())
    return total % MODULUS


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[Tensor, int]:
    """The first places of the runs of a box in the flattened tensor, and the length of each."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    whole = len(shape)  # axes from here on are whole in the box
    while whole and box.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    last = max(whole - 1, 0)  # a run covers a range of this axis
    starts = torch.zeros(1, dtype=torch.int64)
    for axis in range(last):
        here = torch.arange(box.start[axis], box.start[axis] + box.shape[axis]) * strides[axis]
        starts = (starts.unsqueeze(-1) + here).reshape(-1)
    first = box.start[last] * strides[last] if shape else 0
    return starts + first, math.prod(box.shape[last:])


@cache
def _powers(device: torch.device) -> Tensor:
    """g^i for i below `WIDTH`; products of int64 wrap around."""
    table = torch.ones(WIDTH, dtype=torch.int64)
    done = 1
    while done < WIDTH:
        table[done : 2 * done] = table[:done] * _signed(pow(FACTOR, done, MODULUS))
        done *= 2
    return table.to(device)


def _power(places: Tensor) -> Tensor:
    """g to the power of each place [n]."""
    found, square = torch.ones_like(places), FACTOR
    for bit in range(int(places.max()).bit_length()):
        found = torch.where((places >> bit) & 1 == 1, found * _signed(square), found)
        square = square * square % MODULUS
    return found


def _signed(number: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return number - MODULUS if number >= MODULUS // 2 else number
