"""Savers: how a tensor that autograd saves for the backward is kept."""

from typing import Any, Protocol

import torch


class Saver(Protocol):
    """Takes in saved tensors and gives them back: keeps, moves or compresses them.

    Attributes:
        moves: whether it need be asked at all; one that keeps everything need not.
    """

    moves: bool

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; returns the handle that `unpack` takes. A `Kept` one stays where it is."""

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device."""

    def settle(self) -> None:
        """A step ends: wait for copies under way, and drop prefetched tensors that no backward read."""
