"""Saved tensors that share storage, which is stored once: in regions of a storage, or view by view.

[Note: regions] A region is a range of bytes of one storage, from a multiple of 64 on, so that alignment is preserved.
All tensors in a region share its stored copy, and each is read with its own shape and stride: kernels are chosen by
strides, so other strides could give other sums. A region is identified by storage, bytes and version; a weak reference
to the storage keeps its address from being reused.

[Note: parts of a storage] A tensor with gaps, or a small part of a large storage, is stored with its whole storage,
which the graph would hold anyway: q, k and v cut from one product are stored once. If the storage is no result of the
graph (a column of the data, say) such a part stays on the device.

[Note: views] Two saved tensors are the same view if storage, offset, shape, stride, dtype and version are equal; only
then does one stored copy serve both, since transposed views of the same bytes would give other values. The weak
reference to the storage keeps its address from being given out again.
"""

import math
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

ALIGNED = 64  # bytes; no kernel depends on a larger alignment
SMALLEST = 2**14  # bytes; below it storing a tensor elsewhere costs more than it frees


def extent_of(tensor: torch.Tensor, smallest: int) -> tuple[int, int] | None:
    """The byte range of a tensor's region in its storage, (first, last + 1); None if it stays on the device."""
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


class ViewHandle:
    """The handle of a stored view, which subclasses fill.

    Attributes:
        storage: of the view; holds its address, not its memory.
    """

    __slots__ = ("__weakref__", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())


class Views:
    """The handles of saved tensors by their views ([Note: views]), for savers that store each view apart."""

    def __init__(self) -> None:
        self._handles: WeakValueDictionary[tuple[Any, ...], ViewHandle] = WeakValueDictionary()

    def find(self, tensor: torch.Tensor) -> ViewHandle | None:
        """The handle of the same view, if a graph has one."""
        return self._handles.get(_view_of(tensor))

    def enter(self, tensor: torch.Tensor, handle: ViewHandle) -> None:
        """Enter a stored view, for as long as its handle lives."""
        self._handles[_view_of(tensor)] = handle


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version
