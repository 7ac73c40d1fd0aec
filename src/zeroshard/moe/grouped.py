"""All experts in one product (`torch.nn.functional.grouped_mm`), for 16-bit rows on accelerators.

That operator reads offsets without a check and leaves rows behind the last one as memory was, so offsets are made from
counts that cover the rows. On CPUs experts one at a time (`kernels`) take less time and memory.

Shapes: R rows, D width, M made features, F hidden features, E experts.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroshard.moe.kernels import ExpertStack, check_counts

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
    sizes = torch.tensor(counts, device=rows.device)
    offsets = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=rows.device)
    with torch.autocast(device, enabled=False):
        made = _product(rows, stack.up, stack.up_bias, offsets, sizes, stack.transposed)
        return _product(stack.activation(made), stack.down, stack.down_bias, offsets, sizes, stack.transposed)


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, sizes: Tensor, transposed: bool
) -> Tensor:
    weight = weight.to(rows.dtype)
    weight = weight if transposed else weight.mT
    product: Tensor = _Whole.apply(F.grouped_mm(rows.contiguous(), weight, offs=offsets))  # type: ignore[no-untyped-call]
    if bias is None:
        return product
    return product + bias.to(rows.dtype).repeat_interleave(sizes, 0, output_size=len(rows))


class _Whole(torch.autograd.Function):
    """The identity; its gradient is contiguous, as the operator needs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()
