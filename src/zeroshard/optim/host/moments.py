"""8-bit moments: blockwise quantisation with a dynamic-exponent map (Dettmers et al., arXiv 2110.02861, section 1.3).

The map gives a magnitude in (0, 1] a decimal exponent of up to six and what is left of seven bits as a linear fraction:
at exponent i - 6, the middles of 2^i equal parts of [0.1, 1] (2^(i+1) in the unsigned map, which needs no sign).
Signed for the first moment, unsigned for the second. Codes count the values in ascending order.

One code differs from the customary signed map: its lowest value is -1, as its highest is 1, where others have -0.993.
So the largest magnitude of a block is always kept exactly, and encoding what was decoded changes nothing.

No positive second moment becomes zero: it gets the lowest positive value, where zero may be nearer. Else an element
whose gradient is zero afterwards (of a row of an embedding, of an expert without tokens) would move by m/eps, a hundred
million times its first moment.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # elements that share one scale, but where an optimizer says otherwise
DECADES = 7
UPPER = 2**16  # upper halves of fp32 numbers


@dataclass(frozen=True, slots=True)
class CodeMap:
    """An 8-bit map, on one device.

    Attributes:
        values: fp32 [256], ascending: the value of each code.
        bounds: fp32 [256]: the largest number that is nearest to each code's value, the lower of two codes being taken
            in the middle; infinity for the last; 0 for that of zero in the unsigned map.
        lowest: uint8 [65536]: for the upper 16 bits of an fp32 number, the code of the lowest number that has them. No
            two bounds share those bits, so the code of any number with them is this or the next.
        wide: `lowest` in int32, which torch reads many times faster.
    """

    values: Tensor
    bounds: Tensor
    lowest: Tensor
    wide: Tensor

    def codes(self, ratios: Tensor) -> Tensor:
        """The codes [n], in int32, of fp32 numbers [n] in [-1, 1]: the nearest; of two equally near ones the lower."""
        codes = self.wide.index_select(0, (ratios.view(torch.int32) >> 16).bitwise_and_(UPPER - 1))
        return codes.add_(ratios > self.bounds.index_select(0, codes))


@cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a map in ascending order, in fp64."""
    positive = []
    for decade in range(DECADES):
        parts, top = 2 ** (decade + (not signed)), 10.0 ** (decade - DECADES + 1)
        positive += [top * (0.1 + 0.9 * (n + 0.5) / parts) for n in range(parts)]
    negative = [-1.0, *(-value for value in positive[:-1])] if signed else []
    return tuple(sorted([*negative, 0.0, *positive, 1.0]))


def code_map(signed: bool, like: Tensor | None = None) -> CodeMap:
    """The map of the first moment (signed) or of the second, on the device of a tensor; by default the CPU."""
    if like is not None and like.untyped_storage().device.type == "meta":  # in a rehearsal
        values, upper = like.new_empty(2, 256, dtype=torch.float32), like.new_empty(UPPER, dtype=torch.int32)
        return CodeMap(values[0], values[1], upper, upper)
    return map_on(torch.device("cpu") if like is None else like.device, signed)


@cache
def map_on(device: torch.device, signed: bool) -> CodeMap:
    """The map on a device, made once for the process."""
    with torch.device("cpu"):  # whatever the user's default device is
        made = _made(signed)
    return CodeMap(*(getattr(made, name).to(device) for name in CodeMap.__slots__))


def _made(signed: bool) -> CodeMap:
    values = torch.tensor(code_values(signed), dtype=torch.float32)
    middles = (values[:-1].double() + values[1:].double()) / 2
    bounds = middles.float()
    infinity = torch.tensor([torch.inf], dtype=torch.float32)
    bounds = torch.where(bounds.double() > middles, bounds.nextafter(-infinity), bounds)
    bounds = torch.cat([bounds, infinity])
    if not signed:
        bounds[0] = 0.0
    upper = torch.arange(UPPER, dtype=torch.int32) << 16
    least = torch.where(upper < 0, upper | 0xFFFF, upper)  # the lowest negative number has the largest magnitude
    wide = torch.bucketize(least.view(torch.float32), bounds[:-1], out_int32=True)
    return CodeMap(values, bounds, wide.to(torch.uint8), wide)


@dataclass(frozen=True, slots=True)
class Blockwise:
    """A vector [n] as 8-bit codes, each block of 256 elements with one scale: 1 + 4/256 bytes an element.

    Attributes:
        codes: uint8 [n].
        scales: fp32 [ceil(n / block)]: the largest magnitude of each block.
        signed: which map the codes are of.
        block: the elements of a block.
    """

    codes: Tensor
    scales: Tensor
    signed: bool
    block: int = BLOCK

    @classmethod
    def zeros(cls, n: int, signed: bool) -> "Blockwise":
        """A vector of `n` zeros on the CPU."""
        zero = code_values(signed).index(0.0)
        codes = torch.full((n,), zero, dtype=torch.uint8, device="cpu")
        return cls(codes, torch.zeros(-(-n // BLOCK), dtype=torch.float32, device="cpu"), signed)

    @classmethod
    def encode(cls, values: Tensor, signed: bool, block: int = BLOCK) -> "Blockwise":
        """The nearest codes of fp32 values [n]; of two equally near ones the lower. Zeros, and they alone, stay zeros
        in the unsigned map.

        A block that holds a NaN or an infinity has no scale to speak of and decodes to NaN.
        """
        padded = _padded(values, block)
        scales = padded.abs().amax(1) if len(padded) else padded.new_empty(0)
        ratios = padded / scales.masked_fill(scales == 0, 1.0).unsqueeze(1)
        codes = code_map(signed, values).codes(ratios.view(-1))[: values.numel()]
        return cls(codes.to(torch.uint8), scales, signed, block)

    def write(self, values: Tensor) -> None:
        """Encode fp32 values [n] into these tensors."""
        made = Blockwise.encode(values, self.signed, self.block)
        self.codes.copy_(made.codes)
        self.scales.copy_(made.scales)

    def decode(self) -> Tensor:
        """The values, fp32 [n]."""
        codes = _padded(self.codes.int(), self.block)
        values = code_map(self.signed, codes).values.index_select(0, codes.view(-1)).view_as(codes)
        return values.mul_(self.scales.unsqueeze(1)).view(-1)[: self.codes.numel()]

    def part(self, start: int, stop: int) -> "Blockwise":
        """Elements [start, stop), as views; `start` must be a multiple of the block."""
        assert start % self.block == 0, f"a part begins at element {start}, inside a block of {self.block}"
        scales = self.scales[start // self.block : -(-stop // self.block)]
        return Blockwise(self.codes[start:stop], scales, self.signed, self.block)


def _padded(values: Tensor, block: int) -> Tensor:
    """Values [n] as blocks [ceil(n / block), block], the last filled up with zeros."""
    missing = -values.numel() % block
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, block)
