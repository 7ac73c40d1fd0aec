"""Saved tensors that stay on the device, in the ledger for as long as a graph holds them."""

from typing import Any

import torch

from zeroshard.errors import OffloadError
from zeroshard.memory.ledger import SavedStorages


class Kept:
    """A saved tensor that stays where it is; one of a graph detached, or the graph would hold itself for ever.

    Attributes:
        counted: what strikes it out of a count when this is gone, if there is one.
    """

    __slots__ = ("counted", "saved", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.saved, self.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version
        self.counted: object = None

    def tensor(self) -> torch.Tensor:
        """The tensor; raises `OffloadError` if it was changed in place."""
        if self.saved._version != self.version:
            raise changed_in_place(self.saved.shape, self.saved.dtype)
        return self.saved


class Stored:
    """A saved tensor that hooks have taken in: the tensor itself, or the handle of the saver that has it."""

    __slots__ = ("__weakref__", "saved")

    def __init__(self, saved: Any) -> None:
        self.saved = saved


class CountedTensor(Stored):
    """One on the device, counted for as long as the graph holds it."""

    __slots__ = ("counts", "storage")

    def __init__(self, tensor: torch.Tensor, saved: Any, counts: SavedStorages) -> None:
        self.saved, self.storage = saved, tensor.untyped_storage()
        self.counts: SavedStorages | None = None
        counts.change(self.storage, 1)
        self.counts = counts  # unless the budget has refused it

    def __del__(self) -> None:
        if self.counts is not None:
            self.counts.change(self.storage, -1)


def changed_in_place(shape: torch.Size, dtype: torch.dtype) -> OffloadError:
    """The error of a backward that would read other values than its forward."""
    return OffloadError(
        f"A tensor of shape {tuple(shape)} and {dtype} that the backward needs was changed in place after the forward "
        f"saved it. Use the operation that is not in place there, or change a clone."
    )
