"""Penalties that modules add to the loss by themselves, such as the balance losses of routers.

A penalty hangs on an activation of its module: its gradient is there when the activation's is, whatever the model
returns, wherever it is cut into stages, and in every kind of recomputation. It weighs what its microbatch weighs in the
mean of the step, so over a step penalties are averaged over microbatches and data ranks, with the counts of tokens
where losses are sums. The engine says the weight, times the loss scale; in a plain `loss.backward()` it is 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MARK = "adds_penalty"  # an attribute, true of modules that may call `penalised`


class _Weight:
    """The weight of penalties in the backward under way: one for the process, since autograd has threads of its own."""

    def __init__(self) -> None:
        self.value: float | Tensor = 1.0


_weight = _Weight()


@contextmanager
def weighing(weight: float | Tensor) -> Iterator[None]:
    """Backwards inside give penalties this weight."""
    before, _weight.value = _weight.value, weight
    try:
        yield
    finally:
        _weight.value = before


def penalised(activation: Tensor, penalty: Tensor) -> Tensor:
    """The activation, whose backward adds the gradient of the penalty, a scalar, at the weight of the microbatch."""
    result: Tensor = _Penalised.apply(activation, penalty)  # type: ignore[no-untyped-call]
    return result


def adds_penalties(model: nn.Module) -> bool:
    """Whether a module of the model may add penalties."""
    return any(getattr(module, MARK, False) for module in model.modules())


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, penalty: Tensor) -> Tensor:
        ctx.penalty = penalty.dtype, penalty.device
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.penalty
        return gradients[0], torch.ones((), dtype=dtype, device=device) * _weight.value
