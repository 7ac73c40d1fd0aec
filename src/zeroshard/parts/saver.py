"""Savers: how a tensor that autograd saves for the backward is kept."""

from typing import Any, Protocol

import torch


class Saver(Protocol):
    """Takes in saved tensors and gives them back: keeps, moves or compresses them.

    Several stand in a list, and the first that takes a tensor has it. Tensors that are the same view of the same values
    are stored and counted once.

    Attributes:
        moves: whether it need be asked at all; one that keeps everything need not.
        how: what it does with tensors.
        varies: whether bytes on the device depend on the values of tensors.
    """

    moves: bool
    how: str
    varies: bool

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; returns the handle that `unpack` takes, or None to leave the tensor to the next saver.

        With a `Kept` one the tensor stays where it is, whatever the next savers would do. A saver enters on the ledger
        what it holds on the device, but for those, which the engine counts.
        """

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device; of a handle that this saver returned."""

    def settle(self) -> None:
        """A step ends: wait for copies under way, and drop prefetched tensors that no backward read."""
