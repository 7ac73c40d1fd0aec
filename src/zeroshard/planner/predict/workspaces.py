"""Workspaces of CPU kernels: copies of operands in another dtype or layout, and those of LAPACK for eigenvectors.

Elementwise operations and reductions compute in one dtype, to which they copy operands of another. Scatters and gathers
of 16-bit numbers have an fp32 copy of what they write. A softmax copies what is not contiguous, a `cat` its tensors of
another dtype one by one, and a sort has the indices of one row.

Those of convolutions were found by listing torch's allocations one by one. Channels are padded to blocks; a copy is
freed as soon as it was used, so only the peak counts. If an image or a kernel has its channels last, as after an
attention over pixels, torch copies all operands to that layout first, and the kernel's gradient twice. A CPU without
instructions for 16-bit numbers multiplies patches of the image instead, group by group. Workspaces of GPU kernels are
not modelled.
"""

from collections.abc import Sequence
from functools import cache, reduce
from math import prod
from typing import Any

import torch

from zeroshard.planner.predict.torch_internals import Packet

aten = torch.ops.aten
FEW_CHANNELS = 3  # most channels of an input that is read without a copy
ROWS_OF_ONEDNN = 16  # from which on a single thread leaves plain 1 x 1 products to oneDNN too
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[1:]
FLOAT = torch.float32.itemsize
LONG_ROWS = 16  # numbers of a row from which on rows are added without a copy
ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "div", "pow", "maximum", "minimum", "atan2", "where", "addcmul", "addcdiv", "clamp",
    "mse_loss", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and",
    "logical_or", "logical_xor",
}  # fmt: skip
REDUCTIONS = {"sum", "mean", "prod", "cumsum", "linalg_vector_norm"}
SOFTMAXES = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}
SCATTERS = {"gather", "scatter", "scatter_add", "scatter_reduce", "index_add"}


def beside_results(func: Packet, args: Sequence[Any], result: Any) -> int:
    """Bytes that an operation holds at its peak beyond its results."""
    if func is aten.convolution.default:
        if args[0].dim() == 5 and args[0].dtype is torch.float32:
            return _forward(args[0], args[1], result)
        if not _by_onednn(args[0], args[1], args[3], args[5], args[6]):
            return _by_patches(args[0], args[0], args[1], args[3:], result, None)
        if _has_channels_last(args[0]) or _has_channels_last(args[1]):
            return _copied(args[0], args[1]) + _kernel(args[1])
        return _forward(args[0], args[1], result)
    if func is aten.convolution_backward.default:
        if args[1].dim() == 5 and args[1].dtype is torch.float32:
            return 0  # of oneDNN's copies and scratch no rule is known
        if not _by_onednn(args[1], args[2], args[4], args[6], args[7]):
            return _by_patches(args[0], args[1], args[2], args[4:], args[0], result)
        if _has_channels_last(args[1]) or _has_channels_last(args[2]):
            return _copied(*args[:3]) + _beside_gradients(args[2], result)
        strided = any(step != 1 for step in args[4])
        return _backward(args[0], args[1], args[2], result, strided)
    if func is aten._linalg_eigh.default and not args[0].is_complex():
        side = args[0].shape[-1]  # of ?syevd with eigenvectors: 1 + 6n + 2n^2 numbers and 3 + 5n integers, and one more
        return int(args[0].itemsize * (2 + 6 * side + 2 * side**2) + 4 * (4 + 5 * side))
    if func is aten._ctc_loss_backward.Tensor:
        return _nbytes(args[6])  # the likelihoods of what is left of the letters
    name = _name(func)
    if name == "sort" and args[0].dim():
        return torch.int64.itemsize * int(args[0].shape[args[1] if len(args) > 1 else -1])
    if name in SOFTMAXES:
        return sum(_nbytes(one) for one in args[: SOFTMAXES[name]] if not one.is_contiguous())
    if name == "cat":
        return max((_nbytes(one) for one in args[0] if one.dtype is not result.dtype), default=0)
    if not isinstance(result, torch.Tensor):
        return 0
    if name in ELEMENTWISE:
        return _casts(args[1:] if name == "where" else args, result, func is not aten.where.self and result is args[0])
    if name in REDUCTIONS:
        return 0 if args[0].dtype is result.dtype else args[0].numel() * result.itemsize
    if name in SCATTERS and result.dtype in HALVES and args[2].numel():
        return _buffer(name, args, result)
    return 0


