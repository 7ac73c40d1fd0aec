"""What an optimizer that needs whole tensors cannot have: parameters of which ranks hold parts by layer."""

from collections.abc import Sequence

import torch

from zeroshard.errors import PlanError
from zeroshard.optim import StateLayout
from zeroshard.optim.tensor_optimizer import leading_shape
from zeroshard.parts.place import Cuts, Split


def refuse_split(optimizer: torch.optim.Optimizer, layout: StateLayout, cuts: Cuts) -> None:
    """Refuse an optimizer over whole tensors where a technique has cut a matrix among ranks.

    None of those are matrices that one rank updates for all that hold parts ([Note: joined matrices]); parameters that
    one rank holds whole and others not at all, as experts that are modules; and stacks of experts of which each rank
    holds some, for an optimizer that takes every matrix or vector of them alone.

    Raises:
        PlanError: with the reason why it needs whole tensors.
    """
    if layout.whole is None:
        return
    _refuse_empty(optimizer, layout, [cut for cut in cuts.values() if isinstance(cut, Split) and cut.by_rank])
    stacks = getattr(optimizer, "whole_tensors", False)
    options = {p: group.get("batch_dims") for group in optimizer.param_groups for p in group["params"]}
    split = [
        cut for p, cut in cuts.items()
        if isinstance(cut, Split) and p in options and not cut.by_rank
        and cut.part_shape[cut.dimension] not in (0, cut.shape[cut.dimension])
        and not (stacks and cut.dimension == 0 and leading_shape(torch.Size(cut.shape), options[p]))
    ]  # fmt: skip
    if not split:
        return
    setting = {"tensor": "tensor_parallel", "experts": "expert_parallel"}.get(split[0].axis, split[0].axis)
    others = (
        f"an optimizer that treats every element alone, such as AdamW; or zero=1, 2 or 3 and pipeline_parallel in the "
        f"place of {setting}"
    )
    way_out = f"Use {others}."
    if stacks and split[0].dimension == 0:
        way_out = (
            f"If the first dimension counts experts, give such parameters a group of their own with batch_dims=1, so "
            f"that each expert has statistics of its own. Or use {others}."
        )
    raise PlanError(
        f"{type(optimizer).__name__} and {setting} do not combine: {layout.whole} And the plan splits {len(split)} "
        f"parameters inside of layers over the axis '{split[0].axis}' (the first of shape {split[0].shape}), so that "
        f"no rank has the whole of them. {way_out}"
    )


def _refuse_empty(optimizer: torch.optim.Optimizer, layout: StateLayout, splits: Sequence[Split]) -> None:
    """Refuse a matrix of which some rank has nothing: all that hold parts of it take part in its update."""
    name = type(optimizer).__name__
    empty = next((cut for cut in splits if not all(cut.by_rank)), None)
    if empty is not None:
        raise PlanError(
            f"{name} and tensor_parallel={len(empty.by_rank)} do not combine here: {layout.whole} And of a parameter "
            f"of shape {empty.shape} that is split over dimension {empty.dimension} some rank has no element, so that "
            f"it could not take part in the update. Use a smaller tensor_parallel, or an optimizer that treats every "
            f"element alone, such as AdamW."
        )
