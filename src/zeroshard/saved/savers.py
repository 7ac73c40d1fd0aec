"""Savers in a list: the first that takes a tensor saved for backward has it, and the rest are kept where they are.

[Note: views] Two saved tensors are the same view if storage, offset, shape, stride, dtype and version are equal; only
then does one stored copy serve both, since transposed views of the same bytes would give other values. The weak
reference to the storage keeps its address from being given out again.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.parts.saver import Saver
from zeroshard.saved.on_device import Keep, Kept


class Savers:
    """Asks savers in their order, as one saver.

    Args:
        savers: the first that takes a tensor has it; one that none takes stays where it is.

    Attributes:
        moves: whether any does more than keep.
        asked: those that are asked now.
        choices: those that may be asked together, where that is decided block by block: each alone, or all.
    """

    def __init__(self, savers: Sequence[Saver]) -> None:
        self._savers, self._keep = savers, Keep()
        self.asked: Sequence[Saver] = savers
        self.choices = [[saver] for saver in savers if saver.moves] + ([savers] if len(savers) > 1 else [])
        self.moves = any(saver.moves for saver in savers)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; returns what `unpack` takes. A `Kept` one stays where it is."""
        for saver in self.asked:
            handle = saver.pack(tensor)
            if handle is not None:
                return handle if isinstance(handle, Kept) else _Packed(saver, handle)
        return self._keep.pack(tensor)

    def ask_all(self) -> None:
        """Ask all savers from now on."""
        self.asked = self._savers

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device."""
        if isinstance(saved, _Packed):
            return saved.saver.unpack(saved.handle)
        return self._keep.unpack(saved)

    def settle(self) -> None:
        """A step ends: wait for copies under way, and drop prefetched tensors that no backward read."""
        for saver in self._savers:
            saver.settle()


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
        """A view has been stored; it is known for as long as its handle lives."""
        self._handles[_view_of(tensor)] = handle


class _Packed:
    """A tensor that a saver of the list has, with its handle."""

    __slots__ = ("handle", "saver")

    def __init__(self, saver: Saver, handle: Any) -> None:
        self.saver, self.handle = saver, handle


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype, tensor._version
