"""Few bits for each element of a group, with a scale for the group.

Integers (ActNN, Chen et al., 2104.14129, section 3): the range of a group of 256 values has 2^b steps, and each value
becomes one of them, rounded up or down at random so that it is unbiased:
q = floor((x - least) / (greatest - least) * (2^b - 1) + u), u uniform in [0, 1).

Scaled fp8 (COAT, Xi et al., 2410.19313, section 4): a group of 128 values is divided by its greatest magnitude over
448, the largest number of e4m3, and rounded to that format.

[Note: non-finite groups] All values of a group with a NaN or an infinity are read back as NaN, so that it shows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.rng.philox import Elements, random_bits

FRACTION = 24  # binary digits of the random numbers
E4M3 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(slots=True)
class Scaled:
    """Codes of groups.

    Attributes:
        codes: packed.
        scales: fp32, the size of a step of each group.
        least: fp32, the value of code 0 of each group; None if it is 0.
    """

    codes: Tensor
    scales: Tensor
    least: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupIntegers:
    """Integers of 2, 4 or 8 bits for a group of values."""

    bits: int
    group: int = 256

    def nbytes(self, numel: int) -> int:
        """Bytes of so many numbers."""
        groups = -(-numel // self.group)
        return groups * (self.group * self.bits // 8 + 8)

    def encode(self, values: Tensor, key: int, number: int) -> Scaled:
        """The codes of fp32 values [n].

        Args:
            key, number: of the random numbers.
        """
        rows = _rows(values, self.group, values[-1:])
        least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        steps = 2**self.bits - 1
        scales = (most - least) / steps
        words = random_bits(key, number, Elements(1, 1, rows.numel()), values.device).view(rows.shape)
        codes = (rows - least) / torch.where(scales == 0, 1, scales) + _fractions(words)
        codes = codes.floor_().nan_to_num_(0.0).clamp_(0, steps).to(torch.uint8)
        per_byte = 8 // self.bits
        packed = codes[:, ::per_byte].clone()
        for part in range(1, per_byte):
            packed |= codes[:, part::per_byte] << part * self.bits
        return Scaled(packed, scales, least)

    def decode(self, found: Scaled, numel: int) -> Tensor:
        """The fp32 values [numel] of codes."""
        assert found.least is not None
        parts = [found.codes >> part & 2**self.bits - 1 for part in range(0, 8, self.bits)]
        values = torch.stack(parts, 2).flatten(1).float()
        return values.mul_(found.scales).add_(found.least).flatten()[:numel]


@dataclass(frozen=True, slots=True)
class GroupFloats:
    """Numbers of e4m3 for a group of values with a scale."""

    group: int = 128

    def nbytes(self, numel: int) -> int:
        """Bytes of so many numbers."""
        return -(-numel // self.group) * (self.group + 4)

    def encode(self, values: Tensor) -> Scaled:
        """The codes of fp32 values [n]."""
        rows = _rows(values, self.group, values.new_zeros(1))
        scales = rows.abs().amax(1, keepdim=True) / E4M3
        codes = (rows / torch.where(scales == 0, 1, scales)).to(torch.float8_e4m3fn)
        return Scaled(codes, scales)

    def decode(self, found: Scaled, numel: int) -> Tensor:
        """The fp32 values [numel] of codes."""
        return found.codes.float().mul_(found.scales).flatten()[:numel]


def _rows(values: Tensor, group: int, filled: Tensor) -> Tensor:
    """Values [n] as groups [rows, group], the last one padded with `filled`."""
    missing = -values.numel() % group
    return torch.cat([values, filled.expand(missing)]).view(-1, group) if missing else values.view(-1, group)


def _fractions(words: Tensor) -> Tensor:
    """Uniform fp32 numbers in [0, 1) from random words."""
    fractions: Tensor = ((words >> 32 - FRACTION) + 2 ** (FRACTION - 1)).float().mul_(2.0**-FRACTION)
    return fractions
