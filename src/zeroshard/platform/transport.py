"""Transports between ranks: torch.distributed, or memory that the ranks of one machine share.

[Note: rotations] gloo's all-gather and reduce-scatter cost two to four times the CPU time of an exchange between
neighbours, and its reduce-scatter twice the bytes. So on CPUs a gather or an exchange is N-1 rotations: in the k-th,
each rank sends to the k-th after it the slice for it, straight from and into the flat buffers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.platform.accelerator import is_accelerator
from zeroshard.platform.shared_memory import SharedMemory, Signal, Signals

MOST_ROTATIONS = 8  # with more ranks their zero-length messages cost more than they save

Scratch = Callable[[int], torch.Tensor]  # a buffer of a number of elements, from an arena
Group = dist.ProcessGroup | None
Sizes = list[int] | None
Bounds = Sequence[int] | None  # N + 1 places in a buffer between which the ranks' slices lie; None for even ones


class Several(dist.Work):
    """Several works as one, which ends when all have ended."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = timedelta(seconds=300)) -> bool:
        """Wait for all; works that ended before the timeout stay ended."""
        while self._works:
            self._works[0].wait(timeout)
            self._works.pop(0)
        return True


class Arrival:
    """The ranks' copies of this rank's slice, complete once the work is done.

    Attributes:
        scratch: the buffer of the copies, returned after use; None where they are read in place.
    """

    def __init__(self, copies: Callable[[], list[torch.Tensor]], scratch: torch.Tensor | None) -> None:
        self._copies, self.scratch = copies, scratch

    @property
    def copies(self) -> list[torch.Tensor]:
        """The copies [S], in rank order."""
        return self._copies()


class Network:
    """torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self._rank, self._ranks = rank, ranks
        self._rotates = not is_accelerator(device) and ranks <= MOST_ROTATIONS

    def gather(self, full: torch.Tensor, own: torch.Tensor, group: Group, bounds: Bounds = None) -> dist.Work:
        """Start to fill `full` [N*S] with all ranks' `own` [S], which may be this rank's part of it."""
        if not self._rotates and bounds is None:
            return self.all_gather(full, own, group)
        parts = [part_of_rank(full, rank, self._ranks, bounds) for rank in range(self._ranks)]
        if not same_place(parts[self._rank], own):
            parts[self._rank].copy_(own)
        if not self._rotates:  # all-gathers of backends take even slices alone
            sent = (self.broadcast(part, rank, group) for rank, part in enumerate(parts) if part.numel())
            return Several([work for work in sent if work is not None])
        works = []
        for step in range(1, self._ranks):
            to, source = (self._rank + step) % self._ranks, (self._rank - step) % self._ranks
            works.append(self._rotate(parts[source], source, own, to, group))
        return Several(works)

    def exchange(
        self, full: torch.Tensor, group: Group, scratch: Scratch, bounds: Bounds = None
    ) -> tuple[dist.Work, Arrival]:
        """Start to send every rank its slice of `full` [N*S], and to receive all copies of this rank's own."""
        size = part_of_rank(full, self._rank, self._ranks, bounds).numel()
        if not self._rotates:
            into = scratch(self._ranks * size)
            sizes = None if bounds is None else [high - low for low, high in pairwise(bounds)]
            work = self.all_to_all(into, full, sizes and [size] * self._ranks, sizes, group)
            return work, Arrival(lambda: list(into.view(self._ranks, size)), into)
        parts = [part_of_rank(full, rank, self._ranks, bounds) for rank in range(self._ranks)]
        others = scratch((self._ranks - 1) * size)
        copies = {self._rank: parts[self._rank]}
        works = []
        for step in range(1, self._ranks):
            to, source = (self._rank + step) % self._ranks, (self._rank - step) % self._ranks
            copies[source] = others[(step - 1) * size : step * size]
            works.append(self._rotate(copies[source], source, parts[to], to, group))
        return Several(works), Arrival(lambda: [copies[rank] for rank in range(self._ranks)], others)

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, group: Group) -> dist.Work:
        """Start to fill `full` [N*S] with all ranks' `own` [S]."""
        work: dist.Work = dist.all_gather_single(full, own, group=group, async_op=True)
        return work

    def all_to_all(
        self, into: torch.Tensor, out: torch.Tensor, receives: Sizes, sends: Sizes, group: Group
    ) -> dist.Work:
        """Start to send each rank its part of `out`, and to receive `into`; even parts where no sizes are given."""
        work: dist.Work = dist.all_to_all_single(into, out, receives, sends, group=group, async_op=True)
        return work

    def all_to_all_rows(
        self, into: torch.Tensor, rows: torch.Tensor, receives: list[int], sends: list[int], group: Group
    ) -> dist.Work:
        """Start to send each rank its number of `rows` [R, ...], and to receive each rank's in `into` [M, ...]."""
        return self.all_to_all(into, rows, receives, sends, group)

    def all_reduce(self, tensor: torch.Tensor, group: Group, maximum: bool) -> dist.Work:
        """Start to overwrite `tensor` with the sum, or with the elementwise maximum, over all ranks."""
        kind = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work: dist.Work = dist.all_reduce(tensor, kind, group=group, async_op=True)
        return work

    def gather_frames(self, frame: bytes, group: Group) -> tuple[dist.Work | None, Callable[[], list[bytes]]]:
        """Start to send every rank a frame of equal length on all; the second result gives all, once complete."""
        mine = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        everyone = torch.empty(self._ranks * len(frame), dtype=torch.uint8)
        work = dist.all_gather_single(everyone, mine, group=group, async_op=True)
        return work, lambda: [part.numpy().tobytes() for part in everyone.split(len(frame))]

    def broadcast(self, tensor: torch.Tensor, source: int, group: Group) -> dist.Work | None:
        """Start to overwrite `tensor` with rank `source`'s."""
        work: dist.Work | None = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
        return work

    def send(self, tensor: torch.Tensor, peer: int, tag: int, group: Group) -> dist.Work | None:
        """Start to send `tensor` to a rank."""
        sent = tensor.to("cpu") if _is_closed_to(group, tensor) else tensor
        return dist.isend(sent, group=group, group_dst=peer, tag=tag)

    def receive(self, into: torch.Tensor, peer: int, tag: int, group: Group) -> dist.Work | None:
        """Start to fill `into` with a rank's tensor."""
        if not _is_closed_to(group, into):
            return dist.irecv(into, group=group, group_src=peer, tag=tag)
        staged = torch.empty_like(into, device="cpu")
        work = dist.irecv(staged, group=group, group_src=peer, tag=tag)
        return None if work is None else _StagedMessage(work, staged, into)

    def _rotate(self, into: torch.Tensor, source: int, out: torch.Tensor, to: int, group: Group) -> dist.Work:
        sends, receives = [0] * self._ranks, [0] * self._ranks
        sends[to], receives[source] = out.numel(), into.numel()
        return self.all_to_all(into, out, receives, sends, group)


