"""Writing safetensors files as a stream: one tensor in memory at a time, and digests computed in memory before a write.

The writer of safetensors takes all tensors of a file at once and returns no digests, so the header (8 bytes of length,
then JSON) is made here; safetensors reads the files.
"""

import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.checkpoint.disk import CheckpointDisk
from zeroshard.errors import CheckpointError

BLOCK = 2**22  # bytes under one digest
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in a file: its key there, its dtype and its shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """A written file: its bytes, the CRC-32 of its header, and those of every block of every tensor."""

    nbytes: int
    header_crc32: int
    blocks: list[list[int]]


def in_order(dtype: torch.dtype) -> int:
    """Sort key of the tensors in a file: large elements first, so that all are aligned."""
    return -dtype.itemsize


def header_of(slots: list[Slot], metadata: dict[str, str] | None = None) -> bytes:
    """The header of a file that holds `slots`, one after the other."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for slot in slots:
        if slot.dtype not in CODES:
            real = " (complex numbers: keep complex64, or torch.view_as_real of them)" if slot.dtype.is_complex else ""
            raise CheckpointError(f"'{slot.key}' is {slot.dtype}, which safetensors files do not hold{real}")
        place = [offset, offset + slot.nbytes]
        table[slot.key] = {"dtype": CODES[slot.dtype], "shape": list(slot.shape), "data_offsets": place}
        offset = place[1]
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def blocks_of(values: torch.Tensor) -> list[memoryview]:
    """The bytes of a tensor on the CPU, in blocks of `BLOCK`, the last one shorter."""
    content = bytes_of(values)
    return [content[first : first + BLOCK] for first in range(0, len(content), BLOCK)]


def write_tensors(
    disk: CheckpointDisk,
    path: Path,
    slots: list[Slot],
    values: Iterable[torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> Written:
    """Write and sync a safetensors file; `values` are those of `slots`, which are sorted by `in_order`.

    Raises:
        CheckpointError: safetensors has no such dtype. OSError: the disk is full, gone or read-only.
    """
    header = header_of(slots, metadata)
    digests: list[list[int]] = []
    with disk.create(path) as file:
        disk.write(file, header)
        ready = iter(values)
        for slot in slots:  # no zip, which would hold the last tensor while the next is made
            tensor = next(ready)
            assert (tensor.dtype, tensor.numel()) == (slot.dtype, math.prod(slot.shape))
            digests.append([])
            for block in blocks_of(tensor.cpu()):
                digests[-1].append(zlib.crc32(block))
                disk.write(file, block)
                del block
            del tensor
        disk.sync(file)
    return Written(len(header) + sum(slot.nbytes for slot in slots), zlib.crc32(header), digests)