@cache
def _name(func: Packet) -> str:
    """The name of an operator; that of one in place has no underscore."""
    return str(func._schema.name).removeprefix("aten::").removesuffix("_")


def _casts(args: Sequence[Any], result: torch.Tensor, in_place: bool) -> int:
    """Bytes of operands in the dtype that an operation computes in; single numbers do not count."""
    operands = [one for one in args if isinstance(one, torch.Tensor) and one.dim()]
    dtype = result.dtype
    if (in_place or dtype is torch.bool) and operands:
        dtype = reduce(torch.promote_types, (one.dtype for one in operands))
    numel = sum(one.numel() for one in operands if one.dtype is not dtype)
    if in_place and result.dtype is not dtype:
        numel += result.numel()
    return numel * dtype.itemsize


def _buffer(name: str, args: Sequence[Any], result: torch.Tensor) -> int:
    """Bytes of the fp32 copy of a scatter's result; whole rows are read without, and added with a copy of one row."""
    dim, index = int(args[1]), args[2]
    if result.dim() < 1 or dim % result.dim() or name in ("scatter", "scatter_reduce"):
        return FLOAT * result.numel()
    row = result[:1].numel()
    spread = name == "index_add" or (index.stride(0) > 0 and not any(index.stride()[1:]))
    given = args[0] if name == "gather" else args[3]
    if spread and given.is_contiguous() and result.is_contiguous() and (name == "gather" or row >= LONG_ROWS):
        return 0 if name == "gather" else FLOAT * row
    return FLOAT * result.numel()


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, stride: Any, dilation: Any, transposed: bool) -> bool:
    """Whether torch gives a convolution to oneDNN (`ConvParams::use_mkldnn`), and the inputs are not blocked yet."""
    if transposed or weight.dtype not in DTYPES or not torch.backends.mkldnn.is_available() or x.dim() != 4:
        return False
    if not (x.is_contiguous() or _has_channels_last(x)) or not _has_instructions(x.dtype):
        return False
    plain = all(n == 1 for n in (*stride, *dilation, *weight.shape[2:])) and weight.dtype is torch.float32
    return not plain or x.shape[0] >= ROWS_OF_ONEDNN or torch.get_num_threads() > 1


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with numbers of this dtype here."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _by_patches(
    given: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, how: Sequence[Any], out: torch.Tensor, gradients: Any
) -> int:
    """Bytes that a convolution by matrix products takes beside its results; `how` starts at the strides.

    Groups are computed one after another, and put together at last. `given` are the numbers that enter: the image, or
    in a backward the gradient of the output.
    """
    stride, padding, dilation, transposed, _, groups = how[:6]
    laid_out = x.is_contiguous() or (not _has_instructions(x.dtype) and not _has_channels_last(x))
    if x.dim() not in (4, 5) or transposed or any(one != 1 for one in dilation) or not laid_out:
        return 0
    pointwise = all(one == 1 for one in (*stride, *weight.shape[2:])) and not any(padding)
    patches: int = 0 if pointwise else x.itemsize * x.shape[0] * prod((*weight.shape[1:], *out.shape[2:]))
    read = (x,) if gradients is None else (x, given)
    whole = sum(_nbytes(one) for one in read if not one.is_contiguous())
    copies: int = whole + sum(_nbytes(one) // groups for one in read if groups > 1)
    if gradients is None:
        return max(copies + patches, _nbytes(out) if groups > 1 else 0)
    to_x, to_weight, to_bias = gradients
    highest = copies + patches if to_weight is not None or to_x is not None else 0
    if to_bias is not None and given.dtype in HALVES:  # which is the sum of an fp32 copy
        highest = max(highest, copies + FLOAT * given.numel() // groups - _nbytes(to_weight) // groups)
    return max(highest, sum(map(_nbytes, gradients)) if groups > 1 else 0)


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
