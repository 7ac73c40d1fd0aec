"""The mean of the ranks' copies of a slice, summed in rank order."""

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Arena

CHUNK = 2**16  # elements that are added over the ranks at a time, so that sums stay in the cache
LAUNCH = 2**24  # on GPUs, so that each launch has enough to do


def add_mean(
    comm: Comm, into: torch.Tensor, copies: list[torch.Tensor], arena: Arena, add: bool, apart: bool, divisor: int
) -> None:
    """Set `into` [S] to the mean of the ranks' copies [S], or add that to it; summed in rank order, in fp32 at least.

    Args:
        apart: whether `into` overlaps no copy after the second.
        divisor: of the sum; the number of data ranks behind it.
    """
    sums = torch.promote_types(copies[0].dtype, torch.float32)
    at_once = apart and not add and into.dtype == sums
    chunk = CHUNK if into.device.type == "cpu" else LAUNCH
    scratch = None if at_once else arena.take(min(chunk, into.numel()), sums, "sum over ranks")
    if not comm.mesh.platform.skips((len(copies) + 1) * copies[0].nbytes + into.nbytes, len(copies) + 1):
        _sum(into, copies, chunk, scratch, add, divisor)
    if scratch is not None:
        arena.give(scratch)


def _sum(
    into: torch.Tensor, copies: list[torch.Tensor], chunk: int, scratch: torch.Tensor | None, add: bool, divisor: int
) -> None:
    sums = torch.promote_types(copies[0].dtype, torch.float32)
    for part, *others in zip(into.split(chunk), *(copy.split(chunk) for copy in copies), strict=True):
        mean = part if scratch is None else scratch[: part.numel()]
        if others[0].dtype == sums:
            torch.add(others[0], others[1], out=mean)
        else:
            mean.copy_(others[0]).add_(others[1])
        for other in others[2:]:
            mean.add_(other)
        mean.mul_(1.0 / divisor)
        if scratch is not None:
            part.add_(mean) if add else part.copy_(mean)
