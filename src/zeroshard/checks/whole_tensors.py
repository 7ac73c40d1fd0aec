"""What an optimizer that needs whole tensors cannot have: parameters of which ranks hold parts by layer."""

from collections.abc import Mapping

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.optim import StateLayout
from zeroshard.parts.place import Partial, Split


def refuse_split(
    optimizer: torch.optim.Optimizer, layout: StateLayout, cuts: Mapping[nn.Parameter, Split | Partial]
) -> None:
    """Refuse an optimizer over whole tensors where a technique has cut a matrix among ranks.

    A stack of experts of which each rank holds some is none of those, for an optimizer that takes every matrix of a
    stack alone.

    Raises:
        PlanError: with the reason why it needs whole tensors.
    """
    stacks = getattr(optimizer, "whole_tensors", False)
    split = [
        cut for cut in cuts.values()
        if isinstance(cut, Split) and not (stacks and cut.dimension == 0 and len(cut.shape) == 3)
    ]  # fmt: skip
    if layout.whole is not None and split:
        raise PlanError(
            f"{layout.whole} And the plan splits {len(split)} parameters inside of layers over the axis "
            f"'{split[0].axis}' (the first of shape {split[0].shape}), so that no rank has the whole of them. Use an "
            f"optimizer that treats every element alone, such as AdamW; or ZeRO and stages in the place of that axis."
        )
