"""SM3-II (Anil et al., 1901.11150): Adagrad whose second moments are bounded by one number per row, column, ...

A tensor of shape (d1, ..., dp) is covered by its slices of co-dimension 1, so it keeps d1 + ... + dp numbers; a vector
keeps all, and is then Adagrad's. A tensor of three dimensions counts as a stack of matrices, each with its own rows and
columns (`optim.algorithms.tensor_optimizer`); `batch_dims=0` of a group covers it by slices along all three.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, ClassVar

import torch

from zeroshard.optim.algorithms.row_reductions import Over, Rounds, RowReduction
from zeroshard.optim.algorithms.tensor_optimizer import (
    Options,
    State,
    TensorOptimizer,
    check_range,
    checked,
    leading_shape,
    matrix_shape,
    state_dtype,
    take_step,
)


def cover_shapes(shape: torch.Size, batch_dims: int | None) -> list[tuple[int, ...]]:
    """The shapes of the accumulators of a tensor, which broadcast to it: one for each dimension that is covered."""
    leading = leading_shape(shape, batch_dims)
    own = tuple(shape[len(leading) :])
    covers = [tuple(side if d == n else 1 for d, side in enumerate(own)) for n in range(len(own))]
    return [(*leading, *cover) for cover in covers] or [leading]


def change_cover(
    gradient: torch.Tensor, accumulators: Sequence[torch.Tensor]
) -> Generator[Sequence[RowReduction], Sequence[torch.Tensor], torch.Tensor]:
    """Update the maxima of all slices by a gradient, and return the second moments nu' (Algorithm SM3-II).

    Args:
        accumulators: of shapes by `cover_shapes`; slices of all but the first may extend to other ranks' rows.
    """
    second = accumulators[0]
    for other in accumulators[1:]:
        second = torch.minimum(second, other)
    fresh = len(accumulators) > 1
    second = torch.addcmul(second, gradient, gradient, out=second if fresh else None)
    first, *others = (_maxima(second, accumulator) for accumulator in accumulators)
    answers = yield [RowReduction(Over.MAXIMUM, maxima) for maxima in others]
    for accumulator, maxima in zip(accumulators, (first, *answers), strict=True):
        accumulator.copy_(maxima)
    return second


def _maxima(second: torch.Tensor, accumulator: torch.Tensor) -> torch.Tensor:
    """The maxima over the slices of an accumulator."""
    over = [d for d in range(second.dim()) if accumulator.shape[d] != second.shape[d]]
    return second.amax(over, keepdim=True) if over else second


class SM3(TensorOptimizer):
    """SM3-II, with momentum of the preconditioned gradients.

    Args:
        momentum: its decay, of updates with weight 1 - momentum; 0 for none, which keeps no state of full size.
        momentum_dtype: of the momentum, such as torch.bfloat16; None for fp32.
        weight_decay: weights lose this share of themselves times the learning rate.

    Raises:
        ValueError: an option is out of its range.
    """

    row_states: ClassVar[tuple[str, ...] | None] = ("accumulator_0",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.1,
        momentum: float = 0.9,
        momentum_dtype: torch.dtype | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        floating = momentum_dtype is None or momentum_dtype.is_floating_point
        check_range("momentum_dtype", momentum_dtype, floating, "a dtype of floating point, or None")
        super().__init__(
            params, checked(lr=lr, momentum=momentum, momentum_dtype=momentum_dtype, weight_decay=weight_decay)
        )

    def _start(self, parameter: torch.Tensor, group: Options) -> State:
        shape, batch_dims = parameter.shape, group["batch_dims"]
        matrix_shape(shape, batch_dims)  # checks batch_dims
        leading = leading_shape(shape, batch_dims)
        dtype, device = state_dtype(parameter), parameter.device
        sizes = [(*leading, side) for side in shape[len(leading) :]] or [leading]
        state: State = {
            f"accumulator_{number}": torch.zeros(size, dtype=dtype, device=device) for number, size in enumerate(sizes)
        }
        if group["momentum"]:
            kept = group["momentum_dtype"] or dtype
            state["momentum_buffer"] = torch.zeros(shape, dtype=kept, device=device)
        return state

    def reduced_numels(self, shape: torch.Size, group: Options) -> Sequence[int]:
        """The maxima of columns, or of the slices along each dimension but the first."""
        return (sum(shape[1:]),)

    def _rounds(self, parameter: torch.Tensor, state: State, group: Options) -> Rounds:
        assert parameter.grad is not None
        dtype = state_dtype(parameter)
        weights, gradient = parameter.detach().to(dtype), parameter.grad.to(dtype)
        shapes = cover_shapes(parameter.shape, group["batch_dims"])
        accumulators = [state[f"accumulator_{n}"].view(shape) for n, shape in enumerate(shapes)]
        second = yield from change_cover(gradient, accumulators)
        update = second.clamp_(min=torch.finfo(dtype).tiny).rsqrt_().mul_(gradient)  # 0/0 is 0
        if group["momentum"]:
            kept = state["momentum_buffer"]
            update.mul_(1.0 - group["momentum"]).add_(kept, alpha=group["momentum"])
            kept.copy_(update)
        take_step(parameter, weights, update, group)
