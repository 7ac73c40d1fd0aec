"""Adafactor (Shazeer and Stern, 1804.04235, Algorithms 4 to 6): second moments kept as the means of rows and columns.

A matrix [n, m] keeps n + m numbers in fp32 in the place of n*m; a vector keeps all its second moments. The paper's
sums over rows and columns are kept as means, which give the same second moment R C / mean(R).

A step reads the gradient of a matrix three times: for the means, the size of the update, and the update. On CPUs a
kernel does it (`host.adafactor`), in memory and offloaded, so that both have the same bits. Elsewhere, and without a
compiler, torch's operations do: on CPUs in pieces that stay in cache, so that no temporary is as large as the matrix.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from zeroshard.optim.algorithms.row_reductions import Over, Rounds, RowReduction, in_rounds
from zeroshard.optim.algorithms.tensor_optimizer import (
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
from zeroshard.optim.host import adafactor as host_adafactor
from zeroshard.platform.accelerator import on_cpus

PIECE = 2**20  # elements of a piece on CPUs


def decay_at(step: float, rate: float) -> float:
    """The decay of second moments at a step, from 1 on: 1 - step^rate, which needs no bias correction (section 7.2)."""
    return 1.0 - math.pow(step, rate)


def relative_step(step: float) -> float:
    """The relative step size without a learning rate: min(1e-2, 1/sqrt(step)) (Algorithm 4)."""
    return min(1e-2, 1.0 / math.sqrt(step))


Place = tuple[slice, ...]  # an index of matrices, and of rows; empty for all


class Products:
    """Products over a stack of matrices [B, n, m], computed in scratch.

    On CPUs a large stack is computed in pieces of some matrices, or some rows of one; on other devices, where each
    operation has a fixed cost, at once.
    """

    def __init__(self, stack: torch.Tensor) -> None:
        self._stack = stack
        count, rows, columns = stack.shape
        self._at_once, self._rows_at_once = max(1, PIECE // (rows * columns)), max(1, PIECE // columns)
        self._in_pieces = on_cpus(stack) and stack.numel() > PIECE
        sizes = (min(self._at_once, count), min(self._rows_at_once, rows)) if self._in_pieces else (count, rows)
        self._scratch = stack.new_empty(*sizes, columns)

    def means_of_squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean squares of rows [B, n] and of columns [B, m]."""
        if not self._in_pieces:
            squares = torch.mul(self._stack, self._stack, out=self._scratch)
            return squares.mean(-1), squares.mean(-2)
        rows, columns = self._stack.new_empty(self._stack.shape[:2]), self._stack.new_zeros(self._stack.shape[::2])
        for place, squares in self.times(self._stack):
            rows[place] = squares.mean(-1)
            columns[place[:1]] += squares.sum(-2)
        return rows, columns.div_(self._stack.shape[1])

    def squares_over_columns(self, factors: torch.Tensor) -> torch.Tensor:
        """Squares times factors [B, m, 1], as [B, n, 1]; call it right after `means_of_squares`."""
        if not self._in_pieces:
            return torch.matmul(self._scratch, factors)
        sums = self._stack.new_empty((*self._stack.shape[:2], 1))
        for place, squares in self.times(self._stack):
            sums[place] = torch.matmul(squares, factors[place[:1]])
        return sums

    def times(self, other: torch.Tensor) -> Iterator[tuple[Place, torch.Tensor]]:
        """The index of each piece, and its product with another tensor [B, n, m] or [B, n, 1]."""
        if not self._in_pieces:
            yield (), torch.mul(self._stack, other, out=self._scratch)
            return
        for first in range(0, self._stack.shape[0], self._at_once):
            for row in range(0, self._stack.shape[1], self._rows_at_once):
                place = slice(first, first + self._at_once), slice(row, row + self._rows_at_once)
                piece = self._stack[place]
                scratch = self._scratch[: piece.shape[0], : piece.shape[1]]
                yield place, torch.mul(piece, other[place], out=scratch)


