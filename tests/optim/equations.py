"""Literal loops of papers' equations over numbers in fp64, and steps of optimizers over given gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Make = Callable[[list[Any]], torch.optim.Optimizer]


def gradients_of(shapes: Sequence[tuple[int, ...]], steps: int, size: float = 1.0, seed: int = 0) -> list[list[Tensor]]:
    """Gradients in fp64 [steps][parameters], which drift and grow so that no state is steady."""
    draws = torch.Generator().manual_seed(seed)
    means = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    return [
        [
            size * (1 + 0.2 * step) * (0.5 * mean + torch.randn(mean.shape, generator=draws, dtype=torch.float64))
            for mean in means
        ]
        for step in range(steps)
    ]


def weights_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    """Weights drawn in fp64 and rounded to a dtype."""
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype) for shape in shapes]


def run(make: Make, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The weights after the steps of an optimizer that is given copies of them as parameters."""
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = make(list(parameters))
    take_steps(optimizer, parameters, gradients)
    return [p.detach() for p in parameters]


def take_steps(optimizer: Any, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    """One step for each list of gradients, in the dtype of the parameters."""
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def state_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """Bytes of an optimizer's states of a parameter, the step count aside."""
    states = optimizer.state[parameter].items()
    return sum(value.nbytes for key, value in states if key != "step" and isinstance(value, Tensor))
