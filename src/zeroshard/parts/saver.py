"""What happens to a tensor that autograd saves for the backward."""

from typing import Any, Protocol

import torch


class Saver(Protocol):
    """Takes in saved tensors and gives them back: keeps, moves or compresses them.

    Attributes:
        moves: whether it need be asked at all; one that keeps everything need not.
    """

    moves: bool

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; what `unpack` needs to bring it back. A `Kept` one stays where it is."""

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device."""

    def settle(self) -> None:
        """A step ends: wait for what is under way, and drop what came up without being read."""
