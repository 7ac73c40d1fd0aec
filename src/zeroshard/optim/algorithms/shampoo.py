"""Shampoo (Gupta et al., 1802.09568, Algorithm 1): gradients between inverse fourth roots of their second moments.

For matrices, L = eps I + sum G G^T and R = eps I + sum G^T G, and a step is L^(-1/4) G R^(-1/4). A vector, and a side
that is longer than `max_side`, keeps the diagonal of its preconditioner only (section 5 of the paper); a vector's
exponent is -1/2, which is Adagrad's. Roots are computed by an eigendecomposition (`torch.linalg.eigh`) in fp64.
"""

from collections.abc import Iterable
from typing import Any

import torch

from zeroshard.optim.algorithms.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    aligned,
    as_matrices,
    check_range,
    leading_shape,
    matrix_shape,
    opened,
    put_back,
    state_dtype,
)


def side_moment(gradient: torch.Tensor, full: bool) -> torch.Tensor:
    """G G^T of each matrix [B, n, m] as [B, n, n], or its diagonal [B, n]."""
    return gradient @ gradient.mT if full else gradient.square().sum(-1)


def inverse_root(moment: torch.Tensor, order: int) -> torch.Tensor:
    """The inverse root of an order of each positive semi-definite matrix [B, n, n], or of each diagonal [B, n].

    Eigenvalues below the rounding of the largest are taken for that; a matrix of zeros has a root of zeros.
    """
    if moment.dim() == 2:
        return torch.where(moment > 0.0, moment.pow(-1.0 / order), 0.0)
    values, vectors = torch.linalg.eigh(moment.double())
    least = values[..., -1:].clamp(min=0.0) * torch.finfo(moment.dtype).eps * moment.shape[-1]
    values = torch.maximum(values, least)
    powers = torch.where(values > 0.0, values.pow(-1.0 / order), 0.0)
    root: torch.Tensor = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    return root.to(moment.dtype)


def apply_side(root: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A root [B, n, n], or a diagonal [B, n], times a stack of matrices [B, n, m]."""
    return root @ gradient if root.dim() == 3 else root.unsqueeze(-1) * gradient


class Shampoo(TensorOptimizer):
    """Shampoo for matrices, Adagrad for vectors, in fp32 for weights in 16 bits.

    Args:
        momentum: the decay of a sum of updates; 0 for none, which keeps no state of full size.
        weight_decay: weights lose this share of themselves times the learning rate.
        eps: what is added to the preconditioners at the start.
        beta2: 1 for the paper's sums of second moments; below it, their average with this decay.
        interval: the number of steps between computations of the roots.
        max_side: a longer side of a matrix keeps a diagonal.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-4,
        beta2: float = 1.0,
        interval: int = 1,
        max_side: int = 8192,
    ) -> None:
        check_range("lr", lr, lr >= 0.0, "at least 0")
        check_range("momentum", momentum, 0.0 <= momentum < 1.0, "at least 0 and less than 1")
        check_range("weight_decay", weight_decay, weight_decay >= 0.0, "at least 0")
        check_range("eps", eps, eps >= 0.0, "at least 0")
        check_range("beta2", beta2, 0.0 <= beta2 <= 1.0, "from 0 to 1")
        check_range("interval", interval, interval >= 1, "at least 1")
        check_range("max_side", max_side, max_side >= 1, "at least 1")
        defaults = {
            **{"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps, "beta2": beta2},
            **{"interval": interval, "max_side": max_side, "batch_dims": None},
        }
        super().__init__(params, defaults)

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        leading = leading_shape(parameter.shape, group["batch_dims"])
        own = matrix_shape(parameter.shape, group["batch_dims"])[1:]
        like = torch.empty(0, dtype=state_dtype(parameter), device=parameter.device)
        state: State = {}
        for name, side in zip(_names(own), own, strict=True):
            if len(own) == 2 and side <= group["max_side"]:
                start = torch.eye(side, dtype=like.dtype, device=like.device).mul_(group["eps"])
                state[f"{name}_moment"] = start.expand(*leading, side, side).clone()
                state[f"{name}_root"] = like.new_zeros(*leading, side, side)
            else:
                state[f"{name}_moment"] = like.new_full((*leading, side), group["eps"])
        if group["momentum"]:
            state["momentum_buffer"] = like.new_zeros(parameter.shape)
        return state

    def _change(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        weights, gradient = opened(parameter, group["batch_dims"])
        gradient = aligned(gradient)
        update = gradient.unsqueeze(-1) if gradient.dim() == 2 else gradient  # a vector has one side
        names = _names(gradient.shape[1:])
        for turned, name in enumerate(names):
            update = update.mT if turned else update
            own = gradient if gradient.dim() == 3 else gradient.unsqueeze(-1)
            update = apply_side(self._root(own.mT if turned else own, state, name, 2 * len(names), group), update)
        update = update.mT.contiguous() if len(names) == 2 else update.squeeze(-1)
        if group["momentum"]:
            momentum = as_matrices(state["momentum_buffer"], group["batch_dims"])
            update = momentum.mul_(group["momentum"]).add_(update)
        if group["weight_decay"]:
            weights.mul_(1.0 - group["lr"] * group["weight_decay"])
        weights.sub_(update * group["lr"])
        put_back(parameter, weights)

    def _root(self, gradient: torch.Tensor, state: State, name: str, order: int, group: Options) -> torch.Tensor:
        """Change the second moment of a side by gradients [B, n, m], and give its inverse root."""
        kept = f"{name}_root" in state
        shape = (len(gradient), *(gradient.shape[1],) * (2 if kept else 1))
        moment, beta2 = state[f"{name}_moment"].view(shape), group["beta2"]
        moment.mul_(beta2).add_(side_moment(gradient, kept), alpha=1.0 - beta2 if beta2 < 1.0 else 1.0)
        if not kept:
            return inverse_root(moment, order)
        root: torch.Tensor = state[f"{name}_root"].view(shape)
        if (state["step"].item() - 1) % group["interval"] == 0:
            root.copy_(inverse_root(moment, order))
        return root


def _names(own: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the states of each side of a matrix, or of a vector."""
    return ("left", "right") if len(own) == 2 else ("left",)