def factored_mean_square(gradient: Products, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The mean square [B, 1, 1] of a gradient [B, n, m] times the factors of rows [B, n, 1] and columns [B, 1, m]."""
    over_columns = gradient.squares_over_columns(columns.square().mT)
    return torch.matmul(rows.square().mT, over_columns) / (rows.shape[1] * columns.shape[2])


def clipped(size: torch.Tensor, update_size: torch.Tensor, threshold: float) -> torch.Tensor:
    """A step size over max(1, RMS(U)/threshold), where `update_size` is RMS(U) (update clipping, section 6)."""
    return size / (update_size / threshold).clamp_(min=1.0)


class Adafactor(TensorOptimizer):
    """Adafactor with the paper's equations, in fp32 for weights in 16 bits.

    Each matrix of a stack has rows, columns, clipping and scale of its own (`optim.algorithms.tensor_optimizer`).

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

    fuses: ClassVar[bool] = True
    row_states: ClassVar[tuple[str, ...] | None] = ("exp_avg_sq_row",)

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
        assert parameter.grad is not None
        weights = as_matrices(parameter.detach(), group["batch_dims"]).to(state_dtype(parameter))
        gradient = as_matrices(parameter.grad, group["batch_dims"])
        factor, out = self.fused.factor, self.fused.out.get(parameter)
        if host_adafactor.takes(weights, gradient, state):
            host_adafactor.update(weights, gradient, state, _numbers(state["step"].item(), factor, group), out)
            torch.autograd.graph.increment_version(parameter)  # a backward over old values is refused, as after torch's
        else:
            scaled = gradient.to(weights.dtype)
            in_rounds([self._by_torch(weights, scaled if factor == 1.0 else scaled * factor, state, group)])
            if out is not None:
                out.copy_(weights.view(-1))
        put_back(parameter, weights)

    def reduced_numels(self, shape: torch.Size, group: Options) -> Sequence[int]:
        """The mean squares of columns, the mean of rows, and the size of weights; then the size of the update."""
        return math.prod(shape[1:]) + 1 + bool(group["scale_parameter"]), 1

    def _rounds(self, parameter: torch.Tensor, state: State, group: Options) -> Rounds:
        weights, gradient = opened(parameter, group["batch_dims"])
        yield from self._by_torch(weights, gradient, state, group)
        put_back(parameter, weights)

    def _by_torch(self, weights: torch.Tensor, gradient: torch.Tensor, state: State, group: Options) -> Rounds:
        """The update in torch's operations, of matrices whose other rows may be on other ranks."""
        momentum = None if group["beta1"] is None else as_matrices(state["exp_avg"], group["batch_dims"])
        if "exp_avg_sq" in state:
            size = self._size(weights, state["step"].item(), group)
            update, clipped_size = self._vectors(gradient, size, state, group)
            _apply(weights, momentum, _kept(size, group), update, clipped_size, group["beta1"])
            return
        products, scaled = Products(gradient), group["scale_parameter"]
        beta2, eps = decay_at(state["step"].item(), group["decay_rate"]), group["eps"][0]
        row_means, column_means = (state[f"exp_avg_sq_{side}"].view(len(weights), -1) for side in ("row", "col"))
        over_rows, over_columns = products.means_of_squares()
        row_means.lerp_(over_rows.add_(eps), 1.0 - beta2)
        asks = [RowReduction(Over.MEAN, over_columns), RowReduction(Over.MEAN, row_means.mean(-1, keepdim=True))]
        asks += [RowReduction(Over.MEAN_SQUARE, root_mean_square(weights))] if scaled else []
        over_columns, mean, *sizes = yield asks
        column_means.lerp_(over_columns.add_(eps), 1.0 - beta2)
        rows, columns = (row_means / mean).rsqrt_().unsqueeze(-1), column_means.rsqrt().unsqueeze(-2)
        (mean_square,) = yield [RowReduction(Over.MEAN, factored_mean_square(products, rows, columns))]
        size = self._scaled(sizes[0] if scaled else None, weights, state["step"].item(), group)
        rows = rows * clipped(size, mean_square.sqrt(), group["clip_threshold"])
        decay = _kept(size, group)
        for place, update in products.times(rows):
            own_momentum = momentum if momentum is None else momentum[place]
            own_decay = decay if decay is None else decay[place[:1]]
            _apply(weights[place], own_momentum, own_decay, update, columns[place[:1]], group["beta1"])

    def _size(self, weights: torch.Tensor, step: float, group: Options) -> torch.Tensor:
        """The step size of each matrix [B, 1, 1] or vector [B, 1] (Algorithm 4, lines 1 and 2)."""
        return self._scaled(root_mean_square(weights) if group["scale_parameter"] else None, weights, step, group)

    def _scaled(self, size: torch.Tensor | None, weights: torch.Tensor, step: float, group: Options) -> torch.Tensor:
        """The step size from the root mean square of the weights; None if it does not scale."""
        if size is not None:
            return size.clamp(min=group["eps"][1]).mul_(_rate(step, group))
        return weights.new_ones((len(weights),) + (1,) * (weights.dim() - 1)).mul_(_rate(step, group))

    def _vectors(
        self, gradient: torch.Tensor, size: torch.Tensor, state: State, group: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The update of vectors [B, n] and its clipped step size [B, 1]."""
        beta2, squares = decay_at(state["step"].item(), group["decay_rate"]), gradient * gradient
        second = as_matrices(state["exp_avg_sq"], group["batch_dims"])
        second.lerp_(squares.add_(group["eps"][0]), 1.0 - beta2)
        update = torch.rsqrt(second, out=squares).mul_(gradient)
        return update, clipped(size, root_mean_square(update), group["clip_threshold"])


def _kept(size: torch.Tensor, group: Options) -> torch.Tensor | None:
    """The factor of weight decay on the weights at a step size; None without weight decay."""
    return 1.0 - group["weight_decay"] * size if group["weight_decay"] else None


def _rate(step: float, group: Options) -> Any:
    """The step size before it is scaled by the weights."""
    return relative_step(step) if group["lr"] is None else group["lr"]


def _numbers(step: float, factor: float, group: Options) -> host_adafactor.Numbers:
    """The numbers of a parameter group for the kernel."""
    return host_adafactor.Numbers(
        weight2=1.0 - decay_at(step, group["decay_rate"]),
        eps1=group["eps"][0],
        eps2=group["eps"][1],
        threshold=group["clip_threshold"],
        rate=float(_rate(step, group)),
        weight_decay=group["weight_decay"],
        beta1=group["beta1"],
        scaled=group["scale_parameter"],
        factor=factor,
    )


def _apply(
    weights: torch.Tensor,
    momentum: torch.Tensor | None,
    decay: torch.Tensor | None,
    update: torch.Tensor,
    factors: torch.Tensor,
    beta1: float | None,
) -> None:
    """Subtract an update times factors from weights, through the momentum if there is one."""
    if decay is not None:
        weights.mul_(decay)
    if momentum is None or beta1 is None:
        weights.addcmul_(update, factors, value=-1.0)
    else:
        momentum.mul_(beta1).addcmul_(update, factors, value=1.0 - beta1)
        weights.sub_(momentum)
