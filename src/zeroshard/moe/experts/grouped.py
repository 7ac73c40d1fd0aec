"""All experts in one product (`torch.nn.functional.grouped_mm`), for 16-bit rows on accelerators.

That operator reads offsets without a check and leaves rows behind the last one as memory was, so offsets are made from
counts that cover the rows. On CPUs experts one at a time (`kernels`) take less time and memory.

Shapes: R rows, D width, M made features, F hidden features, E experts.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroshard.moe.experts.kernels import ExpertStack, check_counts
from zeroshard.step.context import WeightGradients, store_for

STRIDE = 16  # bytes of which the operator needs rows to be multiples


def fits(rows: Tensor, stack: ExpertStack) -> bool:
    """Whether these experts can and should be computed in one product."""
    device = rows.device.type
    if device in ("cpu", "meta"):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    return dtype is torch.bfloat16 and aligned(stack, dtype)


def aligned(stack: ExpertStack, dtype: torch.dtype) -> bool:
    """Whether all rows are of whole strides."""
    return all(n * dtype.itemsize % STRIDE == 0 for weight in (stack.up, stack.down) for n in weight.shape[1:])


def grouped_rows(rows: Tensor, counts: Sequence[int], stack: ExpertStack) -> Tensor:
    """Rows [R, D] -> [R, D], sorted by expert.

    Args:
        counts: rows of each expert.

    Raises:
        ModelError: the counts do not cover the rows.
    """
    check_counts(counts, len(stack.up), len(rows))
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    offsets = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=rows.device)
    with torch.autocast(device, enabled=False):
        made = _product(rows, stack.up, stack.up_bias, offsets, stack.transposed)
        return _product(stack.activation(made), stack.down, stack.down_bias, offsets, stack.transposed)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool) -> Tensor:
    store = store_for(weight)
    rows, values = rows.contiguous(), weight.to(rows.dtype)
    if store is None:
        made = F.grouped_mm(rows, _matrices(values, transposed), offs=offsets)
        product: Tensor = _Whole.apply(made)  # type: ignore[no-untyped-call]
    else:
        anchor = rows.new_zeros((), requires_grad=True)
        product = _Product.apply(  # type: ignore[no-untyped-call]
            rows, anchor, values.detach(), (weight,), store, offsets, transposed
        )
    if bias is None:
        return product
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    return product + bias.to(rows.dtype).repeat_interleave(sizes, 0, output_size=len(rows))


def _matrices(stacked: Tensor, transposed: bool) -> Tensor:
    """[E, in, out]."""
    return stacked if transposed else stacked.mT


class _Product(torch.autograd.Function):
    """The product of rows and their experts' matrices, whose backward leaves the gradient of the weight to a store."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor,
        values: Tensor,
        weight: tuple[Tensor],
        store: WeightGradients,
        offsets: Tensor,
        transposed: bool,
    ) -> Tensor:
        """[R, in] -> [R, out]; the anchor keeps the node in the graph where rows need no gradient.

        The weight comes in a tuple, so that autograd does not take it for an input.
        """
        ctx.save_for_backward(rows, values, offsets)
        ctx.weight, ctx.store, ctx.transposed = weight[0], store, transposed
        return F.grouped_mm(rows, _matrices(values, transposed), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the rows only."""
        rows, values, offsets = ctx.saved_tensors
        gradient, of_rows = gradients[0].contiguous(), None
        left, right = (rows, gradient) if ctx.transposed else (gradient, rows)
        ctx.store.add(ctx.weight, partial(_make, left=left, right=right, offsets=offsets))
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(gradient, _matrices(values, ctx.transposed).mT, offs=offsets)
        return of_rows, None, None, None, None, None, None


def _make(weight: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    """Hand the products of an expert's rows, leftᵀ·right, to autograd as the gradient of the weight."""
    with torch.no_grad():
        product = F.grouped_mm(left.mT, right, offs=offsets)
    weight.backward(product.to(weight.dtype))


class _Whole(torch.autograd.Function):
    """The identity; its gradient is contiguous, as the operator needs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()
