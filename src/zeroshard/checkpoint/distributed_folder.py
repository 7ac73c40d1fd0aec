"""Folders of `torch.distributed.checkpoint` (DCP), as FSDP2 writes them, read by box and without unpickling.

    FOLDER/.metadata         a pickle: names, shapes, chunks, and the file and byte range of each chunk
    FOLDER/__0_0.distcp      chunks one after the other, each a file of torch.save: a zip archive with a pickle of its
                             shape, and its values

Tensors of an optimizer are kept apart. Chunks that were written through an extension, such as compression, are refused.
"""

import contextlib
import io
import json
import math
import os
import re
import weakref
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroshard.checkpoint.boxes import Box, BoxValues, intersection
from zeroshard.checkpoint.expert_names import Shape
from zeroshard.checkpoint.pickled_records import PickledRecord, read_records
from zeroshard.errors import CheckpointError
from zeroshard.text import format_names

METADATA = ".metadata"
FILE_NAME = re.compile(r"[^/\\\0]+")
OPTIMIZER = "optim"  # with which the keys of optimizers begin, as in torch's own examples
STATE = re.compile(r"(?:.*?\.)?state\.(?P<name>.+)\.(?P<key>[^.]+)")  # an optimizer's state of a parameter
LOCAL_HEADER = 30  # bytes of the header of an archive's entry before its name
STAGING = 2**22  # bytes that are read at a time


class StoredChunk(NamedTuple):
    """A box of a tensor, and its place in the folder.

    Attributes:
        file: in the folder.
        start: its first byte.
        nbytes: of the archive.
    """

    box: Box
    file: str
    start: int
    nbytes: int


