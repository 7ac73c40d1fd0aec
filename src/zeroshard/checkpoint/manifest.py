"""The manifest of a checkpoint: its tensors, their places, and the digests of every byte, as JSON with its own digest.

The last entry of the file is the SHA-256 of all bytes before it. Reading trusts no value: each is checked for its type
and range, files are named by one pattern inside the folder, and no allocation has a size that the manifest claims.

[Note: format 2] Chunks are boxes of a tensor. In format 2 they were ranges of the flattened tensor, that is boxes of
one dimension; each is read as the few boxes of the tensor that it consists of.
"""

import glob
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.boxes import Box, cut, tiles
from zeroshard.checkpoint.stream import BLOCK, CODES
from zeroshard.errors import CheckpointError, DamagedError

MANIFEST = "MANIFEST.json"
FORMAT = 3  # written
FORMATS = (2, 3)  # readable
MOST_BYTES = 2**28  # limit on the size of a manifest
MOST = 2**53  # limit on any count
MOST_AXES = 64  # limit on the dimensions of a tensor, as in torch
COPIES = ("buffer", "rng")  # kinds whose chunks are whole copies; the chunks of all others tile their tensor
TAIL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its file, with its values in flat form, and the CRC-32 of each block of their bytes.

    Attributes:
        flattened: the shape of the tensor, if the box is a range of its elements ([Note: format 2]).
    """

    file: str
    box: Box
    crc32: tuple[int, ...]
    flattened: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    def boxes(self, low: int, high: int) -> list[Box]:
        """The boxes of the tensor that make up the elements [low, high) of the chunk, in their order."""
        if self.flattened is None:
            return cut(self.box, low, high)
        (first,) = self.box.start
        return cut(Box.whole(self.flattened), first + low, first + high)

    def key(self, name: str) -> str:
        """The key in the file, such as `weight:up.weight[0:2,3:7]`."""
        return f"{name}[{self.box}]"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its shape, its dtype and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its bytes, and the CRC-32 of its header."""

    nbytes: int
    header_crc32: int


