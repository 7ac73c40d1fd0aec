"""Memory that the ranks of one machine share: buffers which all of them map, and semaphores that signal ready buffers.

[Note: nothing stays behind] The memory is one file of each rank without a name in /dev/shm, which the other ranks open
through /proc; the kernel frees it with the last process, however that ends.

[Note: one file per rank] The kernel locks a file while its pages are reserved or written by calls, so ranks with one
file would wait for each other. The pages of rank 0's file are mapped, and over the own parts of other ranks pages of
theirs, at equal offsets.

[Note: room is taken early] The mapping is far larger than what is used. Pages are reserved when a buffer is made, so a
full /dev/shm is an error with a message then, and not a bus error in the middle of a step.
"""

import bisect
import contextlib
import ctypes
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
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
LEAST_PART = 2**18  # bytes of the smallest part of a common buffer that is mapped from its rank's own file
MOST_PARTS = 2**14  # such parts; the kernel allows a process 2**16 ranges
LEAST_COPY = 2**16  # bytes from which the kernel copies files into shared pages
FIXED = 0x10  # MAP_FIXED
POLL_SECONDS = 0.5  # between polls of whether the other ranks' processes still live


class Signal(IntEnum):
    """The signals of a rank to all others; each kind is counted apart."""

    GATHER = 0  # my slice is ready
    COPIED = 1  # I have copied yours
    REDUCE = 2  # my gradients are ready
    READ = 3  # I have read yours


