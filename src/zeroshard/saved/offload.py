"""Activation offload: saved tensors are copied to the host in the forward, and back before the backward reads them.

vDNN (Rhu et al., 1602.08124, section 3) moves the input of each layer; here it is each saved tensor, by
`torch.autograd.graph.saved_tensors_hooks`, with several copies in flight.

A copy moves a region (`storages`).

[Note: changed in place] With hooks torch does not check whether a saved tensor was changed before the backward. So the
version is recorded, and compared after the copy, or on reading if the tensor never left. As in torch itself, writes
through `.data` are not detected. A backward that writes into its own saved tensor, as that of a fused loss scales its
gradient, needs no wait for a copy under way: the write spoils a copy that the version keeps from being read.

[Note: dropped graphs] Handles belong to the graph. When it drops them, with or without a backward, their memory is
returned at once, or at the next `pack`, `unpack` or `settle` if a copy is pending: a graph may be dropped anywhere,
even inside a transfer, so dropping never waits.
"""

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import Task, Transfers
from zeroshard.saved.kept import changed_in_place
from zeroshard.saved.storages import SMALLEST, extent_of
from zeroshard.traffic import Purpose

PATIENCE = 4  # times the window: requests for others after which an unused copy on the device is dropped


class ActivationStore:
    """Keeps saved tensors on the host between forward and backward.

    Args:
        link: copies them, as `ACTIVATIONS_DOWN` and `ACTIVATIONS_UP`.
        host: lends the memory, and enters it on the ledger as activations.
        ledger: counts their bytes on the device while a step is recorded or where the device has a budget; close to
            that budget fewer copies are under way.
        smallest: bytes; smaller tensors stay where they are.
        window: number of copies to the host at a time, and of prefetched regions; at least 1.

    Attributes:
        moves: whether it copies any tensor.
        how: what it does with them.
        varies: whether bytes on the device depend on values.

    `pack` and `unpack` are the two hooks of `torch.autograd.graph.saved_tensors_hooks`. Parameters and views of them
    are not for `pack`: an optimizer changes them in place, and they are on the device anyway.
    """

    moves, how, varies = True, "sent to the host", False

    def __init__(
        self, link: Transfers, host: HostMemory, ledger: Ledger, smallest: int = SMALLEST, window: int = 2
    ) -> None:
        self._link, self._host, self._ledger = link, host, ledger
        self._smallest, self._window = smallest, window
        self._regions: dict[_Key, _Region] = {}
        self._saved: dict[int, _Region] = {}  # by number of the handle
        self._order: list[int] = []  # the numbers of live handles, ascending
        self._made = 0
        self._saving: list[_Region] = []  # with a copy to the host under way, oldest first
        self._fetched: dict[_Region, int] = {}  # on the device again, or being copied there: number of the last request
        self._requests = 0
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()
        ledger.reclaimers.insert(0, self._reclaim)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Start to copy a saved tensor to the host; returns a handle for `unpack`, or None if it stays.

        Raises:
            BudgetExceeded: the host has no room, or the device none for a single copy.
            OffloadError: an earlier copy failed.
        """
        extent = extent_of(tensor, self._smallest)
        if extent is None:
            return None
        with self._locked():
            key = (tensor.untyped_storage()._cdata, *extent, tensor._version)
            region = self._regions.get(key) or self._save(tensor, key)
            handle = _Handle(self._made, region, tensor)
            self._made += 1
            region.readers += 1
            self._saved[handle.number] = region
            self._order.append(handle.number)
            weakref.finalize(handle, self._on_drop, handle.number).atexit = False
        return handle

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor, back on its device; prefetches the tensors packed just before it.

        Raises:
            BudgetExceeded: the device cannot hold it.
            OffloadError: it was changed in place since it was saved, or a copy failed.
        """
        assert isinstance(saved, _Handle)
        region = saved.region
        with self._locked():
            self._requests += 1
            for other in [other for other in self._saving if other.readers == 0]:
                self._finish_saving(other)  # a backward packs nothing, so `pack` would not free the source
            region.check()
            if region.changed:
                raise changed_in_place(saved.shape, saved.dtype)
            self._fetch(region)
            self._prefetch_before(saved.number)
            self._finish_fetch(region)
            self._drop_idle_copies()
            return saved.tensor()

    def settle(self) -> None:
        """Wait for all pending copies, and drop prefetched activations; at the end of a step.

        Afterwards the store holds nothing on the device, and on the host only tensors that live graphs need.

        Raises:
            OffloadError: a copy failed.
        """
        with self._locked():
            while self._saving:
                self._finish_saving(self._saving[0])
            for region in list(self._fetched):
                self._drop_copy(region)

    def _save(self, tensor: torch.Tensor, key: "_Key") -> "_Region":
        """Begin to copy a region to the host."""
        nbytes = key[2] - key[1]
        while self._saving and (len(self._saving) >= self._window or not self._fits(nbytes)):
            self._finish_saving(self._saving[0])
        self._ledger.check_room(Category.ACTIVATIONS, nbytes, "saving an activation")
        region = _Region(tensor, key, self._host)
        assert region.source is not None
        region.saving = self._link.copy(region.source, region.saved, Purpose.ACTIVATIONS_DOWN, "activations")
        self._saving.append(region)
        self._regions[key] = region
        self._note(region)
        return region

    def _finish_saving(self, region: "_Region") -> None:
        """Wait for a copy to the host, and free its source."""
        self._saving.remove(region)
        task, region.saving = region.saving, None
        assert task is not None
        try:
            task.wait()
            region.check()
            region.source = None  # kept if the copy failed
            self._note(region)
        finally:
            self._free_if_done(region)

    def _fetch(self, region: "_Region") -> None:
        """Begin to copy a region to the device, unless it is there."""
        if region.source is not None:
            return
        if region.copy is None:
            for other in list(self._fetched):
                if not self._fits(region.nbytes):
                    self._drop_copy(other)
            self._ledger.check_room(Category.ACTIVATIONS, region.nbytes, "fetching an activation")
            region.copy = torch.empty(region.saved.shape, dtype=region.saved.dtype, device=region.device)
            region.fetching = self._link.copy(region.saved, region.copy, Purpose.ACTIVATIONS_UP, "activations")
            self._note(region)
        self._fetched[region] = self._requests

    def _prefetch_before(self, number: int) -> None:
        """Begin to prefetch the regions packed before a handle, since a backward reads in reverse."""
        current = self._saved[number]
        ahead = {region for region in self._fetched if region.fetching is not None} - {current}
        at = bisect_left(self._order, number)
        while len(ahead) < self._window and at > 0:
            at -= 1
            region = self._saved[self._order[at]]
            if region is not current and region.copy is None and not region.changed:
                if region.source is None and not self._fits(region.nbytes):
                    return
                self._fetch(region)
                ahead.add(region)

    def _drop_idle_copies(self) -> None:
        """Drop copies on the device without recent requests: another graph is read, or one is retained."""
        for region, touched in list(self._fetched.items()):
            if self._requests - touched > PATIENCE * self._window:
                self._drop_copy(region)

    def _drop_copy(self, region: "_Region") -> None:
        del self._fetched[region]
        try:
            self._finish_fetch(region)
        finally:
            region.copy = None
            self._note(region)
            self._free_if_done(region)

    def _finish_fetch(self, region: "_Region") -> None:
        """Wait for a copy to the device, and forget it if it failed."""
        task, region.fetching = region.fetching, None
        copy, region.copy = region.copy, None
        if task is not None:
            task.wait()
        region.copy = copy

    def _free_if_done(self, region: "_Region") -> None:
        """Return the host's memory once no graph needs it and no copy uses it."""
        if region.readers == 0 and region.saving is None and region.fetching is None:
            region.source = region.copy = None
            self._note(region)
            self._fetched.pop(region, None)
            del self._regions[region.key]
            self._host.give_back(region.slab)

    def _reclaim(self, nbytes: int) -> None:
        """Free the device's memory of copies to the host, and of prefetched regions; not from inside of the store.

        The ledger calls it if another allocation has no room.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._saving:
                self._finish_saving(self._saving[0])
            for region in [region for region in self._fetched if region.fetching is not None]:
                self._drop_copy(region)
        finally:
            self._lock.release()
            self._forget_dropped()

    def _fits(self, nbytes: int) -> bool:
        """Whether the device's budget has room for `nbytes` more."""
        budget = self._ledger.budgets.get("device")
        return budget is None or self._ledger.total() + nbytes <= budget

    def _note(self, region: "_Region") -> None:
        """Enter the region's storage on the device in the ledger, where it records a step or has a budget."""
        flat = region.source if region.source is not None else region.copy
        counts = self._ledger.recording or self._ledger.limits_activations
        if flat is not None and region.counted is None and counts:
            self._ledger.saved.change(flat.untyped_storage(), 1)
            region.counted = flat.untyped_storage()
        elif region.counted is not None and flat is None:
            counted, region.counted = region.counted, None
            self._ledger.saved.change(counted, -1)

    def _on_drop(self, number: int) -> None:
        """Note a handle dropped by its graph ([Note: dropped graphs])."""
        self._dropped.append(number)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Forget dropped handles, unless the store is in use, which does so at its end."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    number = self._dropped.popleft()
                    del self._order[bisect_left(self._order, number)]
                    region = self._saved.pop(number)
                    region.readers -= 1
                    self._free_if_done(region)
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the store: a GPU's backward has a thread of its own, and garbage is collected anywhere."""
        try:
            with self._lock:
                yield
        finally:
            self._forget_dropped()


