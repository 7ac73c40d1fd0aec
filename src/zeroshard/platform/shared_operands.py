"""Tensors of all ranks side by side in shared memory: the operands of sums and gathers of activations.

Each rank copies its tensor into a buffer that the others can read, and signals. Buffers take turns, so that an operation
may begin while another is under way; one is written again only when all ranks have read it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.platform.shared_memory import SharedMemory, Signal

TURNS = 4  # buffers of a rank


class SharedOperands:
    """The buffers of one rank, and its view of the others'."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * TURNS
        self._count = 0

    @property
    def used(self) -> dist.Work | None:
        """Work that ends when the next buffer may be written; None if it may be now."""
        number = self._count - TURNS + 1
        return self._memory.work(Signal.READ, number) if number > 0 else None

    def put(self, x: torch.Tensor) -> "Operands":
        """Show `x` to the other ranks; `used` has ended."""
        turn, memory = self._count % TURNS, self._memory
        if self._buffers[turn].numel() < x.nbytes:
            self._buffers[turn] = memory.mine(max(x.nbytes, 2 * self._buffers[turn].numel()), torch.uint8)
        buffer = self._buffers[turn]
        if x.nbytes:
            buffer[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            memory.publish(f"operand {turn}", buffer)
        memory.post(Signal.REDUCE)
        self._count += 1
        return Operands(memory, f"operand {turn}", x)


class Operands(dist.Work):
    """The tensors of all ranks, once the work is done; to be read before `done`."""

    def __init__(self, memory: SharedMemory, label: str, own: torch.Tensor) -> None:
        super().__init__()
        self._memory, self._label, self._own = memory, label, own
        self._arrived = memory.work(Signal.REDUCE)

    def is_completed(self) -> bool:
        """Whether all are there."""
        return self._arrived.is_completed()

    def wait(self, timeout: timedelta = timedelta(seconds=300)) -> bool:
        """Wait for all."""
        return self._arrived.wait(timeout)

    def of(self, rank: int, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """The tensor of a rank, which has that shape."""
        size = torch.Size(shape)
        if rank == self._memory.rank or not size.numel():
            return self._own if rank == self._memory.rank else self._own.new_empty(size)
        return self._memory.theirs(rank, self._label, 0, size.numel(), self._own.dtype).view(size)

    def done(self) -> None:
        """This rank has read them all."""
        self._memory.post(Signal.READ)
