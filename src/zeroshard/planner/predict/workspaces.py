"""Workspaces of CPU kernels: copies that convolutions make in oneDNN's blocked layout, and LAPACK's for eigenvectors.

Found by listing the allocations of torch's convolutions one by one. Channels are padded to blocks; a copy is freed as
soon as it was used, so only the peak counts. If an image or a kernel has its channels last, as after an attention over
pixels, torch copies all operands to that layout first, and the kernel's gradient twice. Workspaces of GPU kernels are
not modelled.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from zeroshard.planner.predict.torch_internals import Packet

aten = torch.ops.aten
FEW_CHANNELS = 3  # most channels of an input that is read without a copy
ROWS_OF_ONEDNN = 16  # from which on a single thread leaves plain 1 x 1 products to oneDNN too
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def beside_results(func: Packet, args: Sequence[Any], result: Any) -> int:
    """Bytes that an operation holds at its peak beyond its results."""
    if func is aten.convolution.default and _by_onednn(args[0], args[1], args[3], args[5], args[6]):
        if _has_channels_last(args[0]) or _has_channels_last(args[1]):
            return _copied(args[0], args[1]) + _kernel(args[1])
        return _forward(args[0], args[1], result)
    if func is aten.convolution_backward.default and _by_onednn(args[1], args[2], args[4], args[6], args[7]):
        if _has_channels_last(args[1]) or _has_channels_last(args[2]):
            return _copied(*args[:3]) + _beside_gradients(args[2], result)
        strided = any(step != 1 for step in args[4])
        return _backward(args[0], args[1], args[2], result, strided)
    if func is aten._linalg_eigh.default and not args[0].is_complex():
        side = args[0].shape[-1]  # of ?syevd with eigenvectors: 1 + 6n + 2n^2 numbers and 3 + 5n integers, and one more
        return int(args[0].itemsize * (2 + 6 * side + 2 * side**2) + 4 * (4 + 5 * side))
    return 0


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, stride: Any, dilation: Any, transposed: bool) -> bool:
    """Whether torch gives a convolution to oneDNN (`ConvParams::use_mkldnn`), and the inputs are not blocked yet."""
    if transposed or weight.dtype not in DTYPES or not torch.backends.mkldnn.is_available() or x.dim() != 4:
        return False
    if not (x.is_contiguous() or _has_channels_last(x)):
        return False
    plain = all(n == 1 for n in (*stride, *dilation, *weight.shape[2:])) and weight.dtype is torch.float32
    return not plain or x.shape[0] >= ROWS_OF_ONEDNN or torch.get_num_threads() > 1


def _blocks(channels: int) -> int:
    """Channels of a blocked copy."""
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    return -(-channels // block) * block


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a blocked copy of an image [B, C, H, W]."""
    return tensor.itemsize * prod((tensor.shape[0], _blocks(tensor.shape[1]), *tensor.shape[2:]))


def _blocked_weight(weight: torch.Tensor, x: torch.Tensor | None) -> int:
    """Bytes of a blocked copy of [O, I, h, w], which groups do not block; `x` is the input, if it is read."""
    out, into = weight.shape[:2]
    if x is not None and into != x.shape[1]:
        return _nbytes(weight)
    few = x is not None and into <= FEW_CHANNELS
    return weight.itemsize * prod((_blocks(out), into if few else _blocks(into), *weight.shape[2:]))


def _has_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _copied(*tensors: torch.Tensor) -> int:
    """Bytes of copies with channels last, of tensors in another layout."""
    return sum(_nbytes(one) for one in tensors if not one.is_contiguous(memory_format=torch.channels_last))


def _kernel(weight: torch.Tensor) -> int:
    """Bytes of the copy of a kernel with channels last, in blocks of outputs alone."""
    return _nbytes(weight) // weight.shape[0] * _blocks(weight.shape[0])


def _beside_gradients(weight: torch.Tensor, result: Any) -> int:
    """Bytes beside the gradients of a convolution with channels last; those of kernel and bias come last."""
    to_x, to_weight, to_bias = result
    for_x = 0 if to_x is None else _kernel(weight) - _nbytes(to_weight) - _nbytes(to_bias)
    return max(0, for_x, 2 * _nbytes(to_weight) + _nbytes(to_bias))


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.itemsize


def _read_blocked(x: torch.Tensor) -> int:
    """Bytes of the copy of an input, if there is one."""
    return 0 if x.shape[1] <= FEW_CHANNELS else _blocked(x)


def _forward(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
    inside = _read_blocked(x) + _blocked_weight(weight, x) + _blocked(out)
    return max(inside, _blocked(out) + _nbytes(out)) - _nbytes(out)


def _backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, result: Any, strided: bool) -> int:
    to_x, to_weight, to_bias = result
    kernel, given = _blocked_weight(weight, x), _blocked(gradient)
    highest = 0
    if to_x is not None:  # a strided output is assembled from blocks
        whole = kernel if weight.shape[1] != x.shape[1] else _blocked_weight(weight, None)
        highest = max(given + whole + _blocked(x), _blocked(x) + (2 if strided else 1) * _nbytes(to_x))
    if to_weight is not None:
        made = _nbytes(to_x)
        highest = max(highest, made + given + _read_blocked(x) + kernel, made + kernel + _nbytes(to_weight))
    return max(0, highest - sum(map(_nbytes, (to_x, to_weight, to_bias))))
