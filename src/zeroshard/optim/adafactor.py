"""Adafactor (Shazeer and Stern, 1804.04235, Algorithms 4 to 6): second moments kept as the means of rows and columns.

A matrix [n, m] keeps n + m numbers in fp32 in the place of n*m; a vector keeps all its second moments. The paper's
sums over rows and columns are kept as means, which give the same second moment R C / mean(R).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from zeroshard.optim.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    as_matrices,
    check_range,
    leading_shape,
    matrix_shape,
    opened,
    put_back,
    root_mean_square,
    state_dtype,
)


def decay_at(step: float, rate: float) -> float:
    """The decay of second moments at a step, from 1 on: 1 - step^rate, which needs no bias correction (section 7.2)."""
    return 1.0 - math.pow(step, rate)


def relative_step(step: float) -> float:
    """The relative step size where no learning rate is given: min(1e-2, 1/sqrt(step)) (Algorithm 4)."""
    return min(1e-2, 1.0 / math.sqrt(step))


def change_factors(
    squares: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, beta2: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change the means of rows [B, n] and columns [B, m] by squared gradients [B, n, m] (Algorithm 4, lines 5 and 6).

    Returns:
        Factors [B, n, 1] and [B, 1, m] whose product is 1/sqrt(V).
    """
    rows.lerp_(squares.mean(-1).add_(eps), 1.0 - beta2)
    columns.lerp_(squares.mean(-2).add_(eps), 1.0 - beta2)
    row_factors = (rows / rows.mean(-1, keepdim=True)).rsqrt_()
    return row_factors.unsqueeze(-1), columns.rsqrt().unsqueeze(-2)


def factored_mean_square(squares: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The mean square [B, 1, 1] of gradients times the factors of rows [B, n, 1] and columns [B, 1, m]."""
    over_columns = torch.matmul(squares, columns.square().mT)
    return torch.matmul(rows.square().mT, over_columns) / math.prod(squares.shape[1:])


def clipped(size: torch.Tensor, update_size: torch.Tensor, threshold: float) -> torch.Tensor:
    """A step size over max(1, RMS(U)/threshold), where `update_size` is RMS(U) (update clipping, section 6)."""
    return size / (update_size / threshold).clamp_(min=1.0)


class Adafactor(TensorOptimizer):
    """Adafactor with the paper's equations, in fp32 for weights in 16 bits.

    Of a stack of matrices each has rows, columns, clipping and scale of its own (`zeroshard.optim.tensor_optimizer`).

    Args:
        lr: None for the paper's relative step size, min(1e-2, 1/sqrt(t)); a number takes its place.
        eps: the paper's eps1, added to squared gradients, and eps2, the least root mean square of weights that scales
            a step.
        clip_threshold: the paper's d, the largest root mean square of an update.
        decay_rate: the exponent of the decay of second moments, 1 - t^decay_rate.
        beta1: the decay of a momentum of updates in fp32, which takes 4 bytes per parameter; None for none.
        weight_decay: weights lose this share of themselves times the step size.
        scale_parameter: whether a step is scaled by the root mean square of the weights.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
    ) -> None:
        check_range("lr", lr, lr is None or lr >= 0.0, "None or at least 0")
        check_range("eps", eps, len(eps) == 2 and min(eps) >= 0.0, "two numbers of at least 0")
        check_range("clip_threshold", clip_threshold, clip_threshold > 0.0, "above 0")
        check_range("decay_rate", decay_rate, decay_rate <= 0.0, "at most 0")
        check_range("beta1", beta1, beta1 is None or 0.0 <= beta1 < 1.0, "None, or at least 0 and less than 1")
        check_range("weight_decay", weight_decay, weight_decay >= 0.0, "at least 0")
        defaults = {
            **{"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1},
            **{"weight_decay": weight_decay, "scale_parameter": scale_parameter, "batch_dims": None},
        }
        super().__init__(params, defaults)

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        shape, batch_dims = parameter.shape, group["batch_dims"]
        own = matrix_shape(shape, batch_dims)[1:]
        shapes = {"exp_avg_sq": tuple(shape)}
        if len(own) == 2:
            leading = leading_shape(shape, batch_dims)
            shapes = {"exp_avg_sq_row": (*leading, own[0]), "exp_avg_sq_col": (*leading, own[1])}
        if group["beta1"] is not None:
            shapes["exp_avg"] = tuple(shape)
        dtype, device = state_dtype(parameter), parameter.device
        return {key: torch.zeros(size, dtype=dtype, device=device) for key, size in shapes.items()}

    def _change(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        weights, gradient = opened(parameter, group["batch_dims"])
        size = self._size(weights, state["step"].item(), group)
        update, factors = self._update(gradient, size, state, group)
        if group["weight_decay"]:
            weights.mul_(1.0 - group["weight_decay"] * size)
        if group["beta1"] is None:
            weights.addcmul_(update, factors, value=-1.0)
        else:
            momentum = as_matrices(state["exp_avg"], group["batch_dims"])
            momentum.mul_(group["beta1"]).addcmul_(update, factors, value=1.0 - group["beta1"])
            weights.sub_(momentum)
        put_back(parameter, weights)

    def _size(self, weights: torch.Tensor, step: float, group: Options) -> torch.Tensor:
        """The step size of each matrix [B, 1, 1] or vector [B, 1] (Algorithm 4, lines 1 and 2)."""
        size = relative_step(step) if group["lr"] is None else group["lr"]
        if group["scale_parameter"]:
            return root_mean_square(weights).clamp_(min=group["eps"][1]).mul_(size)
        return weights.new_ones((len(weights),) + (1,) * (weights.dim() - 1)).mul_(size)

    def _update(
        self, gradient: torch.Tensor, size: torch.Tensor, state: State, group: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors whose product is the clipped update times the step size."""
        beta2, squares = decay_at(state["step"].item(), group["decay_rate"]), gradient * gradient
        if "exp_avg_sq" in state:
            second = as_matrices(state["exp_avg_sq"], group["batch_dims"])
            second.lerp_(squares.add_(group["eps"][0]), 1.0 - beta2)
            update = torch.rsqrt(second, out=squares).mul_(gradient)
            return update, clipped(size, root_mean_square(update), group["clip_threshold"])
        row_means, column_means = (state[f"exp_avg_sq_{side}"].view(len(gradient), -1) for side in ("row", "col"))
        rows, columns = change_factors(squares, row_means, column_means, beta2, group["eps"][0])
        size = clipped(size, factored_mean_square(squares, rows, columns).sqrt_(), group["clip_threshold"])
        return torch.mul(gradient, rows * size, out=squares), columns
