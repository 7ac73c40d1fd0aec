"""Adafactor's update of one parameter on CPUs, in memory and offloaded: a kernel in C++, built at first use.

Without a compiler torch's operations compute the update, with different last places: the kernel adds in fp64, and
rounds each operation by itself. Its results are the same on every processor, with any number of threads.
"""

import ctypes
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels import build
from zeroshard.optim.host.adam import BF16, FLAGS, FP16, FP32, NONE, is_hollow, on_kernel

SOURCE = build.SOURCES / "host_adafactor.cpp"
KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
WIDE = 2**14  # most columns of a tile, whose sums stay in cache
TALL, TILE = 64, 2**17  # fewest rows and elements of a tile


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a step, in fp64.

    Attributes:
        weight2: 1 - beta2 of this step.
        eps1: added to squared gradients.
        eps2: the least root mean square of weights that scales a step.
        threshold: the largest root mean square of an update.
        rate: the step size before it is scaled by the weights.
        weight_decay: the share of the weights that they lose, times the scaled step size.
        beta1: the decay of the momentum; None for none.
        scaled: whether the root mean square of the weights scales the step.
        factor: of the gradients.
    """

    weight2: float
    eps1: float
    eps2: float
    threshold: float
    rate: float
    weight_decay: float
    beta1: float | None
    scaled: bool
    factor: float


class KernelAdafactor(ctypes.Structure):
    """One update; field by field the struct `Adafactor` of the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("stack", "rows", "columns", "tile_rows", "tile_columns")),
        *((name, ctypes.c_void_p) for name in ("gradient", "weights", "row_moments", "column_moments", "momentum")),
        *((name, ctypes.c_void_p) for name in ("out", "scratch")),
        *((name, ctypes.c_int32) for name in ("gradient_kind", "out_kind", "scaled")),
        *((name, ctypes.c_float) for name in ("factor", "beta1", "weight1")),
        *((name, ctypes.c_double) for name in ("weight2", "eps1", "eps2", "threshold", "rate", "weight_decay")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The kernel; None, with a warning, if it cannot be built."""
    try:
        kernel = build.library(SOURCE, FLAGS)
    except OSError as error:
        warnings.warn(f"Adafactor's updates on CPUs run in torch's operations, which are slower: {error}", stacklevel=4)
        return None
    kernel.zeroshard_adafactor.argtypes = [ctypes.POINTER(KernelAdafactor), ctypes.c_int32]
    kernel.zeroshard_adafactor.restype = None
    return kernel


def takes(weights: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether the kernel supports the tensors: fp32 weights and a gradient [B, n, m] or [B, n] on CPUs."""
    kept = [value for key, value in state.items() if key != "step"]
    return (
        on_kernel(weights, gradient)
        and all(map(on_kernel, kept))
        and gradient.dtype in KINDS
        and all(tensor.dtype == torch.float32 for tensor in (weights, *kept))
        and (is_hollow(weights) or library() is not None)
    )


def update(weights: Tensor, gradient: Tensor, state: Mapping[str, Any], numbers: Numbers, out: Tensor | None) -> None:
    """Take one step in place, of tensors that `takes` allows.

    Args:
        out: contiguous, fp32 or 16 bits, gets the new weights rounded to nearest even; or None.
    """
    stack, *rows, columns = weights.shape
    n = rows[0] if rows else 1
    tile_rows, doubles = scratch_of(n, columns, vectors=not rows)
    scratch = weights.new_empty(doubles, dtype=torch.float64)
    if is_hollow(weights):
        _rehearse(weights, gradient, state, out)
        return
    pointers = {"gradient": gradient, "weights": weights, "momentum": state.get("exp_avg"), "out": out}
    pointers |= {"row_moments": state.get("exp_avg_sq_row"), "scratch": scratch}
    pointers["column_moments"] = state["exp_avg_sq_col" if rows else "exp_avg_sq"]
    beta1 = numbers.beta1 or 0.0
    described = KernelAdafactor(
        stack=stack,
        rows=n,
        columns=columns,
        tile_rows=tile_rows,
        tile_columns=WIDE,
        gradient_kind=KINDS[gradient.dtype],
        out_kind=NONE if out is None else KINDS[out.dtype],
        scaled=numbers.scaled,
        factor=numbers.factor,
        beta1=beta1,
        weight1=1.0 - beta1,
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{name: getattr(numbers, name) for name in ("weight2", "eps1", "eps2", "threshold", "rate", "weight_decay")},
    )
    kernel = library()
    assert kernel is not None
    kernel.zeroshard_adafactor(ctypes.byref(described), torch.get_num_threads())


def scratch_of(rows: int, columns: int, vectors: bool) -> tuple[int, int]:
    """The rows of a tile, and the elements of an update's fp64 scratch: 1 to 3 % of a large matrix."""
    tile_rows = max(TALL, TILE // min(columns, WIDE))
    blocks, chunks = math.ceil(rows / tile_rows), math.ceil(columns / WIDE)
    sizes = 2 * blocks * chunks
    return tile_rows, sizes if vectors else sizes + blocks * columns + chunks * rows + math.ceil((rows + columns) / 2)


def _rehearse(weights: Tensor, gradient: Tensor, state: Mapping[str, Any], out: Tensor | None) -> None:
    """The same traffic without further memory, on tensors without values."""
    for tensor in (gradient, gradient, weights):
        torch.linalg.vector_norm(tensor)
    weights.add_(gradient)
    for key, value in state.items():
        if key != "step":
            value.mul_(1)
    if out is not None:
        out.zero_()
