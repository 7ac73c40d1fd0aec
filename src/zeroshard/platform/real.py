"""This machine as it is: its clock, network, shared and host memory, disks, and the threads that serve them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from zeroshard.comm.shared_memory import SharedMemory, share
from zeroshard.comm.transport import Network
from zeroshard.memory import Disk, HostMemory, Room, find_rooms
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.transfers import TaskRunner, ThreadRunner
from zeroshard.platform import accelerator

executor_of: Callable[[torch.device, float], TaskRunner] = ThreadRunner  # tests put others in its place


class Platform:
    """Clock, network, memory and disk of a rank; `Rehearsal` overrides those that it imitates."""

    def now(self) -> float:
        """Seconds of a clock that the processes of a machine share."""
        return time.monotonic()

    def limit(self, device: torch.device, budget: int | None) -> None:
        """Let torch's allocator refuse what is beyond a GPU's budget in bytes; elsewhere the ledger alone does."""
        if budget is not None:
            accelerator.limit_memory(device, budget)

    def part(self, ranks: Sequence[int]) -> "Platform":
        """That of a mesh of some of the ranks."""
        return self

    def network(self, rank: int, ranks: int, device: torch.device) -> Network:
        """How tensors get from rank to rank."""
        return Network(rank, ranks, device)

    def share(
        self, rank: int, ranks: int, agree_on: Callable[[Any, str], list[Any]], nbytes: int
    ) -> SharedMemory | str:
        """Memory that all ranks share, or why there is none; a collective call.

        Args:
            agree_on: gives every rank's value, in rank order.
            nbytes: how much will be needed.
        """
        return share(rank, ranks, agree_on, nbytes)

    def decides(self, rank: int) -> bool:
        """Whether this rank decides, where one rank decides for all."""
        return rank == 0

    def skips(self, nbytes: int, operations: int) -> bool:
        """Whether operations on so many bytes, whose results do not matter, need not be carried out."""
        return False

    def rooms(self) -> list[Room]:
        """The limits of this process's memory."""
        return find_rooms()

    def host(self, ledger: Ledger, device: torch.device) -> HostMemory:
        """The memory of the host."""
        return HostMemory(ledger, device)

    def disk(self, folder: Path, ledger: Ledger, timeout: float) -> Disk:
        """A file in a folder.

        Raises:
            OffloadError: no file can be made there.
        """
        return Disk(folder, ledger, timeout)

    def executor(self, device: torch.device, timeout: float) -> TaskRunner:
        """What carries out copies between tiers and jobs of the host."""
        return executor_of(device, timeout)


REAL = Platform()
