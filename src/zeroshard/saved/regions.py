"""Regions of storages: what is stored once for all the saved tensors that lie in it.

[Note: regions] A region is bytes of one storage, from a multiple of 64 on, so that a tensor is aligned as it was. All
tensors in a region share what is stored of it, whatever their shape and stride, and each comes back with its own:
kernels are chosen by strides, so other strides could give other sums. A region is identified by storage, bytes and
version; a weak reference to the storage keeps its address from being given out again.

[Note: parts of a storage] A tensor with gaps, or a small part of a large storage, is stored with its whole storage,
which the graph would hold for it anyway: q, k and v that were cut out of one product are stored once. Where the storage
is no result of the graph (a column of the data, say) such a part stays where it is.
"""

import math

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ALIGNED = 64  # bytes; no kernel depends on a larger alignment
SMALLEST = 2**14  # bytes; below it storing a tensor elsewhere costs more than it frees


def extent_of(tensor: torch.Tensor, smallest: int) -> tuple[int, int] | None:
    """The bytes of the storage that a tensor's region has, (first, last + 1); None if it stays where it is."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor) or not tensor.numel():
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    held, size = int(tensor.untyped_storage().nbytes()), tensor.itemsize
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    elements = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    first = int(tensor.storage_offset()) * size
    last = first + span * size
    if span > elements or last - first < smallest:  # [Note: parts of a storage]
        if not tensor.requires_grad:
            return None
        first, last = 0, held - held % size
    return (first - first % ALIGNED, last) if last <= held and last - first >= smallest else None
