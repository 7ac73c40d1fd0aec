"""Memory that the ranks of one machine share: buffers which all of them map, and semaphores that signal ready buffers.

[Note: nothing stays behind] The memory is a file without a name in /dev/shm, which the other ranks open through /proc;
the kernel frees it with the last process, however that ends.

[Note: room is taken early] The mapping is far larger than what is used. Pages are reserved when a buffer is made, so a
full /dev/shm is an error with a message then, and not a bus error in the middle of a step.
"""

import contextlib
import ctypes
import mmap
import os
import select
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.errors import PlanError

PLACE = "/dev/shm"  # where POSIX keeps shared memory
REGION = 2**38  # bytes of address space for the common region, and for that of each rank
PAGE = 4096
ALIGNMENT = 64
SEMAPHORE = 32  # bytes of a sem_t
SLOTS = 2**14  # buffers whose offsets a rank can publish
POLL_SECONDS = 0.5  # between polls of whether the other ranks' processes still live


class Signal(IntEnum):
    """The signals of a rank to all others; each kind is counted apart."""

    GATHER = 0  # my slice is ready
    COPIED = 1  # I have copied yours
    REDUCE = 2  # my gradients are ready
    READ = 3  # I have read yours


class SharedMemory:
    """The mapped file and the semaphores in it. All ranks of a group make it in one collective call.

    Args:
        rank: this rank's number in the group.
        processes: process ids of the group, by rank.
        descriptor: the open file.
    """

    def __init__(self, rank: int, processes: list[int], descriptor: int) -> None:
        self.rank, self.ranks = rank, len(processes)
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, _size(self.ranks))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._base = self._bytes.data_ptr()
        self._used = [0] * (self.ranks + 1)  # bytes of the common region and of each rank's; of those only this rank's
        self._slots: dict[str, int] = {}
        self._posted = dict.fromkeys(Signal, 0)
        self._taken = {(other, signal): 0 for other in range(self.ranks) for signal in Signal}
        self.others = [other for other in range(self.ranks) if other != rank]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pidfds = {other: os.pidfd_open(processes[other]) for other in self.others}
        self._poll = select.poll()
        for pidfd in self._pidfds.values():
            self._poll.register(pidfd, select.POLLIN)
        weakref.finalize(self, _close, [*self._pidfds.values(), descriptor])  # buffers that are still held stay valid

    def common(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D buffer in memory common to all ranks, which all make in the same order.

        Each rank reserves the pages of an even share of it.

        Raises:
            PlanError: no room.
        """
        return self._allocate(0, numel, dtype, self.rank, self.ranks)

    def mine(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D buffer of this rank, which the other ranks can read.

        Raises:
            PlanError: no room.
        """
        return self._allocate(1 + self.rank, numel, dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Give the whole pages under a tensor back to the kernel; no rank reads it any more.

        Its place in the mapping is not used again.
        """
        start = tensor.data_ptr() - self._base
        first, last = -(-start // PAGE) * PAGE, (start + tensor.nbytes) // PAGE * PAGE
        if first < last:
            with contextlib.suppress(OSError):  # a kernel without holes in files keeps the pages
                self._map.madvise(mmap.MADV_REMOVE, first, last - first)

    def is_common(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in common memory."""
        return 0 <= tensor.data_ptr() - self._base - _region(0, self.ranks) < REGION

    def publish(self, label: str, tensor: torch.Tensor) -> None:
        """Publish the offset of this rank's buffer under a name; all ranks publish names in the same order."""
        slot = self._slots.setdefault(label, len(self._slots))
        self._slot(self.rank, slot).fill_(tensor.data_ptr() - self._base)

    def theirs(self, rank: int, label: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements [start, start + numel) of the buffer that `rank` published under a name."""
        offset = int(self._slot(rank, self._slots[label])) + start * dtype.itemsize
        return self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def post(self, signal: Signal) -> None:
        """Signal every other rank; a rank that waits for the signal sees all earlier writes."""
        self._posted[signal] += 1
        for other in self.others:
            self._libc.sem_post(self._semaphore(self.rank, other, signal))

    def work(self, signal: Signal, number: int | None = None) -> "Signals":
        """Work that ends when every other rank has posted `number` times, by default as often as this one so far."""
        return Signals(self, signal, self._posted[signal] if number is None else number)

    def reach(self, source: int, signal: Signal, number: int, deadline: float) -> bool:
        """Wait until `source` has posted `number` times; False when it has not by `deadline` (of `time.time()`).

        Raises:
            DistNetworkError: a rank's process is gone.
        """
        semaphore = self._semaphore(source, self.rank, signal)
        while self._taken[source, signal] < number:
            if self._libc.sem_trywait(semaphore):
                until = min(deadline, time.time() + POLL_SECONDS)
                if self._libc.sem_timedwait(semaphore, ctypes.byref(_Timespec.at(until))):
                    if time.time() >= deadline:
                        return False
                    self._refuse_dead()
                    continue
            self._taken[source, signal] += 1
        return True

    def _refuse_dead(self) -> None:
        gone = {descriptor for descriptor, _ in self._poll.poll(0)}
        names = [str(rank) for rank, descriptor in self._pidfds.items() if descriptor in gone]
        if names:
            raise dist.DistNetworkError(f"the process of rank {', '.join(names)} is gone")

    def _allocate(self, region: int, numel: int, dtype: torch.dtype, part: int = 0, parts: int = 1) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        start = _region(region, self.ranks) + self._used[region]
        first, last = nbytes * part // parts, nbytes * (part + 1) // parts
        if first < last:
            try:
                os.posix_fallocate(self._descriptor, start + first, last - first)
            except OSError as error:
                raise PlanError(no_room(nbytes, str(error.strerror))) from None
        self._used[region] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        # A storage of its own, so that saving or copying a parameter does not take the whole mapping.
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start).view(dtype)

    def _semaphore(self, source: int, destination: int, signal: Signal) -> ctypes.c_void_p:
        return _semaphore(self._base, self.ranks, source, destination, signal)

    def _slot(self, rank: int, number: int) -> torch.Tensor:
        start = _head(self.ranks) + (rank * SLOTS + number) * 8
        return self._bytes[start : start + 8].view(torch.int64)


class Signals(dist.Work):
    """The posts of all other ranks, as work of torch.distributed."""

    def __init__(self, memory: SharedMemory, signal: Signal, number: int) -> None:
        super().__init__()
        self._memory, self._signal, self._number = memory, signal, number

    def is_completed(self) -> bool:
        """Whether all have posted."""
        return self._reach(0.0)

    def wait(self, timeout: timedelta = timedelta(seconds=300)) -> bool:
        """Wait until all have posted.

        Raises:
            TimeoutError: a rank has not posted in time.
            DistNetworkError: a rank's process is gone.
        """
        if not self._reach(time.time() + timeout.total_seconds()):
            raise TimeoutError
        return True

    def _reach(self, deadline: float) -> bool:
        memory = self._memory
        return all(memory.reach(rank, self._signal, self._number, deadline) for rank in memory.others)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def at(cls, when: float) -> "_Timespec":
        return cls(int(when), int(when % 1 * 1e9))


def share(rank: int, ranks: int, agree_on: Callable[[Any, str], list[Any]], nbytes: int) -> "SharedMemory | str":
    """Memory that all ranks share, or the reason why there is none; a collective call.

    Args:
        agree_on: gives every rank's value, in rank order.
        nbytes: bytes that will be needed.
    """
    machines = agree_on([machine(), os.getpid()], "which machine")
    if any(other != machines[0][0] or not other for other, _ in machines):
        return "the ranks are on different machines"
    descriptor, offered = -1, {}
    if rank == 0:
        try:
            if room() < nbytes:
                offered["error"] = no_room(nbytes, "too little")
            else:
                descriptor, offered = offer(ranks)
        except OSError as error:
            offered["error"] = f"{PLACE} cannot be used ({error})"
    offered = agree_on(offered, "shared memory")[0]
    if "error" in offered:
        return str(offered["error"])
    problem = ""
    try:
        descriptor = descriptor if rank == 0 else accept(machines[0][1], offered)
        memory = SharedMemory(rank, [process for _, process in machines], descriptor)
    except OSError as error:
        problem = f"rank {rank} cannot map the memory of rank 0 ({error})"
    problems = [found for found in agree_on(problem, "mapped") if found]
    return problems[0] if problems else memory


def offer(ranks: int) -> tuple[int, dict[str, Any]]:
    """Make the memory; returns the open file, and the facts with which other ranks open it.

    Raises:
        OSError: /dev/shm is missing, or cannot hold such a file.
    """
    descriptor = os.open(PLACE, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(descriptor, _size(ranks))
    os.posix_fallocate(descriptor, 0, _region(0, ranks))
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(descriptor, _region(0, ranks)) as head:
        base = ctypes.c_char.from_buffer(head)
        for source in range(ranks):
            for destination in range(ranks):
                for signal in Signal:
                    libc.sem_init(_semaphore(ctypes.addressof(base), ranks, source, destination, signal), 1, 0)
        del base
    facts = os.fstat(descriptor)
    return descriptor, {"descriptor": descriptor, "file": [facts.st_dev, facts.st_ino]}


def accept(process: int, offered: dict[str, Any]) -> int:
    """Open the file of rank 0, which runs as `process` on this machine, from its facts.

    Raises:
        OSError: the file cannot be reached, or is another one.
    """
    path = f"/proc/{process}/fd/{offered['descriptor']}"
    facts = os.stat(path)
    if [facts.st_dev, facts.st_ino] != offered["file"]:
        raise OSError(f"{path} is another file")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def machine() -> list[str]:
    """The kernel's boot and the namespace of process ids, equal for processes that can share memory; [] if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return [file.read().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return []


def room() -> int:
    """Free bytes in /dev/shm."""
    facts = os.statvfs(PLACE)
    return facts.f_bavail * facts.f_frsize


def no_room(nbytes: int, found: str) -> str:
    """The error of too little shared memory, with the way out."""
    return (
        f"Ranks that share memory need {nbytes:,} more bytes in {PLACE}, which has {room():,} free ({found}). "
        f"Enlarge it (in a container: --shm-size; else: mount -o remount,size=... {PLACE}), or set transport='network'."
    )


def _head(ranks: int) -> int:
    """Bytes of all semaphores."""
    return ranks * ranks * len(Signal) * SEMAPHORE


def _region(number: int, ranks: int) -> int:
    """The start of region `number`: 0 is common, 1 + r is rank r's."""
    first = -(-(_head(ranks) + ranks * SLOTS * 8) // PAGE) * PAGE
    return first + number * REGION


def _size(ranks: int) -> int:
    return _region(ranks + 1, ranks)


def _semaphore(base: int, ranks: int, source: int, destination: int, signal: Signal) -> ctypes.c_void_p:
    return ctypes.c_void_p(base + ((source * ranks + destination) * len(Signal) + signal) * SEMAPHORE)
