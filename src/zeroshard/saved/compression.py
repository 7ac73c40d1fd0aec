"""Compression of tensors saved for backward after their use in the forward, which stays exact (Gist, ISCA 2018).

[Note: what is compressed] Results of the graph of at least 16 KiB. Not compressed are: weights; tensors that no
operation of the graph made, which their owner holds anyway (the batch, inputs of a recomputation, activations from
another stage); and results that no code makes smaller. Lossy codes exclude three more: fp64 tensors; results for the
operation's own backward alone, such as statistics of a norm; and saved tensors of fused attention, a log-softmax and
losses (`gist.EXACT`), of which the backward takes exponentials.

[Note: the smallest form] Each region gets the smallest of the forms that a plan allows: uncompressed, the nonzero
values with their columns, the lossy code, or that code of the nonzero values. A rehearsal, whose tensors have no
values, assumes no zeros, so it predicts the most bytes.

[Note: two values] Dropout on a CPU saves fp32 factors, all of them zero or one number: one bit each, and the number.
"""

import weakref
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.memory.ledger import Category, Ledger
from zeroshard.saved.codes import sparse
from zeroshard.saved.codes.bits import pack_bits, unpack_bits
from zeroshard.saved.codes.lossy import Lossy
from zeroshard.saved.codes.sparse import SparseRows
from zeroshard.saved.storages import SMALLEST, extent_of

LOSSY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRIED = 4096  # first elements, among which a nonzero value is searched
FLOATS = (*LOSSY_DTYPES, torch.float64)


@dataclass(frozen=True, slots=True)
class Allowed:
    """The codes that a plan allows.

    Attributes:
        binarize: one bit for flags, and for numbers of two values.
        sparse: zeros are left out.
        lossy: the lossy code of other values, or None.
    """

    binarize: bool
    sparse: bool
    lossy: Lossy | None