_Key = tuple[int, int, int, int]  # storage, first byte, last byte + 1, version (`regions`)


class _Region:
    """Bytes of a storage that are on the host, or are being copied there (`regions`).

    Attributes:
        source: the bytes on the device, until their copy to the host is complete.
        saving: that copy, while it is pending.
        slab: the memory of the host.
        saved: the bytes on the host, in `slab`.
        copy: the bytes on the device again.
        fetching: the copy back to the device, while it is pending.
        readers: number of live handles.
        changed: whether the source was changed before its copy was complete.
        counted: the storage on the device that the ledger counts.
    """

    __slots__ = ("changed", "copy", "counted", "device", "fetching", "key", "readers", "saved", "saving", "slab",
                 "source", "storage")  # fmt: skip

    def __init__(self, tensor: torch.Tensor, key: _Key, host: HostMemory) -> None:
        size = tensor.itemsize
        first, numel = key[1] // size, (key[2] - key[1]) // size
        self.key, self.device = key, tensor.device
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.source: torch.Tensor | None = tensor.detach().as_strided((numel,), (1,), first)
        self.slab = host.borrow(self.nbytes, Category.ACTIVATIONS)
        self.saved = self.slab.view(tensor.dtype)
        self.saving: Task | None = None
        self.copy: torch.Tensor | None = None
        self.fetching: Task | None = None
        self.readers, self.changed = 0, False
        self.counted: torch.UntypedStorage | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.key[2] - self.key[1]

    def check(self) -> None:
        """Note whether the source was changed meanwhile ([Note: changed in place])."""
        self.changed = self.changed or (self.source is not None and self.source._version != self.key[3])


class _Handle:
    """The graph's handle of a tensor copied to the host."""

    __slots__ = ("__weakref__", "dtype", "number", "offset", "region", "shape", "stride")

    def __init__(self, number: int, region: _Region, tensor: torch.Tensor) -> None:
        self.number, self.region = number, region
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() - region.key[1] // tensor.itemsize

    def tensor(self) -> torch.Tensor:
        """The tensor as it was, over the bytes that are on the device."""
        flat = self.region.source if self.region.source is not None else self.region.copy
        assert flat is not None
        if flat.dtype != self.dtype:
            flat = flat.view(torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)
