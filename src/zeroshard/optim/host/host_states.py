"""Data of an update of the host Adam: optimizer states in their layouts, and the numbers of one step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zeroshard.optim.host.moments import Blockwise

CANONICAL_NAN = 0x7FC00000


OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")  # that the host Adam does not have


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers that one step of Adam needs besides tensors: Python floats, in fp64.

    The bias corrections are in the last two (Kingma and Ba, 1412.6980, end of section 2), so that an element takes one
    division: the parameter loses step_size · m / (√v + eps).

    Attributes:
        decay: 1 - lr · weight decay, by which decoupled weight decay multiplies the parameters; 1 without it.
        l2: the weight decay that is added to the gradient; 0 where it is decoupled.
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
        """Those of an optimizer's parameter group.

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
    """None if the host Adam updates in the place of `optimizer`; else why not, in words."""
    if type(optimizer) not in (Adam, AdamW):
        return f"the optimizer is {type(optimizer).__name__}, neither torch.optim.Adam nor torch.optim.AdamW itself"
    return next(filter(None, map(lacks, optimizer.param_groups)), None)


def lacks(group: Mapping[str, Any]) -> str | None:
    """The option of a parameter group that the host Adam does not have, or that asks for a loop of torch's."""
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

    `hi` is the working parameter: the value rounded to the nearest bf16. On an exact tie it is the one away from zero,
    where torch takes the even one; a remainder of 16 bits leaves no choice.

    Attributes:
        hi: bf16 [n].
        lo: int16 [n].
    """

    hi: Tensor
    lo: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "StateSplit":
        """Split fp32 values [n]. A NaN becomes the one with the plainest bits, lest it round to a number."""
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
