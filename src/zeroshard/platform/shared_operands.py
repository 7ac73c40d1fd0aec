"""Tensors of all ranks in shared memory: the operands of sums and gathers of activations.

Each rank copies its tensor into a buffer that the others can read, and signals. Several operations may be in flight,
and they end in any order, which is the same on all ranks: the n-th signal of a rank that it has read is of the n-th
operation to end. A buffer is written again when all ranks have read it.
"""

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.platform.shared_memory import SharedMemory, Signal

LEAST = 2**12  # bytes of a buffer
RESTING = 2  # buffers that the others may be reading still, before the oldest is waited for


class SharedOperands:
    """The buffers of one rank, and its view of the others'."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._ended = 0
        self._free: deque[tuple[int, str, torch.Tensor]] = deque()  # with the number of the operation's end
        self._made = 0

    @property
    def used(self) -> dist.Work | None:
        """Work that ends when the next buffer may be written; None if it may be written now."""
        return self._memory.work(Signal.READ, self._free[0][0]) if len(self._free) > RESTING else None

    def put(self, *pieces: torch.Tensor) -> "Operands":
        """Show pieces of one dtype to the other ranks, one after the other; called once `used` has ended."""
        nbytes = sum(piece.nbytes for piece in pieces)
        if len(self._free) > RESTING:
            _, label, buffer = self._free.popleft()
        else:
            label, buffer = f"operand {self._made}", torch.empty(0, dtype=torch.uint8)
            self._made += 1
        if buffer.numel() < max(nbytes, 1):  # empty too, as all ranks publish the same names
            buffer = self._memory.mine(max(nbytes, 2 * buffer.numel(), LEAST), torch.uint8)
        at = 0
        for piece in pieces:
            buffer[at : at + piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
            at += piece.nbytes
        self._memory.publish(label, buffer)
        self._memory.post(Signal.REDUCE)
        return Operands(self, label, buffer, pieces[0])

    def end(self, label: str, buffer: torch.Tensor) -> None:
        """Signal that this rank has read the operands of an operation."""
        self._ended += 1
        self._memory.post(Signal.READ)
        self._free.append((self._ended, label, buffer))

    @property
    def memory(self) -> SharedMemory:
        """The memory of the buffers."""
        return self._memory


class Operands(dist.Work):
    """The tensors of all ranks; valid from the end of the work until `done`."""

    def __init__(self, operands: SharedOperands, label: str, buffer: torch.Tensor, own: torch.Tensor) -> None:
        super().__init__()
        self._operands, self._label, self._buffer, self._own = operands, label, buffer, own
        self._arrived = operands.memory.work(Signal.REDUCE)

    def is_completed(self) -> bool:
        """Whether all have arrived."""
        return self._arrived.is_completed()

    def wait(self, timeout: timedelta = timedelta(seconds=300)) -> bool:
        """Wait for all."""
        return self._arrived.wait(timeout)

    def of(self, rank: int, shape: torch.Size | tuple[int, ...], first: int = 0) -> torch.Tensor:
        """A rank's tensor; of another rank, the elements of this shape from `first` on in its pieces."""
        size, memory = torch.Size(shape), self._operands.memory
        if rank == memory.rank:
            return self._own
        if not size.numel():
            return self._own.new_empty(size)
        return memory.theirs(rank, self._label, first, size.numel(), self._own.dtype).view(size)

    def done(self) -> None:
        """Release the tensors, once this rank has read all."""
        self._operands.end(self._label, self._buffer)