class _StagedMessage(dist.Work):
    """A message that arrives in host memory; the wait copies it to the device."""

    def __init__(self, work: dist.Work, staged: torch.Tensor, into: torch.Tensor) -> None:
        super().__init__()
        self._work, self._staged, self._into = work, staged, into

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._into.copy_(self._staged)
        return True


def _is_closed_to(group: Group, tensor: torch.Tensor) -> bool:
    """Whether a message goes through host memory: gloo reads device memory in collectives alone."""
    return is_accelerator(tensor.device) and dist.get_backend(group) == "gloo"


def part_of_rank(full: torch.Tensor, rank: int, ranks: int, bounds: Bounds) -> torch.Tensor:
    """The slice of a rank in a buffer [N*S]."""
    size = full.numel() // ranks
    low, high = (rank * size, (rank + 1) * size) if bounds is None else (bounds[rank], bounds[rank + 1])
    return full[low:high]


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors begin at the same element of the same memory."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


class Shared:
    """Memory that all ranks map: common parameters need a signal and no gather, and gradients are read in place.

    Attributes:
        memory: as given.
        under_way: exchanges that this rank has not read yet, in the order in which all ranks must read them, each with
            its reader: a signal of a read does not say which exchange was read.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.under_way: deque[tuple[object, Any]] = deque()

    def gather(self, full: torch.Tensor, own: torch.Tensor, label: str, bounds: Bounds = None) -> dist.Work:
        """Start to fill `full` [N*S]: if it is common, wait for the signals of the owners that wrote it."""
        if self.memory.is_common(full):
            self.memory.post(Signal.GATHER)
            return self.memory.work(Signal.GATHER)
        self.memory.publish(label, own)
        self.memory.post(Signal.GATHER)
        return _Copying(self.memory, full, own, label, bounds)

    def exchange(self, full: torch.Tensor, label: str, bounds: Bounds = None) -> tuple[dist.Work, Arrival]:
        """Show every rank its slice of `full` [N*S], and read all copies of this rank's own."""
        memory = self.memory
        memory.publish(label, full)
        memory.post(Signal.REDUCE)
        own = part_of_rank(full, memory.rank, memory.ranks, bounds)
        start, size = int(own.storage_offset() - full.storage_offset()), own.numel()

        def copies() -> list[torch.Tensor]:
            ranks = range(memory.ranks)
            return [
                own if rank == memory.rank else memory.theirs(rank, label, start, size, full.dtype) for rank in ranks
            ]

        return memory.work(Signal.REDUCE), Arrival(copies, None)


class _Copying(dist.Work):
    """Copies the other ranks' slices out of their memory once they are complete, and waits until all have copied."""

    def __init__(self, memory: SharedMemory, full: torch.Tensor, own: torch.Tensor, label: str, bounds: Bounds) -> None:
        super().__init__()
        self._bounds = bounds
        self._memory, self._full, self._own, self._label = memory, full, own, label
        self._arrived = memory.work(Signal.GATHER)
        self._copied: Signals | None = None

    def is_completed(self) -> bool:
        return self._copied is not None and self._copied.is_completed()

    def wait(self, timeout: timedelta = timedelta(seconds=300)) -> bool:
        self._arrived.wait(timeout)
        if self._copied is None:
            for rank in range(self._memory.ranks):
                part = part_of_rank(self._full, rank, self._memory.ranks, self._bounds)
                if rank != self._memory.rank:
                    part.copy_(self._memory.theirs(rank, self._label, 0, part.numel(), self._own.dtype))
                elif not same_place(part, self._own):
                    part.copy_(self._own)
            self._memory.post(Signal.COPIED)
            self._copied = self._memory.work(Signal.COPIED)
        return self._copied.wait(timeout)
