"""States of the host Adam in their layouts, and the numbers of one step.

8-bit moments are quantised by blocks with a dynamic-exponent map (Dettmers et al., 2110.02861, section 1.3). Of seven
bits, a magnitude in (0, 1] has a decimal exponent of up to six, and the rest as a linear fraction: at exponent i - 6,
the middles of 2^i equal parts of [0.1, 1] (2^(i+1) in the unsigned map, which needs no sign). The first moment is
signed, the second unsigned. Codes number the values in ascending order.
One code differs from the customary signed map: its lowest value is -1, not -0.993. So the largest magnitude of a block
is always exact, and encoding decoded values changes nothing.
No positive second moment becomes zero: it gets the lowest positive value, even if zero is nearer. Otherwise an element
with zero gradients afterwards (of a row of an embedding, of an expert without tokens) would move by m/eps, a hundred
million times its first moment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

BLOCK = 256  # elements that share one scale, unless an optimizer sets another number
DECADES = 7
UPPER = 2**16  # upper halves of fp32 numbers


@dataclass(frozen=True, slots=True)
class CodeMap:
    """An 8-bit map, on one device.

    Attributes:
        values: fp32 [256], ascending: the value of each code.
        bounds: fp32 [256]: the largest number with each code; a number midway between two values gets the lower code;
            infinity for the last; 0 for the code of zero in the unsigned map.
        lowest: uint8 [65536]: for the upper 16 bits of an fp32 number, the code of the lowest number with these bits.
            No two bounds share those bits, so the code of any such number is this or the next.
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
    with torch.device("cpu"):  # not the user's default device
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
        signed: whether the codes are of the signed map.
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

        A block with a NaN or an infinity decodes to NaN.
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
    """Values [n] as blocks [ceil(n / block), block], the last padded with zeros."""
    missing = -values.numel() % block
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, block)


CANONICAL_NAN = 0x7FC00000


OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")  # not supported by the host Adam


@dataclass(frozen=True, slots=True)
class Scalars:
    """The scalars of one step of Adam: Python floats, in fp64.

    The last two contain the bias corrections (Kingma and Ba, 1412.6980, end of section 2), so that an element takes one
    division: the parameter changes by -step_size · m / (√v + eps).

    Attributes:
        decay: 1 - lr · weight decay, the factor on the parameters of decoupled weight decay; 1 without it.
        l2: the weight decay added to the gradient; 0 if it is decoupled.
        beta1: the decay of the first moment.
        weight1: 1 - beta1.
        beta2: the decay of the second moment.
        weight2: 1 - beta2.
        eps: the group's, times the square root of the second moment's bias correction.
        step_size: lr times that root, over the first moment's bias correction.
    """

    decay: float
    l2: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    eps: float
    step_size: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, decoupled: bool) -> "Scalars":
        """The scalars of an optimizer's parameter group.

        Args:
            group: with "lr", "betas", "eps" and "weight_decay".
            step: the number of this step; the first is 1.
            decoupled: weight decay as in AdamW, not as in Adam.
        """
        lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], float(group["weight_decay"])
        root = (1 - beta2**step) ** 0.5
        return cls(
            decay=1 - lr * decay if decoupled else 1.0,
            l2=0.0 if decoupled else decay,
            beta1=beta1,
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            eps=float(group["eps"]) * root,
            step_size=lr * root / (1 - beta1**step),
        )


def stands_for(optimizer: Optimizer) -> str | None:
    """Why the host Adam cannot update for `optimizer`, as text; None if it can."""
    if type(optimizer) not in (Adam, AdamW):
        return f"the optimizer is {type(optimizer).__name__}, neither torch.optim.Adam nor torch.optim.AdamW itself"
    return next(filter(None, map(lacks, optimizer.param_groups)), None)


def lacks(group: Mapping[str, Any]) -> str | None:
    """The option of a parameter group that excludes the host Adam, as text; None if there is none."""
    for option in OPTIONS:
        if group[option]:
            return f"the optimizer has {option}=True"
    if group["foreach"] is not None:
        return f"the optimizer has foreach={group['foreach']}, which asks for a loop of torch's"
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        return "the optimizer's betas are tensors"
    return None


@dataclass(frozen=True, slots=True)
class StateSplit:
    """fp32 values [n] as bf16 and a remainder: (hi << 16) + lo are their bits, exactly.

    `hi` is the working parameter: the value rounded to the nearest bf16. Ties round away from zero, where torch rounds
    to even; the 16-bit remainder requires it.

    Attributes:
        hi: bf16 [n].
        lo: int16 [n].
    """

    hi: Tensor
    lo: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "StateSplit":
        """Split fp32 values [n]. A NaN becomes the canonical NaN, which does not round to a number."""
        parts = cls(torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16))
        parts.write(values)
        return parts

    def write(self, values: Tensor) -> None:
        """Split fp32 values [n] into these tensors."""
        bits = torch.where(values.isnan(), CANONICAL_NAN, values.view(torch.int32))
        self.hi.view(torch.int16).copy_((bits + 0x8000) >> 16)
        self.lo.copy_(bits)

    def values(self) -> Tensor:
        """The fp32 values [n]."""
        bits = self.hi.view(torch.int16).int() << 16
        return bits.add_(self.lo).view(torch.float32)


Moment = Tensor | Blockwise


@dataclass(slots=True)
class HostStates:
    """Adam's states of n elements, on the CPU, contiguous.

    Attributes:
        master: the parameters in fp32 [n], or split.
        exp_avg: the first moment: fp32 or bf16 [n], or 8-bit and signed.
        exp_avg_sq: the second: fp32 or bf16 [n], or 8-bit and unsigned.
    """

    master: Tensor | StateSplit
    exp_avg: Moment
    exp_avg_sq: Moment

    def part(self, start: int, stop: int) -> "HostStates":
        """Elements [start, stop), as views; `start` must be a multiple of 256 where a moment has 8 bits."""
        master = self.master
        if isinstance(master, StateSplit):
            cut: Tensor | StateSplit = StateSplit(master.hi[start:stop], master.lo[start:stop])
        else:
            cut = master[start:stop]
        return HostStates(cut, _part(self.exp_avg, start, stop), _part(self.exp_avg_sq, start, stop))


def _part(moment: Moment, start: int, stop: int) -> Moment:
    return moment[start:stop] if isinstance(moment, Tensor) else moment.part(start, stop)
