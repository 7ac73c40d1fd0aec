"""Model FLOPs: matrix products that one step needs, however it is run (PaLM, 2204.02311, appendix B)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import ModelError, ZeroshardError
from zeroshard.planner.predict.copies import zeroed_copy
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.planner.predict.shallow import quiet
from zeroshard.planner.predict.torch_internals import fakes


def model_flops(model: nn.Module, *inputs: Any, **named: Any) -> int:
    """FLOPs of the matrix products, convolutions and attentions of one forward and backward of a model.

    A product of [m, k] and [k, n] has 2 m k n. Frozen parameters have no gradient of their own.

    Nothing is computed: a copy without values runs on inputs without values, of any size. Attention counts its whole
    square of positions, causal or not. Recomputation by the plan does not count, that of the model's own code does.

    Args:
        model: before an engine is made from it; on the meta device or any other.
        inputs, named: arguments of its forward, of the shapes of one step.

    Raises:
        ModelError: the forward depends on values of tensors, or its output has no gradient.
        PlanError: the model cannot be copied.
    """
    counted: list[int] = []
    ends: list[torch.Tensor] = []

    def hear(flops: int, *_: Any) -> None:
        counted.append(flops)

    try:
        with fakes(), quiet(), Tracker(hear, answers=True), sdpa_kernel(SDPBackend.MATH):
            given = tree_map(_without_values, (inputs, named))
            output = zeroed_copy(model, "cpu")(*given[0], **given[1])
            leaves = (leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor))
            ends += (leaf for leaf in leaves if leaf.requires_grad)
            torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
    except ZeroshardError:
        raise
    except Exception as error:
        raise ModelError(
            f"The FLOPs of {type(model).__name__} cannot be counted without values ({type(error).__name__}: {error}); "
            f"count those of a run by torch.utils.flop_counter.FlopCounterMode."
        ) from error
    if not ends:
        raise ModelError(f"The output of {type(model).__name__} has no gradient; count a model that trains.")
    return sum(counted)


def sequence_flops(model: nn.Module, batch: Callable[[int], Mapping[str, Any]], length: int) -> tuple[int, int]:
    """Model FLOPs of one row of `length` tokens: with whole squares in attention, and with causal halves of them.

    FLOPs of a row are a length + b length²; counts at two lengths give b, the part of attention.

    Args:
        batch: the named arguments of one row of so many tokens.

    Raises:
        ModelError, PlanError: as `model_flops`.
    """
    whole = model_flops(model, **batch(length))
    if length < 2:
        return whole, whole
    short = length // 2
    square = (whole / length - model_flops(model, **batch(short)) / short) / (length - short)
    return whole, whole - round(max(0.0, square) * length**2 / 2)


def _without_values(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)


def _plain(output: Any) -> Any:
    """An output of transformers as the table that it is."""
    return dict(output) if isinstance(output, Mapping) else output