class DistributedFolder:
    """The tensors of a folder, by the names that the state dict had.

    Raises:
        CheckpointError: the metadata is damaged, or of another form.

    Attributes:
        shapes: by name, of all but the optimizer's.
        states: by the name of a parameter among the optimizer's keys, its states: their names in the folder.
        bytes_read: of values.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._opened, self.bytes_read = path, dict[str, int](), 0
        self._starts: dict[tuple[str, int], int] = {}
        self._optimizers: dict[str, bool] = {}
        self.states: dict[str, dict[str, str]] = {}
        try:
            found = _fields(read_records((path / METADATA).read_bytes()), "Metadata")
            self._tensors = self._read(found)
        except OSError as error:
            raise CheckpointError(f"{path / METADATA} cannot be read ({error.strerror}). Copy it again.") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path / METADATA} cannot be read: {error}. Copy it again.") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path / METADATA} is of another form than torch {torch.__version__} writes ({error!r}). Let the "
                f"torch that wrote it save plain weights, and load those."
            ) from error
        self.shapes: dict[str, Shape] = {name: shape for name, (shape, _, _) in self._tensors.items()}
        for name in [name for name in self.shapes if self._optimizers[name]]:
            del self.shapes[name]
            if state := STATE.fullmatch(name):
                self.states.setdefault(state["name"], {})[state["key"]] = name
        if not self.shapes:
            held = format_names(sorted(self._tensors)) or "nothing"
            raise CheckpointError(f"{path} holds no tensors of a model, but {held}. Save the model there too.")

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of a tensor.

        Raises:
            CheckpointError: elements are missing, a file cannot be read, or a weight is in integers there.
        """
        shape, dtype, chunks = self._tensors[name]
        for box, values in targets:
            if dtype.is_floating_point != values.is_floating_point():
                raise CheckpointError(
                    f"{self._path} holds '{name}' as {dtype} and the model has {values.dtype}. Give weights that are "
                    f"not quantized."
                )
            filled = 0
            for chunk in chunks if box.inside(Box.whole(shape)) else ():
                common = intersection(box, chunk.box)
                if common is not None:
                    self._copy(name, dtype, chunk, common, values.detach()[common.slices(box)])
                    filled += common.numel
            if filled != box.numel:
                raise CheckpointError(
                    f"{self._path} holds {filled} of the {box.numel} elements of '{name}[{box}]'; it is not whole."
                )

    def shape_of(self, name: str) -> Shape:
        """The shape of any tensor."""
        return self._tensors[name][0]

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of any tensor."""
        return self._tensors[name][1]

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, flat and in its own dtype."""
        shape, dtype, _ = self._tensors[name]
        values = torch.empty(shape, dtype=dtype)
        self.fill(name, [BoxValues(Box.whole(shape), values)])
        return values.view(-1)

    def _read(self, found: Any) -> dict[str, tuple[Shape, torch.dtype, list[StoredChunk]]]:
        """The tensors of the metadata; enters those of optimizers into `_optimizers`."""
        paths = found.get("planner_data") or {}
        places = {}
        for key, value in found["storage_data"].items():
            index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
            if info.get("transform_descriptors"):
                raise CheckpointError(f"'{index['fqn']}' was written through {info['transform_descriptors']}")
            places[index["fqn"], _numbers(index.get("offset"))] = info
        tensors: dict[str, tuple[Shape, torch.dtype, list[StoredChunk]]] = {}
        for name, record in found["state_dict_metadata"].items():
            keys = paths.get(name, (name,))
            if not record.name.endswith(".TensorStorageMetadata"):
                continue
            self._optimizers[str(name)] = any(str(key).startswith(OPTIMIZER) for key in (*keys[:-1], name))
            fields = _fields(record, "TensorStorageMetadata")
            shape, chunks = _numbers(fields["size"]), []
            dtype = getattr(torch, fields["properties"].state[0].name.removeprefix("torch."))
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"'{name}' is said to be of {dtype}")
            for each in fields["chunks"]:
                chunk = _fields(each, "ChunkStorageMetadata")
                box = Box(_numbers(chunk["offsets"]), _numbers(chunk["sizes"]))
                info = places.get((name, box.start)) or places[name, ()]
                if not FILE_NAME.fullmatch(info["relative_path"]):
                    raise CheckpointError(f"'{name}' is said to be in {info['relative_path']!r}, outside of the folder")
                if not box.inside(Box.whole(shape)):
                    raise CheckpointError(f"a chunk of '{name}' is [{box}], outside of {shape}")
                chunks.append(StoredChunk(box, info["relative_path"], int(info["offset"]), int(info["length"])))
            tensors[str(name)] = shape, dtype, chunks
        return tensors

    def _copy(self, name: str, dtype: torch.dtype, chunk: StoredChunk, box: Box, into: torch.Tensor) -> None:
        """Copy a box inside of a chunk, some rows at a time."""
        start = self._values_at(name, dtype, chunk)
        handle, file = self._handle(chunk.file), self._path / chunk.file
        inner = chunk.box.shape[1:]
        width, where = math.prod(inner) * dtype.itemsize, box.slices(chunk.box)
        rows, rest = (where[0], where[1:]) if where else (slice(0, 1), ())
        step = max(1, STAGING // max(width, 1))
        for first in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - first)
            content = bytearray(count * width)
            if os.preadv(handle, [content], start + first * width) != len(content):
                raise CheckpointError(f"{file} was cut short: '{name}' ends after it. Copy it again.")
            self.bytes_read += len(content)
            if not content:
                continue
            values = torch.frombuffer(content, dtype=dtype).view(count, *inner)[(slice(None), *rest)]
            (into[first - rows.start : first - rows.start + count] if where else into.view(1)).copy_(values)

    def _values_at(self, name: str, dtype: torch.dtype, chunk: StoredChunk) -> int:
        """The first byte of the values of a chunk, whose archive must be that of a contiguous tensor of this shape."""
        key = chunk.file, chunk.start
        if key not in self._starts:
            file = self._path / chunk.file
            content = _Window(self._handle(chunk.file), chunk.start, chunk.nbytes)
            try:
                with zipfile.ZipFile(content) as archive:
                    self._starts[key] = chunk.start + _data_start(archive, content, dtype, chunk.box.shape)
            except Exception as error:  # damaged bytes may raise any exception
                raise CheckpointError(f"{file} does not hold '{name}' as torch.save writes it ({error})") from error
        return self._starts[key]

    def _handle(self, name: str) -> int:
        """An open file."""
        if name not in self._opened:
            try:
                self._opened[name] = os.open(self._path / name, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(
                    f"{self._path / name} cannot be read ({error.strerror}). Copy the whole folder."
                ) from error
            weakref.finalize(self, os.close, self._opened[name])
        return self._opened[name]


class _Window(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, handle: int, start: int, nbytes: int) -> None:
        super().__init__()
        self._handle, self._start, self._nbytes, self._at = handle, start, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._nbytes)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        found = os.pread(self._handle, left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(found)
        return found


def refuse_megatron(path: Path) -> None:
    """Refuse a folder of Megatron-LM, whose `torch_dist` format has this container with names and stacks of its own.

    Raises:
        CheckpointError: with the files by which it is known.
    """
    backend = path / "metadata.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if "sharded_backend" in json.loads(backend.read_text(encoding="utf-8")):
            raise CheckpointError(
                f"{path} is a checkpoint of Megatron-LM ({backend.name} names its sharded_backend), with its own names "
                f"and with layers stacked in one tensor. Write it in Hugging Face's format with Megatron's own "
                f"converter, and give that folder."
            )
    if (path / "latest_checkpointed_iteration.txt").is_file():
        raise CheckpointError(
            f"{path} is a folder of checkpoints of Megatron-LM (latest_checkpointed_iteration.txt). Write one in "
            f"Hugging Face's format with Megatron's own converter, and give that folder."
        )


def _data_start(archive: zipfile.ZipFile, content: _Window, dtype: torch.dtype, shape: Shape) -> int:
    """The first byte of a tensor's values in an archive of torch.save.

    Raises:
        ValueError: it is of another tensor.
    """
    names = {name.partition("/")[2]: name for name in archive.namelist()}
    if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
        raise ValueError("values in big-endian order")
    record = read_records(archive.read(names["data.pkl"]))
    storage, offset, size, stride = record.args[:4]
    expected = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    strides = [step for step, length in zip(stride, size, strict=True) if length > 1]
    if tuple(size) != shape or strides != [step for step, length in zip(expected, shape, strict=True) if length > 1]:
        raise ValueError(f"a tensor of {tuple(size)} with strides {tuple(stride)} in place of a contiguous {shape}")
    entry = archive.getinfo(names[f"data/{storage.args[2]}"])
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < (offset + math.prod(shape)) * dtype.itemsize:
        raise ValueError(f"{entry.file_size} bytes of values for {shape} of {dtype}")
    content.seek(entry.header_offset)
    header = content.read(LOCAL_HEADER)
    names_length, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return int(entry.header_offset + LOCAL_HEADER + names_length + extra + offset * dtype.itemsize)


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """The attributes of a record of a class of torch.

    Raises:
        ValueError: it is of another class.
    """
    if not isinstance(record, PickledRecord) or record.name.rpartition(".")[2] != kind or record.state is None:
        raise ValueError(f"a {getattr(record, 'name', type(record).__name__)} in place of {kind}")
    found: dict[str, Any] = record.state
    return found


def _numbers(size: Any) -> Shape:
    """A `torch.Size`, or None, as a tuple."""
    return () if size is None else tuple(map(int, size.args[0] if isinstance(size, PickledRecord) else size))