class CompressedStore:
    """A saver that compresses tensors between forward and backward. See [Note: what is compressed].

    Args:
        allowed: the codes.
        ledger: counts bytes while a step is recorded or where the device has a budget.
        smallest: bytes; smaller tensors stay as they are.

    Attributes:
        moves: True: it takes tensors.
        how: a description, for messages.
        varies: True: bytes depend on values.
        exact: whether tensors saved now must be read back bit for bit.
        saved: bytes of the tensors compressed so far, before compression.
        kept: bytes of their compressed forms.
    """

    moves, how, varies = True, "compressed", True

    def __init__(self, allowed: Allowed, ledger: Ledger, smallest: int = SMALLEST) -> None:
        self._allowed, self._ledger, self._smallest = allowed, ledger, smallest
        self.exact = False
        self.saved = self.kept = 0
        self._regions: WeakValueDictionary[_Key, _Region] = WeakValueDictionary()
        self._whole: dict[_Key, StorageWeakRef] = {}  # regions that stay, of the current step
        self._read: list[_Read] = []
        ledger.reclaimers.insert(0, lambda nbytes: self._forget_read())

    def pack(self, tensor: Tensor) -> Any:
        """The handle of a tensor's compressed form, or None if it stays as it is."""
        if not self._may(tensor):
            return None
        extent = extent_of(tensor, self._smallest)
        if extent is None:
            return None
        storage = tensor.untyped_storage()
        key = (storage._cdata, *extent, tensor.dtype, tensor._version)
        region = self._regions.get(key)
        if region is not None and (region.exact or self._may_lose(tensor)):
            return _Handle(region, tensor)
        held = self._whole.get(key)
        if held is not None and not held.expired():
            return None
        region = self._compressed(tensor, key)
        if region is None:
            self._whole[key] = StorageWeakRef(storage)
            return None
        return _Handle(region, tensor)

    def unpack(self, saved: Any) -> Tensor:
        """The decoded tensor; concurrent readers share its memory."""
        assert isinstance(saved, _Handle)
        region = saved.region
        storage = None if region.read is None else region.read.storage()
        if storage is None:
            self._forget_read()
            counts = self._counts
            nbytes = region.key[2] - region.key[1]
            self._ledger.take(Category.ACTIVATIONS, nbytes, "read a compressed activation") if counts else None
            storage = region.decode().untyped_storage()
            region.read = _Read(storage, nbytes if counts else 0)
            self._read.append(region.read)
        whole = torch.empty(0, dtype=saved.dtype, device=region.device)
        return whole.set_(storage, saved.offset, saved.shape, saved.stride)

    def settle(self) -> None:
        """End a step."""
        self._whole.clear()
        self._forget_read()
        if self._allowed.lossy is not None:
            self._allowed.lossy.begin()

    @property
    def _counts(self) -> bool:
        return self._ledger.recording or self._ledger.limits_activations

    def _may(self, tensor: Tensor) -> bool:
        """Whether a tensor may be compressed. See [Note: what is compressed]."""
        if tensor.dtype is torch.bool:
            return self._allowed.binarize
        if tensor.dtype not in FLOATS:
            return False
        return self._allowed.binarize if not tensor.requires_grad else not tensor.is_leaf

    def _may_lose(self, tensor: Tensor) -> bool:
        may = self._allowed.lossy is not None and tensor.dtype in LOSSY_DTYPES
        return may and tensor.requires_grad and not self.exact

    def _compressed(self, tensor: Tensor, key: "_Key") -> "_Region | None":
        size = tensor.itemsize
        flat = tensor.detach().as_strided(((key[2] - key[1]) // size,), (1,), key[1] // size)
        form = self._form(flat, tensor)
        if form is None:
            return None
        region = _Region(key, flat, form, exact=not form.lossy)
        self.saved, self.kept = self.saved + flat.nbytes, self.kept + region.nbytes
        if self._counts:
            self._ledger.take(Category.ACTIVATIONS, region.nbytes, "save a compressed activation")
            gone = weakref.finalize(
                region, self._ledger.give, Category.ACTIVATIONS, region.nbytes, "compressed activation"
            )
            gone.atexit = False
        self._regions[key] = region
        return region

    def _form(self, flat: Tensor, tensor: Tensor) -> "_Form | None":
        """The smallest form of a tensor's values [n]; None for uncompressed ([Note: the smallest form])."""
        allowed, numel, fake = self._allowed, flat.numel(), flat.untyped_storage().device.type == "meta"
        if flat.dtype is torch.bool:
            return _Form(bits=pack_bits(flat))
        if not tensor.requires_grad:
            return None if fake else _two_values(flat)
        lossy = allowed.lossy if self._may_lose(tensor) else None
        found = sparse.count(flat) if allowed.sparse and not fake else numel
        sizes = {"dense": flat.nbytes}
        if lossy is not None:
            sizes["lossy"] = lossy.nbytes(numel)
        if found < numel:
            sizes["sparse"] = sparse.nbytes(numel, found, found * flat.itemsize)
            if lossy is not None:
                sizes["lossy sparse"] = sparse.nbytes(numel, found, lossy.nbytes(found))
        best = min(sizes, key=sizes.__getitem__)
        if best == "dense":
            return None
        rows = sparse.to_sparse(flat, found) if "sparse" in best else None
        values = flat if rows is None else rows.values
        if "lossy" not in best:
            return _Form(rows=rows)
        assert lossy is not None
        return _Form(rows=rows, code=lossy.encode(values.float()), lossy=lossy, found=found)

    def _forget_read(self) -> None:
        """Remove decoded tensors that no backward holds any more from the ledger."""
        alive = []
        for read in self._read:
            if not read.gone:
                alive.append(read)
            elif read.counted:
                self._ledger.give(Category.ACTIVATIONS, read.counted, "activation read from its compressed form")
        self._read = alive


_Key = tuple[int, int, int, torch.dtype, int]  # storage, first byte, last byte + 1, dtype, version (`regions`)


class _Form:
    """The compressed form of a region.

    Attributes:
        bits: flags, or the mask of the nonzero one of two values.
        value: the nonzero value.
        rows: nonzero values, and their places.
        code: codes of all values, or of those in `rows`, which then has no values.
        lossy: the code's object.
        found: number of nonzero values.
    """

    __slots__ = ("bits", "code", "found", "lossy", "rows", "value")

    def __init__(
        self,
        bits: Tensor | None = None,
        value: Tensor | None = None,
        rows: SparseRows | None = None,
        code: tuple[Tensor, ...] = (),
        lossy: Lossy | None = None,
        found: int = 0,
    ) -> None:
        self.bits, self.value, self.rows, self.code, self.lossy, self.found = bits, value, rows, code, lossy, found
        if rows is not None and code:
            rows.values = rows.values[:0].clone()

    def tensors(self) -> list[Tensor]:
        """All its tensors."""
        rows = [] if self.rows is None else [self.rows.values, self.rows.columns, self.rows.starts]
        return [*(each for each in (self.bits, self.value) if each is not None), *rows, *self.code]

    def decode(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The values [numel] again."""
        if self.bits is not None:
            flags = unpack_bits(self.bits, numel)
            return flags if self.value is None else torch.where(flags, self.value, torch.zeros_like(self.value))
        rows = self.rows
        if self.lossy is None:
            assert rows is not None
            return sparse.from_sparse(rows, numel)
        values = self.lossy.decode(self.code, numel if rows is None else self.found).to(dtype)
        return values if rows is None else sparse.from_sparse(SparseRows(values, rows.columns, rows.starts), numel)


class _Region:
    """A region in its compressed form.

    Attributes:
        exact: whether it is read back bit for bit.
        nbytes: of the form.
        read: its values, while a backward holds them.
    """

    __slots__ = ("__weakref__", "_form", "_numel", "_storage", "device", "exact", "key", "nbytes", "read")

    def __init__(self, key: _Key, flat: Tensor, form: _Form, exact: bool) -> None:
        self.key, self.exact, self.device = key, exact, flat.device
        self._form, self._numel, self._storage = form, flat.numel(), StorageWeakRef(flat.untyped_storage())
        self.nbytes = sum(tensor.nbytes for tensor in form.tensors())
        self.read: _Read | None = None

    def decode(self) -> Tensor:
        """The values of the region [n], in a storage of their own."""
        return self._form.decode(self._numel, self.key[3])


class _Read:
    """A weak reference to the decoded storage of a region.

    Attributes:
        counted: bytes on the ledger.
    """

    __slots__ = ("_storage", "counted")

    def __init__(self, storage: torch.UntypedStorage, counted: int) -> None:
        self._storage, self.counted = StorageWeakRef(storage), counted

    @property
    def gone(self) -> bool:
        """Whether nothing holds it."""
        return bool(self._storage.expired())

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if something holds it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return found


class _Handle:
    """The graph's handle of a tensor in a compressed region."""

    __slots__ = ("dtype", "offset", "region", "shape", "stride")

    def __init__(self, region: _Region, tensor: Tensor) -> None:
        self.region, self.dtype, self.shape, self.stride = region, tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() - region.key[1] // tensor.itemsize


def _two_values(flat: Tensor) -> _Form | None:
    """The form of numbers that are zero or one other number ([Note: two values])."""
    words = flat.view(sparse.WORDS[flat.itemsize])
    flags = words != 0
    place = int(flags[:TRIED].byte().argmax())
    if not flags[place] or not torch.equal(flags, words == words[place]):
        return None
    return _Form(bits=pack_bits(flags), value=flat[place].clone())
