"""The format of a checkpoint folder.

    MANIFEST.json                     what there is: names, shapes, intervals, checksums, and what is no tensor
    rank-00000-of-00002.safetensors   the pieces that rank 0 wrote
    ...

A tensor is cut into pieces: the elements [start, stop) of its flattened values. Pieces carry logical names
(`weight:blocks.0.up.weight`, `exp_avg:blocks.0.up.weight`), never the numbers of ranks, so any number of ranks can read
what any other number wrote. The folder is written beside its place and renamed when it is whole; none is overwritten.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zeroshard.comm import Comm
from zeroshard.errors import CheckpointError

MANIFEST = "MANIFEST.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + values.numel()) of the flattened tensor `name` of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a piece is: its file, its key there, its interval, and the CRC-32 of its bytes in memory."""

    file: str
    key: str
    start: int
    stop: int
    crc32: int


def write(path: Path, pieces: Iterator[Piece], facts: Mapping[str, Any], comm: Comm) -> None:
    """Write a checkpoint; a collective call in which every rank brings its own pieces.

    Args:
        facts: what is no tensor (plan, step, ...), as JSON holds it; rank 0's counts.

    Raises:
        CheckpointError: the path exists, or a rank could not write.
    """
    mesh, temporary = comm.mesh, path.with_name(path.name + ".tmp")
    problem = None
    if mesh.rank == 0:
        problem = _prepare(path, temporary)
    _all_well(comm, problem, path)
    file = f"rank-{mesh.rank:05d}-of-{mesh.ranks:05d}.safetensors"
    table: list[dict[str, Any]] = []
    try:
        table = _write_shard(temporary / file, list(pieces))
    except (OSError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
    _all_well(comm, problem, path)
    tables = comm.agree_on(table, "checkpoint tables")
    if mesh.rank == 0:
        problem = _commit(path, temporary, {"format": FORMAT, **facts, "ranks": mesh.ranks, "tensors": _merge(tables)})
    _all_well(comm, problem, path)


class Reader:
    """Reads a checkpoint: its facts, and any interval of any tensor in it, verified.

    Raises:
        CheckpointError: no checkpoint there, one of another format, or a damaged manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / MANIFEST
        if not file.is_file():
            held = "there is no such folder" if not path.exists() else f"the folder has no {MANIFEST}"
            raise CheckpointError(f"{path} is no checkpoint: {held}. Give the folder that engine.save wrote.")
        try:
            self.facts = json.loads(file.read_bytes())
            self.tensors: dict[str, Any] = self.facts.pop("tensors")
            version = self.facts["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); use an earlier checkpoint.") from error
        if version != FORMAT:
            raise CheckpointError(
                f"{file} has format {version}, this zeroshard reads {FORMAT}; use the version that wrote it."
            )

    def names(self, kind: str) -> list[str]:
        """The logical names `NAME` of all tensors `kind:NAME`."""
        return [name.removeprefix(kind + ":") for name in self.tensors if name.startswith(kind + ":")]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None if it is not there."""
        return tuple(self.tensors[name]["shape"]) if name in self.tensors else None

    def read(self, name: str, into: torch.Tensor, start: int) -> None:
        """Fill `into` (1-D) with the elements of tensor `name` from `start` on.

        Raises:
            CheckpointError: elements are missing, or a piece is damaged.
        """
        stop, filled = start + into.numel(), 0
        for chunk in (Chunk(**c) for c in self.tensors[name]["chunks"]):
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            if low < high:
                values = self._verified(chunk, name)
                into[low - start : high - start].copy_(values[low - chunk.start : high - chunk.start])
                filled += high - low
        if filled != into.numel():
            raise CheckpointError(
                f"{self.path} holds {filled} of the {into.numel()} elements of '{name}' from {start}; it is not whole."
            )

    def whole(self, name: str, part: int = 0) -> torch.Tensor:
        """The piece number `part` of a tensor, flat and in its own dtype (the last, if there are fewer)."""
        chunks = self.tensors[name]["chunks"]
        return self._verified(Chunk(**chunks[min(part, len(chunks) - 1)]), name)

    def _verified(self, chunk: Chunk, name: str) -> torch.Tensor:
        if Path(chunk.file).name != chunk.file:
            raise CheckpointError(
                f"{self.path / MANIFEST} names the file {chunk.file!r} outside its folder; it is not to be trusted."
            )
        try:
            with safe_open(self.path / chunk.file, framework="pt") as file:
                values: torch.Tensor = file.get_tensor(chunk.key)
        except Exception as error:  # safetensors raises its own kinds for a short or foreign file
            raise CheckpointError(
                f"{self.path / chunk.file} cannot be read for '{name}' ({error}); use an earlier checkpoint."
            ) from error
        if values.numel() != chunk.stop - chunk.start or _crc32(values) != chunk.crc32:
            raise CheckpointError(f"{self.path / chunk.file} is damaged in '{name}'; use an earlier checkpoint.")
        return values


def _prepare(path: Path, temporary: Path) -> str | None:
    if path.exists():
        return "it exists already, and checkpoints are never overwritten; choose another path"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _commit(path: Path, temporary: Path, manifest: dict[str, Any]) -> str | None:
    try:
        _write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary)
        temporary.rename(path)
        _sync_folder(path.parent)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _all_well(comm: Comm, problem: str | None, path: Path) -> None:
    problems = [p for p in comm.agree_on(problem, f"checkpoint {path.name}") if p]
    if problems:
        raise CheckpointError(f"The checkpoint {path} was not written: {problems[0]}.")


def _write_shard(file: Path, pieces: list[Piece]) -> list[dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    table = []
    for number, piece in enumerate(pieces):
        values, key = piece.values.detach().cpu().contiguous(), f"{number}:{piece.name}"
        tensors[key] = values.clone() if values.untyped_storage().nbytes() != values.nbytes else values
        chunk = Chunk(file.name, key, piece.start, piece.start + values.numel(), _crc32(values))
        dtype = str(values.dtype).removeprefix("torch.")
        table.append({"name": piece.name, "shape": list(piece.shape), "dtype": dtype, "chunk": asdict(chunk)})
    save_file(tensors, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())
    return table


def _merge(tables: list[list[dict[str, Any]]]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for row in (row for table in tables for row in table):
        entry = tensors.setdefault(row["name"], {"shape": row["shape"], "dtype": row["dtype"], "chunks": []})
        entry["chunks"].append(row["chunk"])
    return tensors


def _crc32(values: torch.Tensor) -> int:
    return zlib.crc32(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_durably(file: Path, content: bytes) -> None:
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
