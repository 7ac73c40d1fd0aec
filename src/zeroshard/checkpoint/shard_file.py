"""Reading one safetensors file: its header, checked against the file, and boxes of its tensors by `pread`.

The file is not mapped into memory: pages of a mapping would count as memory of the process for as long as it is open.
Values that the target holds in the same dtype are read straight into it, by a copy within the kernel where ranks share
that memory; others go through a small staging buffer.
"""

import json
import math
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.stream import CODES
from zeroshard.errors import CheckpointError
from zeroshard.platform.shared_memory import copy_to_shared

MOST_HEADER = 100_000_000  # bytes; safetensors reads no larger header
STAGING = 2**20  # bytes, which stay in a core's cache until they are converted
DTYPES = {code: dtype for dtype, code in CODES.items()}
POINTER = b"version https://git-lfs"


class StoredEntry(NamedTuple):
    """A tensor in a file.

    Attributes:
        code: its dtype as the header spells it.
        start: its first byte in the file.
    """

    code: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Its dtype; None for one that torch does not have."""
        return DTYPES.get(self.code)


class ShardFile:
    """Reads boxes of the tensors of a safetensors file.

    Args:
        staging: bytes [STAGING] through which values are converted; files may share it.

    Attributes:
        tensors: by name.
        bytes_read: from the file so far, its header included.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or has a damaged header.
    """

    def __init__(self, path: Path, staging: torch.Tensor) -> None:
        self.path, self._staging = path, staging
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._size = os.fstat(self._file).st_size
            head = os.pread(self._file, 8, 0)
            length = int.from_bytes(head, "little")
            text = os.pread(self._file, length, 8) if length <= MOST_HEADER else b""
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}). Copy it again.") from error
        if os.pread(self._file, len(POINTER), 0) == POINTER:
            raise CheckpointError(
                f"{path} is a pointer of Git LFS to the file, which was not fetched. Run git lfs pull."
            )
        if len(text) < max(length, 2):
            raise CheckpointError(
                f"{path} cannot be read: it has {self._size:,} bytes and no header of safetensors. Copy it again."
            )
        self.bytes_read = 8 + length
        self.tensors = self._parsed(text)

    def fill(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Fill `values`, in the shape of a box, with the elements of the box of a tensor.

        Raises:
            CheckpointError: the box is not inside, the file cannot be read, or a weight is in integers there.
        """
        entry = self.tensors[name]
        if not box.inside(Box.whole(entry.shape)):
            raise CheckpointError(f"{self.path} holds '{name}[{Box.whole(entry.shape)}]', and [{box}] was asked for.")
        dtype = self.dtype(name)
        if dtype.is_floating_point != values.is_floating_point():
            raise CheckpointError(
                f"{self.path} holds '{name}' as {dtype} and the model has {values.dtype}. Give weights that are not "
                f"quantized."
            )
        if box.numel:
            self._fill(entry.start, dtype, entry.shape, box, values.detach())

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat and in its own dtype."""
        entry = self.tensors[name]
        values = torch.empty(math.prod(entry.shape), dtype=self.dtype(name))
        self._read(entry.start, values)
        return values

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor.

        Raises:
            CheckpointError: torch has no such dtype.
        """
        dtype = self.tensors[name].dtype
        if dtype is None:
            raise CheckpointError(
                f"{self.path} holds '{name}' as {self.tensors[name].code}, which is not read. Give weights that are "
                f"not quantized."
            )
        return dtype

    def _fill(self, at: int, dtype: torch.dtype, shape: tuple[int, ...], box: Box, values: torch.Tensor) -> None:
        """Fill a box of the tensor of a shape whose first byte is `at`."""
        direct = values.dtype == dtype and values.device.type == "cpu" and values.is_contiguous()
        if not shape:
            if direct:
                self._read(at, values.view(1))
            else:
                values.copy_(self._staged(at, dtype, 1).view(()))
            return
        (first, *starts), (count, *lengths), inner = box.start, box.shape, shape[1:]
        width, full = math.prod(inner) * dtype.itemsize, tuple(lengths) == inner
        if full and direct:
            self._read(at + first * width, values.view(-1))
            return
        rows = STAGING // max(width, 1)
        if not rows or (len(shape) > 2 and not full):
            for row in range(count):
                part = Box(tuple(starts), tuple(lengths))
                self._fill(at + (first + row) * width, dtype, inner, part, values[row])
            return
        where = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
        for row in range(0, count, rows):
            taken = min(rows, count - row)
            staged = self._staged(at + (first + row) * width, dtype, taken * math.prod(inner)).view(taken, *inner)
            values[row : row + taken].copy_(staged[(slice(None), *where)])

    def _staged(self, at: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Elements from byte `at` on, in the staging buffer."""
        staged = self._staging[: numel * dtype.itemsize].view(dtype)
        self._read(at, staged)
        return staged

    def _read(self, at: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor on the CPU with bytes from `at` on."""
        flat = into.view(torch.uint8)
        done = copy_to_shared(self._file, at, flat)
        view, at = flat.numpy().data[done:], at + done
        self.bytes_read += done
        while view:
            try:
                count = os.preadv(self._file, [view], at)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read ({error}). Copy it again.") from error
            if not count:
                raise CheckpointError(f"{self.path} was cut short while it was read. Copy it again.")
            view, at = view[count:], at + count
            self.bytes_read += count

    def _parsed(self, text: bytes) -> dict[str, StoredEntry]:
        """The tensors in a header, which is checked against the size of the file."""
        try:
            table: dict[str, Any] = json.loads(text, object_pairs_hook=without_duplicates)
            table.pop("__metadata__", None)
            tensors, begin = {}, 8 + len(text)
            for name, entry in table.items():
                shape, (start, stop) = tuple(map(int, entry["shape"])), entry["data_offsets"]
                tensors[name] = StoredEntry(str(entry["dtype"]), shape, begin + int(start))
                self._check(name, tensors[name], begin + int(stop))
        except CheckpointError:
            raise
        except Exception as error:  # a header that is no JSON, or JSON of another form
            raise CheckpointError(
                f"{self.path} cannot be read: its header is damaged ({error!r}). Copy it again."
            ) from error
        return tensors

    def _check(self, name: str, entry: StoredEntry, stop: int) -> None:
        """Check a tensor's bytes against its shape and the file's size."""
        if stop > self._size:
            raise CheckpointError(
                f"{self.path} is cut short: it has {self._size:,} bytes, and '{name}' ends at byte {stop:,}. Copy it "
                f"again."
            )
        nbytes = stop - entry.start
        needed = nbytes if entry.dtype is None else math.prod(entry.shape) * entry.dtype.itemsize
        if nbytes < 0 or min(entry.shape, default=0) < 0 or nbytes != needed:
            raise CheckpointError(
                f"{self.path} is damaged: '{name}' has {nbytes:,} bytes there, and {list(entry.shape)} of {entry.code} "
                f"has {needed:,}. Copy it again."
            )


def without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, each of whose names stands once."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"'{name}' stands twice in it")
        table[name] = value
    return table
