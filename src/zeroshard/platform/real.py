"""The real platform: this machine's clock, network, shared and host memory, disks, and threads for transfers."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

from zeroshard.memory import Disk, HostMemory, Room, find_rooms
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.transfers import TaskRunner, ThreadRunner
from zeroshard.platform import accelerator
from zeroshard.platform.shared_memory import SharedMemory, share
from zeroshard.platform.transport import Network

executor_of: Callable[[torch.device, float], TaskRunner] = ThreadRunner  # tests replace it


class Platform:
    """Clock, network, memory and disk of a rank; `Rehearsal` overrides the methods that it imitates.

    Attributes:
        imitates: whether callers must check `skips`.
        measured: whether times are measured, so that equal work takes unequal ones.
        now: seconds of a clock that the processes of a machine share.
        beside_devices: gives a context in which a model runs where it was made, for a rehearsal to count its tensors.
    """

    imitates: ClassVar[bool] = False
    measured: bool = True
    now: Callable[[], float] = staticmethod(time.monotonic)
    beside_devices: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def limit(self, device: torch.device, budget: int | None) -> None:
        """Limit torch's allocator to a GPU's budget in bytes; on a CPU the ledger alone refuses."""
        accelerator.limit_memory(device, budget)

    def part(self, ranks: Sequence[int]) -> "Platform":
        """The platform of a mesh of some of the ranks."""
        return self

    def network(self, rank: int, ranks: int, device: torch.device) -> Network:
        """The transport over torch.distributed."""
        return Network(rank, ranks, device)

    def share(
        self, rank: int, ranks: int, agree_on: Callable[[Any, str], list[Any]], nbytes: int
    ) -> SharedMemory | str:
        """Memory that all ranks share, or the reason why there is none; a collective call.

        Args:
            agree_on: gives every rank's value, in rank order.
            nbytes: bytes that will be needed.
        """
        return share(rank, ranks, agree_on, nbytes)

    def decides(self, rank: int) -> bool:
        """Whether this rank decides, where one rank decides for all."""
        return rank == 0

    def skips(self, nbytes: int, operations: int) -> bool:
        """Whether to skip operations on so many bytes, because their results have no values."""
        return False

    def rooms(self) -> list[Room]:
        """The limits of this process's memory."""
        return find_rooms()

    def host(self, ledger: Ledger, device: torch.device) -> HostMemory:
        """The memory of the host."""
        return HostMemory(ledger, device)

    def disk(self, folder: Path, ledger: Ledger, timeout: float) -> Disk:
        """The tier "disk", in a file of a folder.

        Raises:
            OffloadError: no file can be made there.
        """
        return Disk(folder, ledger, timeout)

    def executor(self, device: torch.device, timeout: float) -> TaskRunner:
        """The runner of copies between tiers and of host jobs."""
        return executor_of(device, timeout)


REAL = Platform()
