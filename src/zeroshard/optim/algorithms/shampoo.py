"""Shampoo (Gupta et al., 1802.09568, Algorithm 1), and SOAP (Vyas et al., 2409.11321, Algorithms 3 and 4).

Both keep second moments G G^T [n, n] and G^T G [m, m] of the two sides of a matrix's gradients G [n, m].

Shampoo: with L = eps I + sum G G^T and R = eps I + sum G^T G, a step is L^(-1/4) G R^(-1/4). A vector, and a side
longer than `max_side`, keeps the diagonal of its preconditioner only (section 5 of the paper); a vector's exponent is
-1/2, which is Adagrad's. Roots are computed by an eigendecomposition (`torch.linalg.eigh`) in fp64.

SOAP: Adam in the eigenbasis of averages of these moments. Eigenvectors are found by `torch.linalg.eigh` in the first
step, and after it every `interval` steps by one power iteration and a QR decomposition. A side longer than `max_side`
is not turned; vectors are updated by Adam. The first step turns by the eigenvectors of its own gradient, where the
authors' code takes no step at all.
"""

from collections.abc import Iterable
from typing import Any

import torch

from zeroshard.optim.algorithms.adam_math import adam_direction, adam_update, moments
from zeroshard.optim.algorithms.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    aligned,
    as_matrices,
    check_range,
    checked,
    leading_shape,
    matrix_shape,
    opened,
    state_dtype,
    take_step,
)

SIDES = ("left", "right")  # of a matrix; a vector has the first


def _sides(parameter: torch.Tensor, group: Options) -> tuple[tuple[int, ...], list[tuple[str, int, bool]]]:
    """The leading shape, and for each side its name, its length, and whether its moment is a full matrix."""
    own = matrix_shape(parameter.shape, group["batch_dims"])[1:]
    squares = [len(own) == 2 and side <= group["max_side"] for side in own]
    return leading_shape(parameter.shape, group["batch_dims"]), list(zip(SIDES, own, squares, strict=False))


def side_moment(gradient: torch.Tensor, full: bool) -> torch.Tensor:
    """G G^T of each matrix [B, n, m] as [B, n, n], or its diagonal [B, n]."""
    return gradient @ gradient.mT if full else gradient.square().sum(-1)


def inverse_root(moment: torch.Tensor, order: int) -> torch.Tensor:
    """The inverse `order`-th root of each positive semi-definite matrix [B, n, n], or of each diagonal [B, n].

    Eigenvalues below the rounding error of the largest are raised to it; a matrix of zeros has a root of zeros.
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
        eps: added to the preconditioners at the start.
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
        check_range("beta2", beta2, 0.0 <= beta2 <= 1.0, "from 0 to 1")
        settings = {"beta2": beta2, "interval": interval, "max_side": max_side}
        super().__init__(params, checked(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps, **settings))

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        leading, sides = _sides(parameter, group)
        like = torch.empty(0, dtype=state_dtype(parameter), device=parameter.device)
        state: State = {}
        for name, side, square in sides:
            if square:
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
        names = SIDES[: gradient.dim() - 1]
        for turned, name in enumerate(names):
            update = update.mT if turned else update
            own = gradient if gradient.dim() == 3 else gradient.unsqueeze(-1)
            update = apply_side(self._root(own.mT if turned else own, state, name, 2 * len(names), group), update)
        update = update.mT.contiguous() if len(names) == 2 else update.squeeze(-1)
        if group["momentum"]:
            momentum = as_matrices(state["momentum_buffer"], group["batch_dims"])
            update = momentum.mul_(group["momentum"]).add_(update).clone()
        take_step(parameter, weights, update, group)

    def _root(self, gradient: torch.Tensor, state: State, name: str, order: int, group: Options) -> torch.Tensor:
        """Update the second moment of a side by gradients [B, n, m], and return its inverse root."""
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


def eigenvectors(moment: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Eigenvectors of each symmetric matrix [B, n, n], from the largest eigenvalue to the smallest.

    Args:
        before: eigenvectors of an earlier matrix, for one power iteration (Algorithm 4); None to compute them anew.
    """
    if before is None:
        found: torch.Tensor = torch.linalg.eigh(moment.double())[1].flip(-1).to(moment.dtype)
    else:
        found = torch.linalg.qr(moment @ before)[0]
    return found


def turned(stack: torch.Tensor, bases: list[torch.Tensor | None], back: bool = False) -> torch.Tensor:
    """Q_L^T X Q_R of each matrix [B, n, m], or Q_L X Q_R^T with `back`; None for a side that is not turned."""
    left, right = bases
    if left is not None:
        stack = (left if back else left.mT) @ stack
    if right is not None:
        stack = stack @ (right.mT if back else right)
    return stack


class SOAP(TensorOptimizer):
    """SOAP for matrices, AdamW for vectors, in fp32 for weights in 16 bits.

    Args:
        betas: the decays of Adam's moments; the second is also that of Shampoo's.
        interval: the number of steps between changes of the eigenvectors.
        max_side: a longer side of a matrix is not turned.
        weight_decay: weights lose this share of themselves times the learning rate.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        interval: int = 10,
        max_side: int = 10000,
    ) -> None:
        settings = {"interval": interval, "max_side": max_side}
        super().__init__(params, checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **settings))

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        state = moments(parameter)
        leading, sides = _sides(parameter, group)
        for name, side, square in sides:
            for key in (f"{name}_moment", f"{name}_basis") if square else ():
                shape = (*leading, side, side)
                state[key] = torch.zeros(shape, dtype=state_dtype(parameter), device=parameter.device)
        return state

    def _change(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        weights, gradient = opened(parameter, group["batch_dims"])
        gradient = aligned(gradient)
        first, second = (as_matrices(state[key], group["batch_dims"]) for key in ("exp_avg", "exp_avg_sq"))
        step = state["step"].item()
        if gradient.dim() == 2:
            update = adam_update(gradient, first, second, group["betas"], step, group["eps"])
        else:
            if step == 1:
                self._follow(gradient, state, group)
            bases = [_kept_square(state, f"{name}_basis", len(gradient)) for name in SIDES]
            own = turned(gradient, bases)
            first.lerp_(gradient, 1.0 - group["betas"][0])
            second.mul_(group["betas"][1]).addcmul_(own, own, value=1.0 - group["betas"][1])
            update = adam_direction(turned(first, bases), second, group["betas"], step, group["eps"])
            update = turned(update, bases, back=True)
            if step > 1:
                self._follow(gradient, state, group)
        take_step(parameter, weights, update, group)

    def _follow(self, gradient: torch.Tensor, state: State, group: Options) -> None:
        """Update Shampoo's moments by a gradient, and every `interval` steps the eigenvectors."""
        step = state["step"].item()
        for name, own in zip(SIDES, (gradient, gradient.mT), strict=True):
            moment, basis = (_kept_square(state, f"{name}_{kind}", len(gradient)) for kind in ("moment", "basis"))
            if moment is not None and basis is not None:
                moment.lerp_(own @ own.mT, 1.0 - group["betas"][1])
                if step == 1 or step % group["interval"] == 0:
                    basis.copy_(eigenvectors(moment, None if step == 1 else basis))


def _kept_square(state: State, key: str, stack: int) -> torch.Tensor | None:
    """A state as matrices [B, n, n]; None if it is not kept."""
    kept = state.get(key)
    return None if kept is None else kept.view(stack, *kept.shape[-2:])
