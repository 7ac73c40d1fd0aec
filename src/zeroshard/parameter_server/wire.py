"""Buffers between a worker and the server: flat, in host memory; gradients one way, weights back."""

from collections.abc import Sequence

import torch

from zeroshard.memory.ledger import Category, Ledger


class Wire:
    """Flat host buffers for some tensors, one per dtype, with a view for each tensor.

    Attributes:
        buffers: 1-D, each one message.
        views: in the order and the shapes of the tensors.
    """

    def __init__(self, like: Sequence[torch.Tensor], ledger: Ledger, label: str) -> None:
        views: dict[int, torch.Tensor] = {}
        self.buffers: list[torch.Tensor] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in like):
            numbers = [number for number, tensor in enumerate(like) if tensor.dtype == dtype]
            numels = [like[number].numel() for number in numbers]
            ledger.take(Category.BUFFERS, sum(numels) * dtype.itemsize, label, tier="host")
            buffer = torch.zeros(sum(numels), dtype=dtype)
            for number, part in zip(numbers, buffer.split(numels), strict=True):
                views[number] = part.view(like[number].shape)
            self.buffers.append(buffer)
        self.views = [views[number] for number in range(len(like))]

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """Copy tensors into their views; returns which of them exist."""
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return [tensor is not None for tensor in tensors]

    @torch.no_grad()
    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with their views."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)
