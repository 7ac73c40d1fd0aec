"""What goes between a worker and the server: flat host buffers of gradients, and of weights on the way back."""

from collections.abc import Sequence

import torch

from zeroshard.memory.ledger import Category, Ledger


class Wire:
    """Flat buffers on the host, one per dtype, and in them a view in the shape of each of some tensors.

    Attributes:
        buffers: 1-D, each one message.
        views: of the tensors, in their order.
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
        """Copy the tensors in; returns which there are."""
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return [tensor is not None for tensor in tensors]

    @torch.no_grad()
    def unpack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with what is here."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)
