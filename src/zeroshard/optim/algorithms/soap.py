"""SOAP (Vyas et al., 2409.11321, Algorithms 3 and 4): Adam in the eigenbasis of Shampoo's second moments.

A matrix [n, m] keeps averages of G G^T [n, n] and G^T G [m, m], their eigenvectors, and Adam's moments. Eigenvectors
are found by `torch.linalg.eigh` in the first step, and after it every `interval` steps by one power iteration and a QR
decomposition. A side longer than `max_side` is not turned; vectors are updated by Adam. The first step turns by the
eigenvectors of its own gradient, where the authors' code takes no step at all.
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
    leading_shape,
    matrix_shape,
    opened,
    put_back,
    state_dtype,
)

SIDES = ("left", "right")


def eigenvectors(moment: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Eigenvectors of each symmetric matrix [B, n, n], from the largest eigenvalue to the smallest.

    Args:
        before: those of an earlier matrix, which are improved once (Algorithm 4); None to compute them anew.
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
        check_range("lr", lr, lr >= 0.0, "at least 0")
        check_range("betas", betas, len(betas) == 2 and all(0.0 <= b < 1.0 for b in betas), "two numbers in [0, 1)")
        check_range("eps", eps, eps >= 0.0, "at least 0")
        check_range("weight_decay", weight_decay, weight_decay >= 0.0, "at least 0")
        check_range("interval", interval, interval >= 1, "at least 1")
        check_range("max_side", max_side, max_side >= 1, "at least 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "interval": interval}
        super().__init__(params, {**defaults, "max_side": max_side, "batch_dims": None})

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        state = moments(parameter)
        leading = leading_shape(parameter.shape, group["batch_dims"])
        own = matrix_shape(parameter.shape, group["batch_dims"])[1:]
        for name, side in zip(SIDES, own, strict=False):
            if len(own) == 2 and side <= group["max_side"]:
                for kind in ("moment", "basis"):
                    shape = (*leading, side, side)
                    state[f"{name}_{kind}"] = torch.zeros(shape, dtype=state_dtype(parameter), device=parameter.device)
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
            bases = [_square(state, f"{name}_basis", len(gradient)) for name in SIDES]
            own = turned(gradient, bases)
            first.lerp_(gradient, 1.0 - group["betas"][0])
            second.mul_(group["betas"][1]).addcmul_(own, own, value=1.0 - group["betas"][1])
            update = adam_direction(turned(first, bases), second, group["betas"], step, group["eps"])
            update = turned(update, bases, back=True)
            if step > 1:
                self._follow(gradient, state, group)
        if group["weight_decay"]:
            weights.mul_(1.0 - group["lr"] * group["weight_decay"])
        weights.sub_(update * group["lr"])
        put_back(parameter, weights)

    def _follow(self, gradient: torch.Tensor, state: State, group: Options) -> None:
        """Change Shampoo's moments by a gradient, and the eigenvectors where it is time."""
        step = state["step"].item()
        for name, own in zip(SIDES, (gradient, gradient.mT), strict=True):
            moment, basis = (_square(state, f"{name}_{kind}", len(gradient)) for kind in ("moment", "basis"))
            if moment is not None and basis is not None:
                moment.lerp_(own @ own.mT, 1.0 - group["betas"][1])
                if step == 1 or step % group["interval"] == 0:
                    basis.copy_(eigenvectors(moment, None if step == 1 else basis))


def _square(state: State, key: str, stack: int) -> torch.Tensor | None:
    """A state as matrices [B, n, n]; None if it is not kept."""
    kept = state.get(key)
    return None if kept is None else kept.view(stack, *kept.shape[-2:])
