"""Numbers in 8 bits by a dynamic map, with one scale for each block of 256 (Dettmers et al., 2110.02861).

A map has 256 values in [-1, 1], or in [0, 1] for numbers that are not negative: zero, one, and in each of seven decades
below one, counted from the smallest, twice as many as in the decade before, in the middles of equal intervals (section
1.3 of the paper). A block's numbers are divided by the largest of them in size, and each gets the nearest value of the
map; of two that are as near, the lower. This is a function of the numbers alone, so the codes are reproducible.
"""

from functools import cache

import torch

DECADES = 7
KEPT_BITS = 17  # of a number in fp32: its sign, its exponent and 8 bits of its fraction
PIECE = 2**13  # entries of the table that are made at a time


@cache
def dynamic_values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a map in increasing order."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        intervals = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade - DECADES + 1)
        middles = [top * (0.1 + 0.9 * (n + 0.5) / intervals) for n in range(intervals)]
        values += middles + ([-value for value in middles] if signed else [])
    return tuple(sorted(values))


def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of a map in increasing order, in fp32."""
    return torch.tensor(dynamic_values(signed), dtype=torch.float32, device="cpu")


class DynamicCode:
    """Encodes and decodes blocks of numbers by one map, on one device.

    The nearest value is found by a table over the leading bits of a number, which gives the code of the least number
    with these bits, and by one comparison with the border after it: two borders never have the same leading bits.

    Attributes:
        values: the map [256].
    """

    def __init__(self, signed: bool, device: torch.device) -> None:
        values = dynamic_map(signed)
        middles = (values[1:].double() + values[:-1].double()).div_(2)
        borders = middles.float()  # rounded down, so that a number is above a border if it is above the middle
        borders = torch.where(borders.double() > middles, borders.nextafter(values[0] - 1.0), borders)
        steps = torch.empty(2**KEPT_BITS, dtype=torch.int32)
        for piece in steps.split(PIECE):  # or temporaries of five times the table would be the peak of small models
            # The least number in size with the same leading bits, which is the largest of those below zero.
            first = piece.storage_offset()
            ends = (torch.arange(first, first + PIECE, dtype=torch.int64) << (32 - KEPT_BITS)).to(torch.int32)
            piece.copy_(torch.bucketize(_least(ends), borders, out_int32=True))
        self.values, self._table = values.to(device), steps.to(device)
        self._borders = torch.cat([borders, borders.new_tensor([torch.inf])]).to(device)

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes [n] of numbers [n] in fp32, in uint8, and the scale of each block [ceil(n/block)]."""
        padded = _padded(numbers, block).view(-1, block)
        scales = padded.abs().amax(1)
        scaled = padded / scales.masked_fill(scales == 0.0, 1.0).unsqueeze(1)
        leading = (scaled.view(torch.int32) >> (32 - KEPT_BITS)).bitwise_and_(2**KEPT_BITS - 1).view(-1)
        codes = self._table.index_select(0, leading)
        codes += scaled.view(-1) > self._borders.index_select(0, codes)
        return codes[: numbers.numel()].to(torch.uint8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
        """The numbers [n] of codes [n] and scales [ceil(n/block)]."""
        numbers = self.values.index_select(0, _padded(codes, block).int()).view(-1, block)
        return numbers.mul_(scales.unsqueeze(1)).view(-1)[: codes.numel()]


def _padded(values: torch.Tensor, block: int) -> torch.Tensor:
    missing = -values.numel() % block
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _least(bits: torch.Tensor) -> torch.Tensor:
    """The least number of those that begin with the leading bits of each."""
    negative = bits < 0
    ends = torch.where(negative, bits | (2 ** (32 - KEPT_BITS) - 1), bits).view(torch.float32)
    return torch.where(ends.isnan(), torch.where(negative, -torch.inf, torch.inf), ends)
