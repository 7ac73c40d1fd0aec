"""Buffers of experts that are modules, such as running statistics, where the experts are on several ranks."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.moe.exchange.exchange import shared_out
from zeroshard.parts.place import Axis
from zeroshard.traffic import Purpose

BUFFERS = "buffers_of_experts"  # an attribute of a module of experts on several ranks: its `ExpertBuffers`


class ExpertBuffers:
    """The buffers of one mixture: each rank of a group writes those of its own experts, and has those of all.

    Args:
        modules: one for each expert; none where their parameters are stacked.
    """

    def __init__(self, modules: Sequence[nn.Module], axis: Axis, path: str) -> None:
        self._comm, self._label = axis.comm, f"buffers of {path}"
        first, stop = shared_out(len(modules), axis.size)[axis.rank]
        self._modules = [(module, first <= number < stop) for number, module in enumerate(modules)]

    @torch.no_grad()
    def share(self) -> None:
        """Take those of the other ranks' experts from these; a collective call, where there are any."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, bool]]] = defaultdict(list)
        for module, held in self._modules:
            for buffer in module.buffers():
                by_dtype[buffer.dtype].append((buffer, held))
        for dtype, buffers in by_dtype.items():
            own = [(buffer if held else torch.zeros_like(buffer)).reshape(-1) for buffer, held in buffers]
            flat = torch.cat(own).to(torch.uint8 if dtype == torch.bool else dtype)
            self._comm.all_reduce(flat, Purpose.CONTROL, self._label).wait()  # one rank's values, and zeros
            for (buffer, _), values in zip(buffers, flat.split([part.numel() for part in own]), strict=True):
                buffer.copy_(values.view_as(buffer))
