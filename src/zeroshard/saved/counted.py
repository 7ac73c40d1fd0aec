"""Saved tensors that stay on the device, in the ledger for as long as a graph holds them."""

from typing import Any

import torch

from zeroshard.memory.ledger import SavedStorages


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