@dataclass(slots=True)
class Manifest:
    """The facts besides tensors, the files, and the tensors by logical name `kind:NAME`."""

    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def dump(self) -> bytes:
        """The content of the file, in the current format.

        Raises:
            ValueError: a fact is NaN or infinite, which JSON lacks.
        """
        files = {name: [entry.nbytes, entry.header_crc32] for name, entry in self.files.items()}
        tensors = {
            name: {
                "shape": entry.shape,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "chunks": [[chunk.file, chunk.box.start, chunk.box.shape, chunk.crc32] for chunk in entry.chunks],
            }
            for name, entry in self.tensors.items()
        }
        rows = [f" {_json(key)}: {_json(value)}" for key, value in {"format": FORMAT, **self.facts}.items()]
        for name, table in (("files", files), ("tensors", tensors)):
            inside = ",\n".join(f"  {_json(key)}: {_json(value)}" for key, value in table.items())
            rows.append(f' "{name}": {{\n{inside}\n }}')
        body = ("{\n" + ",\n".join(rows)).encode()
        return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def file_of(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or one of another format. DamagedError: its digest differs, or a value is out of
            range.
    """
    file = folder / MANIFEST
    try:
        if not file.is_file():
            held = "there is no such folder" if not folder.exists() else f"the folder has no {MANIFEST}"
            raise CheckpointError(f"{folder} is no checkpoint: {held}. {_way_out(folder)}")
        if file.stat().st_size > MOST_BYTES:
            raise DamagedError(f"{file} has {file.stat().st_size:,} bytes, more than a manifest can have.")
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    try:
        table = json.loads(content, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file} is damaged ({error}); use an earlier checkpoint.") from error
    tail = TAIL.search(content)
    good = tail is not None and hashlib.sha256(content[: tail.start()]).hexdigest().encode() == tail[1]
    version = table.get("format") if isinstance(table, dict) else None
    if type(version) is int and version not in FORMATS and (good or tail is None):
        known = " and ".join(map(str, FORMATS))
        raise CheckpointError(
            f"{file} has format {version}, this zeroshard reads {known}; use the version that wrote it."
        )
    if not good:
        raise DamagedError(f"{file} is damaged (its own digest differs); use an earlier checkpoint.")
    try:
        return _parsed(table)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{file} is not to be trusted ({error}); use an earlier checkpoint.") from error


def _way_out(folder: Path) -> str:
    """The way out where a folder holds no manifest."""
    if unfinished := next(folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"), None):
        return (
            f"{unfinished.name} beside it is still being written, or its writer has ended: wait with "
            f"engine.save(...).wait(), save with wait=True, or use an earlier checkpoint."
        )
    return "Give the folder of a checkpoint, as engine.save and zeroshard train write it."


def _parsed(table: dict[str, Any]) -> Manifest:
    """The manifest in a table, after a check of all of it.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the problem.
    """
    version = _count(table["format"], "the format")
    manifest = Manifest({k: v for k, v in table.items() if k not in ("files", "tensors", "sha256", "format")})
    for key in ("optimizer", "extra"):
        if not isinstance(manifest.facts[key], dict):
            raise TypeError(f"{key} is no table")
    _count(manifest.facts["step"], "step")
    ranks = _count(manifest.facts["ranks"], "ranks")
    if ranks != len(table["files"]):
        raise ValueError(f"there are {len(table['files'])} files of {ranks} ranks")
    for rank, (name, fields) in enumerate(table["files"].items()):
        if name != file_of(rank, ranks):
            raise ValueError(f"the file {name[:200]!r} is not the shard of rank {rank} of {ranks}")
        nbytes, crc32 = _list(fields)
        manifest.files[name] = FileEntry(_count(nbytes, "bytes of a file"), _count(crc32, "a CRC-32"))
    for name, fields in table["tensors"].items():
        manifest.tensors[name] = _entry(name, fields, manifest.files, version)
    claimed: dict[str, int] = dict.fromkeys(manifest.files, 0)
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            claimed[chunk.file] += chunk.numel * entry.dtype.itemsize
    for name, nbytes in claimed.items():
        if nbytes > manifest.files[name].nbytes:
            raise ValueError(f"tensors claim {nbytes:,} bytes of {name}, which has {manifest.files[name].nbytes:,}")
    return manifest


def _entry(name: str, fields: dict[str, Any], files: dict[str, FileEntry], version: int) -> TensorEntry:
    kind, colon, _ = name.partition(":")
    if not kind or not colon or not name.isprintable():
        raise ValueError(f"the tensor {name!r} has no kind, or no name to be read")
    if fields.keys() != {"shape", "dtype", "chunks"} or fields["dtype"] not in DTYPES:
        raise ValueError(f"the entry of {name!r} is not a shape, a known dtype and chunks")
    shape = _counts(fields["shape"], f"the shape of {name!r}")
    if len(shape) > MOST_AXES:
        raise ValueError(f"{name!r} has {len(shape)} axes")
    dtype, numel = DTYPES[fields["dtype"]], _count(math.prod(shape), f"the size of {name!r}")
    flattened, whole = (shape, Box.whole((numel,))) if version == 2 else (None, Box.whole(shape))
    chunks, what = [], f"the place of a chunk of {name!r}"
    for file, start, end, digests in map(_list, _list(fields["chunks"])):
        if file not in files:
            raise ValueError(f"{name!r} is in {file!r}, which is not among the files")
        box = _range(start, end, what) if version == 2 else Box(_counts(start, what), _counts(end, what))
        crc32 = _counts(digests, "a CRC-32")
        if not box.inside(whole):
            raise ValueError(f"a chunk of {name!r}, which begins at {str(start)[:80]}, is no box inside of it")
        if len(crc32) != -(-box.numel * dtype.itemsize // BLOCK):
            raise ValueError(f"the chunk [{str(box)[:80]}] of {name!r} has {len(crc32)} digests")
        chunks.append(Chunk(file, box, crc32, flattened))
    copies = bool(chunks) and all(chunk.box == whole for chunk in chunks)
    if not (copies if kind in COPIES else tiles((chunk.box for chunk in chunks), whole.shape)):
        raise ValueError(f"the chunks of {name!r} are not the whole of it")
    return TensorEntry(shape, dtype, tuple(chunks))


def _range(start: Any, stop: Any, what: str) -> Box:
    """A chunk of format 2 as a box of the flattened tensor."""
    first = _count(start, what)
    return Box((first,), (_count(stop, what) - first,))


def _counts(values: Any, what: str) -> tuple[int, ...]:
    for value in _list(values):
        _count(value, what)
    return tuple(values)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"there is {str(value)[:40]!r} where a list belongs")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{what} is {str(value)[:40]}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text[:40]}, which is no number")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
