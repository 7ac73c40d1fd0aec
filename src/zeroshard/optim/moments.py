"""8-bit moments: blockwise quantisation with a dynamic-exponent map (Dettmers et al., arXiv 2110.02861, section 2).

The map gives a magnitude in (0, 1] a decimal exponent of up to six and what is left of seven bits as a linear fraction:
at exponent i - 6, the middles of 2^i equal parts of [0.1, 1] (2^(i+1) in the unsigned map, which needs no sign).
Signed for the first moment, unsigned for the second. Codes count the values in ascending order.

One code differs from the customary signed map: its lowest value is -1, as its highest is 1, where others have -0.993.
So the largest magnitude of a block is always kept exactly, and encoding what was decoded changes nothing.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # elements that share one scale


@dataclass(frozen=True, slots=True)
class CodeMap:
    """An 8-bit map.

    Attributes:
        values: fp32 [256], ascending: the value of each code.
        bounds: fp32 [256]: the largest number that is nearest to each code's value, the lower of two codes being taken
            in the middle; infinity for the last.
        lowest: uint8 [65536]: for the upper 16 bits of an fp32 number, the code of the lowest number that has them. No
            two bounds share those bits, so the code of any number with them is this or the next.
    """

    values: Tensor
    bounds: Tensor
    lowest: Tensor


@cache
def code_map(signed: bool) -> CodeMap:
    """The map of the first moment (signed) or of the second."""
    with torch.device("cpu"):  # whatever the user's default device is
        return _made(signed)


def _made(signed: bool) -> CodeMap:
    magnitudes = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        magnitudes.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6))
    positive = torch.cat(magnitudes)
    negative = torch.cat([-positive[:-1], torch.tensor([-1.0], dtype=torch.float64)]) if signed else positive[:0]
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    values = torch.cat([negative, positive, ends]).sort().values.float()
    middles = (values[:-1].double() + values[1:].double()) / 2
    bounds = middles.float()
    infinity = torch.tensor([torch.inf], dtype=torch.float32)
    bounds = torch.where(bounds.double() > middles, bounds.nextafter(-infinity), bounds)
    bounds = torch.cat([bounds, infinity])
    upper = torch.arange(2**16, dtype=torch.int64)
    bits = (upper << 16) + torch.where(
        upper >= 2**15, 0xFFFF, 0
    )  # the lowest negative number has the largest magnitude
    lowest = torch.bucketize((bits - (bits >= 2**31) * 2**32).int().view(torch.float32), bounds[:-1])
    return CodeMap(values, bounds, lowest.to(torch.uint8))


@dataclass(frozen=True, slots=True)
class Blockwise:
    """A vector [n] as 8-bit codes, each block of 256 elements with one scale: 1 + 4/256 bytes an element.

    Attributes:
        codes: uint8 [n].
        scales: fp32 [ceil(n / 256)]: the largest magnitude of each block.
        signed: which map the codes are of.
    """

    codes: Tensor
    scales: Tensor
    signed: bool

    @classmethod
    def zeros(cls, n: int, signed: bool) -> "Blockwise":
        """A vector of `n` zeros."""
        return cls.encode(torch.zeros(n, dtype=torch.float32, device="cpu"), signed)

    @classmethod
    def encode(cls, values: Tensor, signed: bool) -> "Blockwise":
        """The nearest codes of fp32 values [n]; of two equally near ones the lower. Zeros stay zeros.

        A block that holds a NaN or an infinity has no scale to speak of and decodes to NaN.
        """
        blocks = (values.numel() + BLOCK - 1) // BLOCK
        padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - values.numel())).view(blocks, BLOCK)
        scales = padded.abs().amax(1) if blocks else padded.new_empty(0)
        ratios = padded / torch.where(scales == 0, 1.0, scales)[:, None]
        codes = torch.bucketize(ratios, code_map(signed).bounds[:-1], out_int32=True)
        return cls(codes.to(torch.uint8).flatten()[: values.numel()].contiguous(), scales, signed)

    def decode(self) -> Tensor:
        """The values, fp32 [n]."""
        values = code_map(self.signed).values[self.codes.int()]
        return values.mul_(self.scales.repeat_interleave(BLOCK)[: values.numel()])
