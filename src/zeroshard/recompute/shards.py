"""P_a of ZeRO-R (Rajbhandari et al., 1910.02054, section 6.1): checkpoints divided among ranks with the same tensor.

Where layers are split among tensor ranks without sequence parallelism, the input of a block is the same on each of
them. Each of t ranks keeps 1/t of its elements, and all gather it just before the block is computed again: one
all-gather for each block, beside six all-reduces of as many elements, which count twice (so 1/12 of them). What is kept
is offloaded like any saved tensor (P_a+cpu).

Autograd runs the same graph on each of these ranks, so they gather in the same order.
"""

from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.pending import SideBySide
from zeroshard.traffic import Purpose

LABEL = "checkpoint"


class CheckpointPartition:
    """Divides tensors that are the same on all ranks of `comm`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def takes(self, tensor: Tensor) -> bool:
        """Whether to divide a tensor: contiguous activations are; masks and positions are kept whole."""
        return tensor.requires_grad and tensor.is_contiguous() and tensor.numel() > 0

    def part(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's part [S] of a tensor; the last ends in padding where they are uneven."""
        flat, rank = tensor.detach().view(-1), self._comm.mesh.rank
        size = -(-tensor.numel() // self._comm.mesh.ranks)
        part = flat.new_zeros(size)
        own = flat[size * rank : size * (rank + 1)]
        part[: own.numel()].copy_(own)
        self._plan(tensor.numel())
        return part

    def whole(self, part: Tensor, shape: torch.Size) -> Tensor:
        """The tensor of which the ranks have parts [S]; a collective call."""
        comm, numel, size = self._comm, shape.numel(), part.numel()
        if comm.operands is None:
            parts = part.new_empty(size * comm.mesh.ranks)
            comm.gather(parts, part, Purpose.GATHER_CHECKPOINTS, LABEL, parts.numel() - numel).wait()
            return parts[:numel].view(shape)
        shown: SideBySide = comm.side_by_side(part, numel, Purpose.GATHER_CHECKPOINTS, LABEL)
        shown.wait()
        whole = part.new_empty(numel)
        for rank, place in enumerate(whole.split(size)):
            place.copy_(shown.of(rank, (place.numel(),)))
        shown.done()
        return whole.view(shape)

    def _plan(self, elements: int) -> None:
        """Add the elements to the planned count of one gather."""
        count: Any = self._comm.counts[Purpose.GATHER_CHECKPOINTS]
        count.planned = (count.planned or 0) + elements
