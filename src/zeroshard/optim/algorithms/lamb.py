"""LAMB (You et al., 1904.00962, Algorithm 2): Adam whose step is scaled per layer by a trust ratio.

Each matrix of a stack has its own trust ratio (`optim.algorithms.tensor_optimizer`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from zeroshard.optim.algorithms.adam_math import adam_update, moments
from zeroshard.optim.algorithms.row_reductions import Over, Rounds, RowReduction
from zeroshard.optim.algorithms.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    as_matrices,
    check_range,
    checked,
    opened,
    put_back,
)


def norms(stack: torch.Tensor) -> torch.Tensor:
    """The norm of each matrix [B, 1, 1] or vector [B, 1] of a stack."""
    found: torch.Tensor = torch.linalg.vector_norm(stack, dim=tuple(range(1, stack.dim())), keepdim=True)
    return found


def trust_ratio(size: torch.Tensor, change: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    """phi(|x|)/|u| from the norms of weights and updates; 1 where either norm is 0.

    Args:
        bounds: the least and the largest value of phi(|x|) (section 3).
    """
    return torch.where((size > 0.0) & (change > 0.0), size.clamp(*bounds) / change, 1.0)


class LAMB(TensorOptimizer):
    """LAMB, with the bias corrections of Algorithm 2, in fp32 for weights in 16 bits.

    A parameter group with `adapt=False` takes Adam's plain step, as is usual for norms and biases.

    Args:
        bounds: the least and the largest norm of weights in the trust ratio.
        weight_decay: this share of the weights is added to the update before the trust ratio.

    Raises:
        ValueError: an option is out of its range.
    """

    row_states: ClassVar[tuple[str, ...] | None] = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bounds: tuple[float, float] = (0.0, math.inf),
        adapt: bool = True,
    ) -> None:
        check_range("bounds", bounds, 0.0 <= bounds[0] <= bounds[1], "two numbers in increasing order, of at least 0")
        settings = {"bounds": bounds, "adapt": adapt}
        super().__init__(params, checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **settings))

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        return moments(parameter)

    def reduced_numels(self, shape: torch.Size, group: Options) -> Sequence[int]:
        """The norms of weights and update."""
        return (2,) if group["adapt"] else ()

    def _rounds(self, parameter: torch.Tensor, state: State, group: Options) -> Rounds:
        batch_dims = group["batch_dims"]
        weights, gradient = opened(parameter, batch_dims)
        first, second = (as_matrices(state[key], batch_dims) for key in ("exp_avg", "exp_avg_sq"))
        update = adam_update(gradient, first, second, group["betas"], state["step"].item(), group["eps"])
        if group["weight_decay"]:
            update.add_(weights, alpha=group["weight_decay"])
        rate = group["lr"]
        if group["adapt"]:
            size, change = yield [RowReduction(Over.NORM, norms(each)) for each in (weights, update)]
            rate = rate * trust_ratio(size, change, group["bounds"])
        weights.sub_(update.mul_(rate))
        put_back(parameter, weights)
