"""Copies of models and batches for rehearsals, where values do not matter."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.step.batch import Microbatches
from zeroshard.units.hooks import tensors_of


def zeroed_copy(model: nn.Module, device: str | None = None) -> nn.Module:
    """A copy of the model with zeros for its tensors; under `fakes` they have no values and take no memory.

    Args:
        device: of all its tensors; by default "meta" for those on it, and "cpu" for others.

    Raises:
        PlanError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        own = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for tensor in (value for value in own if isinstance(value, torch.Tensor)):
            memo[id(tensor)] = memo.get(id(tensor), _like(tensor, device))
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise PlanError(
            f"The model cannot be copied to be rehearsed ({type(error).__name__}: {error}); plan before it is "
            f"compiled or wrapped, or give one that copy.deepcopy copies."
        ) from error


def batch_of(make: Callable[[int], Any], rows: int, count: int) -> Any:
    """A batch; in `count` microbatches where its tensors have unlike first dimensions, as a run needs them."""
    part = make(rows // count)
    if count == 1 or len({tensor.shape[:1] for tensor in tensors_of(part)}) == 1:
        return part if count == 1 else make(rows)
    return Microbatches([part, *(make(rows // count) for _ in range(count - 1))])


def _like(tensor: torch.Tensor, device: str | None) -> torch.Tensor:
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device or ("meta" if tensor.is_meta else "cpu"))
    if not isinstance(tensor, nn.Parameter):
        return zeros
    parameter = nn.Parameter(zeros, requires_grad=tensor.requires_grad)
    own = vars(parameter).keys()  # of a tensor without values its device
    vars(parameter).update({name: value for name, value in vars(tensor).items() if name not in own})
    return parameter
