"""Ranks that work on the same data are given the same batches: a checksum of them in messages that are sent anyway.

The checksum is of shapes, and of one sum over the bits of each tensor, weighted by row. Sums stay on the device until
the message is made, which waits for the device by itself.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zeroshard.errors import BatchError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTOR = 1_000_003  # of the sums of earlier tensors, as they are added up
ROWS = 2**20  # the weights of rows begin anew after so many


class SameBatches:
    """The batches of a step.

    Args:
        together: groups of ranks, each of which works on the same data.

    Attributes:
        watched: whether any group has several ranks; else nothing is computed or sent.
    """

    def __init__(self, together: Sequence[Sequence[int]]) -> None:
        self._together = together
        self.watched = any(len(ranks) > 1 for ranks in together)
        self._shapes, self._sums = 0, dict[torch.device, Tensor]()  # one on each device

    def add(self, batch: Any) -> None:
        """Take in what this rank was given."""
        if not self.watched:
            return
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                self._shapes = zlib.crc32(f"{list(leaf.shape)} {leaf.dtype}".encode(), self._shapes)
                total = _sum(leaf.detach())
                if type(total) is Tensor and not total.is_meta:  # neither a rehearsal's nor a plan's
                    self._sums[total.device] = self._sums.get(total.device, 0) * FACTOR + total

    def read(self) -> tuple[int, ...]:
        """The checksum of the step so far; nothing where no ranks are compared. Waits for the device."""
        if not self.watched:
            return ()
        sums = [int(total) for total in self._sums.values()]
        return (zlib.crc32(struct.pack(f"<{len(sums)}q", *sums), self._shapes),)

    def clear(self) -> None:
        """The step is over."""
        self._shapes = 0
        self._sums.clear()

    def check(self, checksums: Sequence[int], step: int) -> None:
        """Compare the checksums of all ranks; the same on all of them.

        Raises:
            BatchError: ranks that work on the same data were given different batches.
        """
        if not self.watched:
            return
        for number, ranks in enumerate(sorted(self._together, key=min)):
            other = next((rank for rank in ranks if checksums[rank] != checksums[ranks[0]]), None)
            if other is not None:
                raise BatchError(
                    f"In step {step + 1} the ranks {ranks[0]} and {other} were given different batches, and both work "
                    f"on the data of data rank {number}: they hold parts or stages of one model. Give every rank the "
                    f"batch of its engine.data_rank, not of its rank, such as DistributedSampler(dataset, "
                    f"num_replicas=engine.data_ranks, rank=engine.data_rank), with one seed."
                )


@torch.no_grad()
def _sum(tensor: Tensor) -> Tensor:
    """One number in which values and the order of rows show; exact, so equal wherever the bits are."""
    if tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.view(INTEGERS[tensor.dtype.itemsize])
    if not tensor.dim():
        return tensor.to(torch.int64)
    rows = tensor.sum(dim=tuple(range(1, tensor.dim())), dtype=torch.int64) if tensor.dim() > 1 else tensor
    weights = torch.arange(1, len(rows) + 1, device=rows.device).remainder_(ROWS)
    return (rows.to(torch.int64) * weights).sum()
