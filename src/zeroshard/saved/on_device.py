"""Saved tensors that stay on the device, as autograd keeps them; also those that other savers do not take."""

from typing import Any

import torch

from zeroshard.errors import OffloadError


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


class Keep:
    """Keeps every saved tensor where it is.

    Attributes:
        moves: whether it copies any tensor.
        how: what it does with them.
        varies: whether bytes on the device depend on values.
    """

    moves, how, varies = False, "kept", False

    def pack(self, tensor: torch.Tensor) -> Any:
        """The tensor, as it is now."""
        return Kept(tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again."""
        assert isinstance(saved, Kept)
        return saved.tensor()

    def settle(self) -> None:
        """Do nothing: no copies are under way."""


def changed_in_place(shape: torch.Size, dtype: torch.dtype) -> OffloadError:
    """The error of a backward that would read other values than its forward."""
    return OffloadError(
        f"A tensor of shape {tuple(shape)} and {dtype} that the backward needs was changed in place after the forward "
        f"saved it. Use the operation that is not in place there, or change a clone."
    )
