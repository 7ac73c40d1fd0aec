"""A disk as a tier: one file without a name per rank, in which every tensor has an extent of whole pages.

[Note: two ways into the file] Whole pages between page-aligned memory and the file go past the kernel's cache
(O_DIRECT) where the file system can; the last part of a page, and tensors that are not page-aligned, go through it.
"""

import contextlib
import errno
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.errors import OffloadError
from zeroshard.memory.host import PAGE, fresh_pages, in_pages
from zeroshard.memory.ledger import WAYS_OUT, Category, Ledger

PIECE = 2**23  # bytes of one read or write
PROBE = 2**25  # bytes of a measurement of the bandwidth


@dataclass(frozen=True, slots=True)
class Extent:
    """A place in the file: its offset, its bytes without padding of the last page, and the name of its content."""

    offset: int
    nbytes: int
    label: str


class Disk:
    """The tier "disk" of one rank. `read` and `write` may run on any thread, one at a time for each extent.

    Args:
        folder: of the file; made if only its last part is missing. The file has no name, so it ends with the process.
        ledger: records every extent, in whole pages; the unused rest of the last page is padding.
        timeout: seconds that one read or write may take.

    Raises:
        OffloadError: no file can be made there.
    """

    def __init__(self, folder: Path | str, ledger: Ledger, timeout: float) -> None:
        self.folder = folder = Path(folder)
        self._ledger, self._timeout = ledger, timeout
        if not folder.absolute().parent.exists():
            raise OffloadError(
                f"The folder {folder} cannot be made, because {folder.absolute().parent} does not exist; correct "
                f"offload.disk, or make {folder.absolute().parent} first."
            )
        try:
            folder.mkdir(exist_ok=True)
            self._file = _nameless(folder)
        except OSError as error:
            raise OffloadError(
                f"No file can be made in {folder} ({error.strerror}). Name another folder as offload.disk."
            ) from None
        self._direct = _directly(self._file)
        self._end = 0
        self._entries: list[tuple[Category, int, str, int]] = []
        self._bandwidth: tuple[float, float] | None = None
        self._slabs: dict[int, StorageWeakRef] = {}
        self._close = weakref.finalize(self, _close, {self._file, self._direct})

    def reserve(self, nbytes: int, category: Category, label: str, padding: int = 0) -> Extent:
        """A place for `nbytes`, whose blocks are allocated at once, so that a later write cannot find the disk full.

        Args:
            padding: bytes of it that hold no data.

        Raises:
            BudgetExceeded: the budget cannot hold it.
            OffloadError: the file system cannot.
        """
        size = in_pages(nbytes)
        self._ledger.check_room(category, size, label, "disk")
        free = 0
        try:
            facts = os.fstatvfs(self._file)
            free = facts.f_bavail * facts.f_frsize
            if size > free:  # posix_fallocate would fill the disk before it fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size:
                os.posix_fallocate(self._file, self._end, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise OffloadError(
                f"{label}: needs {size:,} bytes of the disk at {self.folder}, whose file system has {free:,} free "
                f"({error.strerror}). Free space there, name another folder as offload.disk, {WAYS_OUT['disk']}."
            ) from None
        extent = Extent(self._end, nbytes, label)
        unused = padding + size - nbytes
        self._ledger.take(category, size, label, unused, "disk")
        self._entries.append((category, size, label, unused))
        self._end += size
        return extent

    def slab(self, numel: int, dtype: torch.dtype, category: Category, label: str, padding: int = 0) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, zeroed, whose memory is the file; the kernel moves pages as needed.

        Pages in memory are the kernel's cache, which shrinks when memory is short. A disk that fails while a page is
        read ends the process (SIGBUS), since no call can raise the error.

        Raises:
            BudgetExceeded, OffloadError: as `reserve`.
        """
        extent = self.reserve(numel * dtype.itemsize, category, label, padding * dtype.itemsize)
        if not extent.nbytes:
            return torch.empty(0, dtype=dtype)
        pages = mmap.mmap(self._file, in_pages(extent.nbytes), flags=mmap.MAP_SHARED, offset=extent.offset)
        pages.madvise(mmap.MADV_SEQUENTIAL)
        slab = torch.frombuffer(pages, dtype=dtype, count=numel)
        storage = slab.untyped_storage()
        self._slabs[storage._cdata] = StorageWeakRef(storage)
        return slab

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a slab of this file."""
        found = self._slabs.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def write(self, extent: Extent, tensor: torch.Tensor) -> None:
        """Write a contiguous tensor of as many bytes into an extent.

        Raises:
            OffloadError: the disk fails or is too slow. The extent then holds neither its earlier content nor `tensor`;
                writing again fills it.
        """
        self._move(os.pwritev, "writing", extent, tensor)

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Fill a contiguous tensor of as many bytes from an extent.

        Raises:
            OffloadError: the disk fails or is too slow; `into` then holds a part.
        """
        self._move(os.preadv, "reading", extent, into)

    def bandwidth(self) -> tuple[float, float]:
        """Bytes per second of reading and of writing, measured once and before other threads use the disk.

        It is the speed of a short burst: a busy disk may be slower.

        Raises:
            OffloadError: the disk fails or is too slow.
        """
        if self._bandwidth is None:
            buffer = torch.frombuffer(fresh_pages(PROBE), dtype=torch.uint8)
            buffer.random_(generator=torch.Generator().manual_seed(0))  # no file system can compress these bytes
            probe = Extent(self._end, PROBE, "a probe of its speed")
            try:
                start = time.perf_counter()
                self.write(probe, buffer)
                self._flush(probe)
                written = time.perf_counter()
                self.read(probe, buffer)
                self._bandwidth = PROBE / (time.perf_counter() - written), PROBE / (written - start)
            finally:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)
        return self._bandwidth

    def close(self) -> None:
        """Close the file, and remove all extents from the ledger."""
        self._close()
        for category, nbytes, label, padding in self._entries:
            self._ledger.give(category, nbytes, label, padding, "disk")
        self._entries.clear()

    def _move(self, call: Callable[..., int], operation: str, extent: Extent, tensor: torch.Tensor) -> None:
        assert tensor.nbytes == extent.nbytes, f"{tensor.nbytes} bytes for {extent}"
        content = tensor.detach().view(-1).view(torch.uint8).numpy().data
        deadline, done = time.monotonic() + self._timeout, 0
        while done < extent.nbytes:
            left = min(PIECE, extent.nbytes - done)
            aligned = (tensor.data_ptr() + done) % PAGE == done % PAGE == 0 and left >= PAGE
            descriptor, count = (self._direct, left // PAGE * PAGE) if aligned else (self._file, left)
            try:
                moved = call(descriptor, [content[done : done + count]], extent.offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and descriptor != self._file:  # O_DIRECT needs larger blocks
                    self._direct = self._file
                    continue
                raise self._failure(operation, extent, done, str(error.strerror)) from None
            done += moved
            if not moved:
                raise self._failure(operation, extent, done, "the file ends there")
            if done < extent.nbytes and time.monotonic() > deadline:
                raise self._failure(operation, extent, done, f"slower than the {self._timeout:g} s of timeout")

    def _flush(self, extent: Extent) -> None:
        """Bring an extent onto the disk and out of the kernel's cache, so that reading it reads the disk."""
        try:
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failure("writing", extent, extent.nbytes, str(error.strerror)) from None

    def _failure(self, operation: str, extent: Extent, done: int, reason: str) -> OffloadError:
        return OffloadError(
            f"The disk at {self.folder} failed in {operation} {extent.label}, after {done:,} of {extent.nbytes:,} "
            f"bytes: {reason}. Memory and earlier checkpoints are as they were; repair the disk or name another "
            f"folder as offload.disk, and go on from the last checkpoint."
        )


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system without O_TMPFILE
        descriptor, name = tempfile.mkstemp(prefix="zeroshard-", dir=folder)
        os.unlink(name)
        return descriptor


def _directly(descriptor: int) -> int:
    """A second descriptor of the same file that bypasses the kernel's cache; the same one where O_DIRECT is refused."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # the cache need not read ahead
    except OSError:
        return descriptor
    return direct


def _close(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


Make = Callable[[int, torch.dtype], torch.Tensor]  # zeroed elements


class SimulatedDisk(Disk):
    """The tier "disk" of one rank in a rehearsal.

    Args:
        ledger: records every extent, in whole pages; the unused rest of the last page is padding.
        make: makes the elements of a slab, which is only counted.
    """

    def __init__(self, ledger: Ledger, make: Make) -> None:
        self._ledger, self._make, self._end = ledger, make, 0
        self._entries: list[tuple[Category, int, str, int]] = []

    def reserve(self, nbytes: int, category: Category, label: str, padding: int = 0) -> Extent:
        """A place for `nbytes`, of which `padding` bytes hold no data.

        Raises:
            BudgetExceeded: the budget cannot hold it.
        """
        size = in_pages(nbytes)
        unused = padding + size - nbytes
        self._ledger.take(category, size, label, unused, "disk")
        self._entries.append((category, size, label, unused))
        extent = Extent(self._end, nbytes, label)
        self._end += size
        return extent

    def slab(self, numel: int, dtype: torch.dtype, category: Category, label: str, padding: int = 0) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, of which `padding` elements hold no data.

        Raises:
            BudgetExceeded: the budget cannot hold it.
        """
        self.reserve(numel * dtype.itemsize, category, label, padding * dtype.itemsize)
        return self._make(numel, dtype)

    def write(self, extent: Extent, tensor: torch.Tensor) -> None:
        """Do nothing."""

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Do nothing."""

    def bandwidth(self) -> tuple[float, float]:
        """Without limit: reading and writing take no time."""
        return float("inf"), float("inf")

    def close(self) -> None:
        """Remove all extents from the ledger."""
        for category, nbytes, label, padding in self._entries:
            self._ledger.give(category, nbytes, label, padding, "disk")
        self._entries.clear()
