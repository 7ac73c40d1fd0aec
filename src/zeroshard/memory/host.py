"""Host memory as slabs of exact size, outside of torch's allocator.

So on a CPU torch's allocator holds the tier "device" alone. On a GPU each slab is registered with the driver in its
exact size, where torch's pinned allocator rounds up to powers of two.

[Note: pages are taken at once] A page of new memory is only taken when it is first touched, so a reading of
free memory would count promised pages as free. Slabs touch all their pages when they are made; too little memory is
an error then and not a killed process in the middle of a step.
"""

import contextlib
import ctypes
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.errors import BudgetExceeded
from zeroshard.memory.ledger import WAYS_OUT, Category, Ledger
from zeroshard.memory.limits import ROOT, find_rooms
from zeroshard.platform import accelerator

HOST = torch.device("cpu")
PAGE = mmap.PAGESIZE
TOUCH = 2**26  # bytes that are worth a thread which touches them
MADV_POPULATE_WRITE = 23  # Linux 5.14; not among the names of Python 3.11


def in_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def fresh_pages(nbytes: int, device: torch.device = HOST) -> mmap.mmap:
    """Zeroed memory of whole pages, registered with the device; it is freed with the last tensor that lies in it.

    Raises:
        OSError: the system lacks the memory.
        OffloadError: the device's driver refuses it.
    """
    pages = _Registered(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: touching takes three times as long
        pages.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    _touch(address, nbytes)
    pages.register(device, address)
    return pages


def _touch(address: int, nbytes: int) -> None:
    """Allocate all pages of a range ([Note: pages are taken at once]), in as many threads as torch has.

    A core zeroes less than 2 GB/s. The call releases Python's lock, which `mmap.madvise` does not; an older kernel
    refuses it.
    """
    threads = min(torch.get_num_threads(), -(-nbytes // TOUCH))
    each = in_pages(-(-nbytes // threads))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def touch(start: int) -> None:
        madvise(address + start, min(each, nbytes - start), MADV_POPULATE_WRITE)

    if threads == 1:
        touch(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(touch, range(0, nbytes, each)))


class _Registered(mmap.mmap):
    """Pages that a device copies from and to directly; unregistered before they are unmapped."""

    _unregister: Callable[[], object] | None = None

    def register(self, device: torch.device, address: int) -> None:
        self._unregister = accelerator.register(device, address, len(self))

    def __del__(self) -> None:
        if self._unregister is not None:
            self._unregister()


@dataclass(slots=True)
class _Entry:
    """A slab and its entry in the ledger; the reference keeps the id of its storage from being used again."""

    slab: torch.Tensor
    category: Category
    nbytes: int
    padding: int
    label: str


class HostMemory:
    """The tier "host" of one rank. All methods may be called by any thread.

    Args:
        ledger: records every slab, in whole pages; the unused rest of the last page is padding.
        device: the tier above; slabs are registered with an accelerator.
        root: folder of /proc and /sys.
        make: in a rehearsal, makes the elements of a slab, which is only counted.
        room: bytes that the rank may take in a rehearsal.
    """

    def __init__(
        self,
        ledger: Ledger,
        device: torch.device,
        root: Path = ROOT,
        make: Callable[[int, torch.dtype], torch.Tensor] | None = None,
        room: int = 0,
    ) -> None:
        self._ledger, self._device, self._root, self._make, self._room = ledger, device, root, make, room
        self._held: dict[int, _Entry] = {}  # by storage, because tensors without values have no address
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # of the pool, by bytes
        self._lent: dict[int, torch.Tensor] = {}  # of the pool, by storage
        self._lock = threading.RLock()

    def slab(self, numel: int, dtype: torch.dtype, category: Category, label: str, padding: int = 0) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, zeroed, page-aligned, of which `padding` elements hold no data.

        The memory is freed with its last view, after `free` or `close`.

        Raises:
            BudgetExceeded: the budget or the process's limits cannot hold it.
            OffloadError: the device's driver refuses it.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        size = in_pages(nbytes)
        with self._lock:
            slab = self._fresh(numel, dtype, category, label)
            entry = _Entry(slab, category, size, padding * dtype.itemsize + size - nbytes, label)
            self._ledger.take(category, size, label, entry.padding, "host")
            self._held[_storage_of(slab)] = entry
        return slab

    def free(self, slab: torch.Tensor) -> None:
        """Remove a slab from the ledger, given by any view of all of it; the caller keeps no view."""
        if slab.numel():
            with self._lock:
                self._strike_out(self._held.pop(_storage_of(slab)))

    def borrow(self, nbytes: int, category: Category = Category.BUFFERS) -> torch.Tensor:
        """`nbytes` uninitialised bytes, page-aligned, counted as `category`; return them with `give_back`.

        They come from a pool that never shrinks, because used memory costs a fraction of new pages. Free bytes of the
        pool count as buffers on the ledger.

        Raises:
            BudgetExceeded, OffloadError: as `slab`.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        size = in_pages(nbytes)
        with self._lock:
            spare = self._spare[size]
            block = spare.pop() if spare else self.slab(size, torch.uint8, category, "the pool of host memory")
            self._count_as(category, block)
            self._lent[_storage_of(block)] = block
        return block[:nbytes]

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return memory of `borrow`, or a view of all of it, to the pool."""
        if tensor.numel():
            with self._lock:
                block = self._lent.pop(_storage_of(tensor))
                self._count_as(Category.BUFFERS, block)
                self._spare[block.nbytes].append(block)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a slab of this memory."""
        return _storage_of(tensor) in self._held

    def check_room(self, nbytes: int, what: str, ranks: int = 1, category: Category = Category.BUFFERS) -> None:
        """Refuse bytes that the ledger's budget, the machine, the process's cgroups or its own limits cannot hold.

        Args:
            nbytes: number of bytes that this rank is about to take.
            what: name of their use, for the error.
            ranks: number of ranks of this machine that take as much at the same time.

        Raises:
            BudgetExceeded: with the tightest limit and the bytes that it leaves.
        """
        self._ledger.check_room(category, nbytes, what, "host")
        rooms = find_rooms(self._root) if self._make is None else []
        if not rooms:
            return
        after = {room: room.nbytes - nbytes * room.takers(ranks) for room in rooms}
        tightest = min(rooms, key=after.__getitem__)
        if after[tightest] < 0:
            found = f"{tightest.limit} leaves {max(0, tightest.nbytes):,}"
            raise BudgetExceeded(_too_little(what, nbytes, tightest.takers(ranks), found))

    def room(self, ranks: int) -> int:
        """Bytes that each of `ranks` ranks of this machine may still take."""
        if self._make is not None:
            return self._room
        rooms = find_rooms(self._root)
        return min((room.nbytes // room.takers(ranks) for room in rooms), default=0)

    def close(self) -> None:
        """Remove all slabs from the ledger; memory is freed with its last views."""
        with self._lock:
            for entry in self._held.values():
                self._strike_out(entry)
            self._held.clear()
            self._spare.clear()
            self._lent.clear()

    def _fresh(self, numel: int, dtype: torch.dtype, category: Category, label: str) -> torch.Tensor:
        if self._make is not None:
            return self._make(numel, dtype)
        size = in_pages(numel * dtype.itemsize)
        self.check_room(size, label, category=category)
        try:
            pages = fresh_pages(size, self._device)
        except OSError as error:
            found = f"the system has not that many in one piece ({error.strerror})"
            raise BudgetExceeded(_too_little(label, size, 1, found)) from None
        return torch.frombuffer(pages, dtype=dtype, count=numel)

    def _count_as(self, category: Category, block: torch.Tensor) -> None:
        entry = self._held[_storage_of(block)]
        if entry.category is not category:
            self._strike_out(entry)
            entry.category = category
            self._ledger.take(category, entry.nbytes, entry.label, entry.padding, "host")

    def _strike_out(self, entry: _Entry) -> None:
        self._ledger.give(entry.category, entry.nbytes, entry.label, entry.padding, "host")


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _too_little(what: str, nbytes: int, ranks: int, found: str) -> str:
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"{what}: needs {nbytes:,} bytes of host memory{each}; {found}. Free memory, {WAYS_OUT['host']}."
