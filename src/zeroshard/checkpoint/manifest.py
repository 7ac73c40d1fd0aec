"""The manifest of a checkpoint: what there is, where, and the digests of every byte, as JSON that proves itself.

The last entry of the file is the SHA-256 of all bytes before it. Reading trusts nothing: every value is checked for its
type and range, files are named by one pattern inside the folder, and nothing is allocated by what a number claims.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.stream import BLOCK, CODES
from zeroshard.errors import CheckpointError, DamagedError

MANIFEST = "MANIFEST.json"
FORMAT = 2
MOST_BYTES = 2**28  # of a manifest
MOST = 2**53  # of any count
MOST_AXES = 64  # of a tensor, as in torch
COPIES = ("buffer", "rng")  # kinds of which every chunk is a whole copy; the chunks of all others are side by side
TAIL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements [start, stop) of a flattened tensor: their file, and the CRC-32 of each block of their bytes."""

    file: str
    start: int
    stop: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
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
    """All that is no tensor (`facts`), the files, and the tensors by logical name `kind:NAME`."""

    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)

    def dump(self) -> bytes:
        """The content of the file.

        Raises:
            ValueError: a fact is NaN or infinite, which JSON does not have.
        """
        files = {name: [entry.nbytes, entry.header_crc32] for name, entry in self.files.items()}
        tensors = {
            name: {
                "shape": entry.shape,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "chunks": [[chunk.file, chunk.start, chunk.stop, chunk.crc32] for chunk in entry.chunks],
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


def key_of(name: str, chunk: Chunk) -> str:
    """The key of a chunk in its file."""
    return f"{name}[{chunk.start}:{chunk.stop}]"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or one of another format. DamagedError: it is not what was written.
    """
    file = folder / MANIFEST
    try:
        if not file.is_file():
            held = "there is no such folder" if not folder.exists() else f"the folder has no {MANIFEST}"
            raise CheckpointError(f"{folder} is no checkpoint: {held}. Give the folder that engine.save wrote.")
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
    if type(version) is int and version != FORMAT and (good or tail is None):
        raise CheckpointError(
            f"{file} has format {version}, this zeroshard reads {FORMAT}; use the version that wrote it."
        )
    if not good:
        raise DamagedError(f"{file} is damaged (its own digest differs); use an earlier checkpoint.")
    try:
        return _parsed(table)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{file} is not to be trusted ({error}); use an earlier checkpoint.") from error


def _parsed(table: dict[str, Any]) -> Manifest:
    """Check everything. Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` with what is wrong."""
    _count(table["format"], "the format")
    manifest = Manifest({k: v for k, v in table.items() if k not in ("files", "tensors", "sha256", "format")})
    for key in ("optimizer", "extra"):
        if not isinstance(manifest.facts[key], dict):
            raise TypeError(f"{key} is no table")
    _count(manifest.facts["step"], "step")
    ranks = _count(manifest.facts["ranks"], "ranks")
    if ranks != len(table["files"]):
        raise ValueError(f"there are {len(table['files'])} files of {ranks} ranks")
    for rank, (name, words) in enumerate(table["files"].items()):
        if name != file_of(rank, ranks):
            raise ValueError(f"the file {name[:200]!r} is not the shard of rank {rank} of {ranks}")
        nbytes, crc32 = _list(words)
        manifest.files[name] = FileEntry(_count(nbytes, "bytes of a file"), _count(crc32, "a CRC-32"))
    for name, words in table["tensors"].items():
        manifest.tensors[name] = _entry(name, words, manifest.files)
    claimed: dict[str, int] = dict.fromkeys(manifest.files, 0)
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            claimed[chunk.file] += (chunk.stop - chunk.start) * entry.dtype.itemsize
    for name, nbytes in claimed.items():
        if nbytes > manifest.files[name].nbytes:
            raise ValueError(f"tensors claim {nbytes:,} bytes of {name}, which has {manifest.files[name].nbytes:,}")
    return manifest


def _entry(name: str, words: dict[str, Any], files: dict[str, FileEntry]) -> Entry:
    kind, colon, _ = name.partition(":")
    if not kind or not colon or not name.isprintable():
        raise ValueError(f"the tensor {name!r} has no kind, or no name to be read")
    if words.keys() != {"shape", "dtype", "chunks"} or words["dtype"] not in DTYPES:
        raise ValueError(f"what is said of {name!r} is not its shape, its dtype and its chunks")
    shape = tuple(_count(size, f"the shape of {name!r}") for size in _list(words["shape"]))
    if len(shape) > MOST_AXES:
        raise ValueError(f"{name!r} has {len(shape)} axes")
    dtype = DTYPES[words["dtype"]]
    numel = _count(math.prod(shape), f"the size of {name!r}")
    chunks = tuple(_chunk(name, row, dtype, files) for row in _list(words["chunks"]))
    if kind in COPIES:
        whole = all((chunk.start, chunk.stop) == (0, chunks[0].stop) for chunk in chunks) and bool(chunks)
    else:
        ends = [0, *(chunk.stop for chunk in sorted(chunks, key=lambda c: (c.start, c.stop)))]
        starts = [*sorted(chunk.start for chunk in chunks), numel]
        whole = ends == starts
    if not whole:
        raise ValueError(f"the chunks of {name!r} are not the whole of it")
    return Entry(shape, dtype, chunks)


def _chunk(name: str, row: list[Any], dtype: torch.dtype, files: dict[str, FileEntry]) -> Chunk:
    file, start, stop, digests = _list(row)
    if file not in files:
        raise ValueError(f"{name!r} is in {file!r}, which is not among the files")
    start, stop = _count(start, f"the start of {name!r}"), _count(stop, f"the stop of {name!r}")
    crc32 = tuple(_count(digest, "a CRC-32") for digest in _list(digests))
    if stop < start or len(crc32) != -(-(stop - start) * dtype.itemsize // BLOCK):
        raise ValueError(f"the chunk of {name!r} from {start} to {stop} has {len(crc32)} digests")
    return Chunk(file, start, stop, crc32)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"there is {str(value)[:40]!r} where a list belongs")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{what} is {str(value)[:40]}")
    return value


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"it holds {word[:40]}, which is no number")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