class SharedMemory:
    """The mapped files and the semaphores in the first. All ranks of a group make it in one collective call.

    Args:
        rank: this rank's number in the group.
        processes: process ids of the group, by rank.
        descriptors: the open files, by rank.

    Raises:
        OSError: a file cannot be mapped.
    """

    def __init__(self, rank: int, processes: list[int], descriptors: list[int]) -> None:
        self.rank, self.ranks = rank, len(processes)
        self._descriptors = descriptors
        self._map = mmap.mmap(descriptors[0], _size(self.ranks))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._base = self._bytes.data_ptr()
        self._used = [0] * (self.ranks + 1)  # bytes of the common region and of each rank's; of those only this rank's
        self._slots: dict[str, int] = {}
        self._posted = dict.fromkeys(Signal, 0)
        self._taken = {(other, signal): 0 for other in range(self.ranks) for signal in Signal}
        self.others = [other for other in range(self.ranks) if other != rank]
        self._libc = _libc()
        self._apart: list[tuple[int, int, int]] = []  # ranges of the mapping with pages of other files than the first
        for other in range(1, self.ranks):
            self._map_apart(_region(1 + other, self.ranks), _region(2 + other, self.ranks), other)
        self._pidfds = {other: os.pidfd_open(processes[other]) for other in self.others}
        self._poll = select.poll()
        for pidfd in self._pidfds.values():
            self._poll.register(pidfd, select.POLLIN)
        self._position = threading.Lock()  # of the files
        weakref.finalize(self, _close, [*self._pidfds.values(), *descriptors])  # buffers that are still held stay valid
        _MADE.add(self)

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

    def copy(self, file: int, at: int, tensor: torch.Tensor) -> int:
        """Copy bytes of a file into the pages under a contiguous tensor; returns how many, 0 if it lies elsewhere.

        The kernel copies from its cache into pages that it need not clear and does not map here.
        """
        begin = start = tensor.data_ptr() - self._base
        if not 0 <= start < _size(self.ranks) or tensor.nbytes < LEAST_COPY:
            return 0
        for descriptor, first, stop in self._pieces(start, start + tensor.nbytes):
            with self._position, contextlib.suppress(OSError):  # files that the kernel cannot copy from
                os.lseek(descriptor, first, os.SEEK_SET)
                while start < stop and (count := os.sendfile(descriptor, file, at + start - begin, stop - start)):
                    start += count
            if start < stop:
                break
        return start - begin

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
        first, last = (start + nbytes * number // parts for number in (part, part + 1))
        try:
            for other in range(1, parts):
                self._map_part(start + nbytes * other // parts, start + nbytes * (other + 1) // parts, other)
            for descriptor, begin, end in self._pieces(first, last):
                os.posix_fallocate(descriptor, begin, end - begin)
        except OSError as error:
            raise PlanError(no_room(nbytes, str(error.strerror))) from None
        self._used[region] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        # A storage of its own, so that saving or copying a parameter does not take the whole mapping.
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start).view(dtype)

    def _map_part(self, first: int, last: int, rank: int) -> None:
        """Map the whole pages of a part of a common buffer from its rank's file, unless they are few."""
        first, last = -(-first // PAGE) * PAGE, last // PAGE * PAGE
        if last - first >= LEAST_PART and len(self._apart) < MOST_PARTS:
            self._map_apart(first, last, rank)

    def _map_apart(self, first: int, last: int, rank: int) -> None:
        descriptor, prot = self._descriptors[rank], mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | FIXED
        if self._libc.mmap(self._base + first, last - first, prot, flags, descriptor, first) != self._base + first:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        bisect.insort(self._apart, (first, last, descriptor))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The files under a range of the mapping, each with the range."""
        number = bisect.bisect_right(self._apart, start, key=lambda each: each[1])  # the first that ends later
        while start < stop:
            first, last, descriptor = self._apart[number] if number < len(self._apart) else (stop, stop, -1)
            if start < first:
                yield self._descriptors[0], start, min(first, stop)
            else:
                yield descriptor, start, min(last, stop)
                number += 1
            start = min(first if start < first else last, stop)

    def _semaphore(self, source: int, destination: int, signal: Signal) -> ctypes.c_void_p:
        return _semaphore(self._base, self.ranks, source, destination, signal)

    def _slot(self, rank: int, number: int) -> torch.Tensor:
        start = _head(self.ranks) + (rank * SLOTS + number) * 8
        return self._bytes[start : start + 8].view(torch.int64)


_MADE = weakref.WeakSet[SharedMemory]()


def copy_to_shared(file: int, at: int, tensor: torch.Tensor) -> int:
    """Copy bytes of a file from `at` on into a contiguous tensor by the kernel alone, if ranks share it.

    Returns:
        How many; 0 for a tensor in other memory.
    """
    return next(filter(None, (memory.copy(file, at, tensor) for memory in tuple(_MADE))), 0)


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
    try:
        if rank == 0 and room() < nbytes:
            offered["error"] = no_room(nbytes, "too little")
        else:
            descriptor, offered = offer(ranks, semaphores=rank == 0)
    except OSError as error:
        offered["error"] = f"{PLACE} cannot be used ({error})"
    every = agree_on(offered, "shared memory")
    errors = [str(each["error"]) for each in every if "error" in each]
    if errors:
        if descriptor >= 0:
            os.close(descriptor)
        return errors[0]
    problem, opened = "", list[int]()
    try:
        for other, (_, process) in enumerate(machines):
            opened.append(descriptor if other == rank else accept(process, every[other]))
        memory = SharedMemory(rank, [process for _, process in machines], opened)
    except OSError as error:
        problem = f"rank {rank} cannot map the memory of rank {min(len(opened), ranks - 1)} ({error})"
    problems = [found for found in agree_on(problem, "mapped") if found]
    return problems[0] if problems else memory


def offer(ranks: int, semaphores: bool = True) -> tuple[int, dict[str, Any]]:
    """Make a file for a rank; returns it open, and the facts with which other ranks open it.

    Args:
        semaphores: whether those of all ranks are in it.

    Raises:
        OSError: /dev/shm is missing, or cannot hold such a file.
    """
    descriptor = os.open(PLACE, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(descriptor, _size(ranks))
    if semaphores:
        _begin_semaphores(descriptor, ranks)
    facts = os.fstat(descriptor)
    return descriptor, {"descriptor": descriptor, "file": [facts.st_dev, facts.st_ino]}


def _begin_semaphores(descriptor: int, ranks: int) -> None:
    os.posix_fallocate(descriptor, 0, _region(0, ranks))
    libc = _libc()
    with mmap.mmap(descriptor, _region(0, ranks)) as head:
        base = ctypes.c_char.from_buffer(head)
        for source in range(ranks):
            for destination in range(ranks):
                for signal in Signal:
                    libc.sem_init(_semaphore(ctypes.addressof(base), ranks, source, destination, signal), 1, 0)
        del base


def accept(process: int, offered: dict[str, Any]) -> int:
    """Open the file of another rank, which runs as `process` on this machine, from its facts.

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


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, integer = ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_long]
    return libc


def _size(ranks: int) -> int:
    return _region(ranks + 1, ranks)


def _semaphore(base: int, ranks: int, source: int, destination: int, signal: Signal) -> ctypes.c_void_p:
    return ctypes.c_void_p(base + ((source * ranks + destination) * len(Signal) + signal) * SEMAPHORE)
