"""Saved tensors that stay on the device, in the ledger: each storage once, however many tensors share it.

[Note: entered already] Inputs of a pipeline's chunks lie in scratch for messages, and masks or statistics may be
buffers of the model. Both are entered as such for as long as they live, so a graph that saves them holds nothing more.
"""

from typing import Any

import torch

from zeroshard.memory.ledger import Category, Ledger


class SavedStorages:
    """How many saved tensors lie in each storage that the ledger has among the activations."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tensors: dict[int, int] = {}

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is one more among the activations ([Note: entered already])."""
        return tensor.layout is torch.strided and not self._ledger.is_entered(tensor)

    def change(self, storage: torch.UntypedStorage, by: int) -> None:
        """Enter a storage with the first tensor that lies in it; strike it out with the last."""
        key = storage._cdata
        before = self._tensors.get(key, 0)
        if before == 0:
            self._ledger.take(Category.ACTIVATIONS, storage.nbytes(), "save for backward")
        self._tensors[key] = before + by
        if before + by == 0:
            del self._tensors[key]
            self._ledger.give(Category.ACTIVATIONS, storage.nbytes(), "saved activation")


class Stored:
    """A saved tensor that hooks have taken in: its place, or the handle of the saver that has it."""

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
