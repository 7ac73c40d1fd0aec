"""Host memory as slabs of exact size, outside of torch's allocator.

So all that torch's allocator holds on a CPU is "the device", and on a GPU each slab is registered with its driver in
the size that it has, where torch's pinned allocator rounds up to powers of two.

[Note: pages are taken at once] A page of new memory is only taken when it is first touched, so a reading of
free memory would count promised pages as free. Slabs touch all their pages when they are made; too little memory is
an error then and not a killed process in the middle of a step.
"""

import contextlib
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.errors import BudgetExceeded
from zeroshard.memory.ledger import WAYS_OUT, Category, Ledger
from zeroshard.memory.limits import ROOT, find_rooms
from zeroshard.platform import accelerator

HOST = torch.device("cpu")
PAGE = mmap.PAGESIZE
TOUCH = 2**24  # bytes that are touched in one call, during which no other thread of Python runs
MADV_POPULATE_WRITE = 23  # Linux 5.14; not among the names of Python 3.11


def in_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def fresh_pages(nbytes: int, device: torch.device = HOST) -> mmap.mmap:
    """Zeroed memory of whole pages, registered with the device; it is freed with the last tensor that lies in it.

    Raises:
        OSError: there is no such memory.
        OffloadError: the device refuses it.
    """
    pages = _Registered(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: touching takes three times as long
        pages.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):  # an older kernel: see [Note: pages are taken at once]
        for start in range(0, nbytes, TOUCH):
            pages.madvise(MADV_POPULATE_WRITE, start, min(TOUCH, nbytes - start))
    pages.register(device)
    return pages


class _Registered(mmap.mmap):
    """Pages that a device copies from and to directly; they are unregistered before they are unmapped."""

    _unregister: Callable[[], object] | None = None

    def register(self, device: torch.device) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        self._unregister = accelerator.register(device, address, len(self))

    def __del__(self) -> None:
        if self._unregister is not None:
            self._unregister()


@dataclass(slots=True)
class _Entry:
    """A slab, held until it is freed so that no other gets its place, and what the ledger holds for it."""

    slab: torch.Tensor
    category: Category
    nbytes: int
    padding: int
    label: str


class HostMemory:
    """The tier "host" of one rank. All methods may be called by any thread.

    Args:
        ledger: holds every slab, in whole pages; what the last page does not need is padding.
        device: the tier above; slabs are registered with an accelerator.
        root: where /proc and /sys are.
        make: in a rehearsal, makes so many elements that are only counted, in the place of memory.
    """

    def __init__(
        self,
        ledger: Ledger,
        device: torch.device,
        root: Path = ROOT,
        make: Callable[[int, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self._ledger, self._device, self._root, self._make = ledger, device, root, make
        self._held: dict[int, _Entry] = {}  # by storage, as tensors without values have no address
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # of the pool, by bytes
        self._lent: dict[int, torch.Tensor] = {}  # of the pool, by storage
        self._lock = threading.RLock()

    def slab(self, numel: int, dtype: torch.dtype, category: Category, label: str, padding: int = 0) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, zeroed, page-aligned, of which `padding` elements hold nothing.

        The memory goes with the last view of it after `free` or `close`.

        Raises:
            BudgetExceeded: the budget or the process's limits cannot hold it.
            OffloadError: CUDA refuses it.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        size = in_pages(nbytes)
        with self._lock:
            slab = self._fresh(numel, dtype, category, label)
            entry = _Entry(slab, category, size, padding * dtype.itemsize + size - nbytes, label)
            self._ledger.take(category, size, label, entry.padding, "host")
            self._held[_place(slab)] = entry
        return slab

    def free(self, slab: torch.Tensor) -> None:
        """Take off the ledger what `slab` returned, or a view of all of it; the caller keeps no view."""
        if slab.numel():
            with self._lock:
                self._strike_out(self._held.pop(_place(slab)))

    def borrow(self, nbytes: int, category: Category = Category.BUFFERS) -> torch.Tensor:
        """`nbytes` uninitialised bytes, page-aligned, for something of `category`; hand them back with `give_back`.

        They come from a pool that never shrinks, because memory that is used again costs a fraction of new pages. Free
        bytes of the pool count as buffers on the ledger.

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
            self._lent[_place(block)] = block
        return block[:nbytes]

    def give_back(self, tensor: torch.Tensor) -> None:
        """Hand back what `borrow` returned, or a view of all of it."""
        if tensor.numel():
            with self._lock:
                block = self._lent.pop(_place(tensor))
                self._count_as(Category.BUFFERS, block)
                self._spare[block.nbytes].append(block)

    def check_room(self, nbytes: int, what: str, ranks: int = 1, category: Category = Category.BUFFERS) -> None:
        """Refuse what the ledger's budget, the machine, the process's cgroups or its own limits cannot hold.

        Args:
            nbytes: that this rank is about to take.
            what: they are for.
            ranks: of this machine that are about to take as much.

        Raises:
            BudgetExceeded: with the limit that is met first and what it leaves.
        """
        self._ledger.check_room(category, nbytes, what, "host")
        rooms = find_rooms(self._root) if self._make is None else []
        if not rooms:
            return
        after = {room: room.nbytes - nbytes * (ranks if room.shared else 1) for room in rooms}
        tightest = min(rooms, key=after.__getitem__)
        if after[tightest] < 0:
            found = f"{tightest.limit} leaves {max(0, tightest.nbytes):,}"
            raise BudgetExceeded(_too_little(what, nbytes, ranks if tightest.shared else 1, found))

    def close(self) -> None:
        """Take everything off the ledger; the memory goes with the last views."""
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
        entry = self._held[_place(block)]
        if entry.category is not category:
            self._strike_out(entry)
            entry.category = category
            self._ledger.take(category, entry.nbytes, entry.label, entry.padding, "host")

    def _strike_out(self, entry: _Entry) -> None:
        self._ledger.give(entry.category, entry.nbytes, entry.label, entry.padding, "host")


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _too_little(what: str, nbytes: int, ranks: int, found: str) -> str:
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"{what}: needs {nbytes:,} bytes of host memory{each}; {found}. Free memory, {WAYS_OUT['host']}."
