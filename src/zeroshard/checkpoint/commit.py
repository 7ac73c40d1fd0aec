"""The checkpoint commit: every rank writes its shard, rank 0 the manifest, and one rename makes the checkpoint exist.

    step-00000100.tmp-TOKEN/rank-*.safetensors    each rank writes and syncs its own
    step-00000100.tmp-TOKEN/MANIFEST.json         rank 0, after the reports of all ranks; synced, then the folder
    step-00000100/                                renamed, and the folder above synced

Digests are computed in memory before a byte is written, so a fault of a disk or network is found. The manifest is read
back before the rename, and a sample of the rest before older checkpoints are removed. After a failure on any rank there
is no folder of that name, and all ranks raise its cause.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.disk import CheckpointDisk
from zeroshard.checkpoint.folder import retain
from zeroshard.checkpoint.manifest import MANIFEST, Chunk, FileEntry, Manifest, TensorEntry, file_of, read_manifest
from zeroshard.checkpoint.stream import Slot, in_order, write_tensors
from zeroshard.checkpoint.writer import Coordination, TensorPiece
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CheckpointError

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class WriteOrder:
    """An order to write this rank's part of one checkpoint.

    Attributes:
        token: part of the name of the temporary folder, unique to this attempt.
        pieces: the tensors of this rank.
        facts: the facts of this rank.
        merge: the manifest's facts, made on rank 0 from those of all ranks.
        keep: number of checkpoints that stay in the folder; None for all.
        written: set once every piece that is no copy is in the file, or the file has failed.
    """

    path: Path
    token: str
    pieces: list[TensorPiece]
    facts: dict[str, Any]
    merge: Callable[[list[dict[str, Any]]], dict[str, Any]]
    keep: int | None = None
    disk: CheckpointDisk = field(default_factory=CheckpointDisk)
    written: threading.Event = field(default_factory=threading.Event)

    @property
    def temporary(self) -> Path:
        """The folder that is written before the rename."""
        return self.path.with_name(f"{self.path.name}.tmp-{self.token}")


def write(order: WriteOrder, mesh: Mesh, coordination: Coordination) -> None:
    """Carry out an order; called on every rank, and all succeed or all raise.

    Raises:
        CheckpointError: a rank could not write.
    """
    problem, shard = None, {}
    try:
        order.disk.make_folder(order.temporary)
        json.dumps(order.facts)  # facts that are not JSON cannot be sent either
        shard = _write_shard(order, file_of(mesh.rank, mesh.ranks))
    except Exception as error:  # of any kind: the other ranks wait for a report
        problem = _text_of(error)
    finally:
        order.written.set()
    try:
        parts = coordination.collect([problem, shard, None if problem else order.facts])
    except CheckpointError as error:  # a rank has ended
        parts = [[_text_of(error), {}, None]]
    if mesh.rank == 0:
        problem = next((found for found, _, _ in parts if found), None) or _commit(order, parts)
        if problem:
            order.disk.remove(order.temporary)
    problem = coordination.broadcast(problem)
    if problem:
        raise CheckpointError(
            f"The checkpoint {order.path} was not written: {problem.rstrip('.')}. Earlier ones are as they were; "
            f"remove the cause and save again."
        )
    if mesh.rank == 0:
        LOG.info("wrote the checkpoint %s", order.path)
    if mesh.heartbeat is not None:
        mesh.heartbeat.committed(order.facts["step"])


def _write_shard(order: WriteOrder, file: str) -> dict[str, Any]:
    """Write the pieces of a rank, those first that are no copies; returns their entries for the manifest."""
    pieces = sorted(order.pieces, key=lambda piece: (in_order(piece.values.dtype), piece.lasting))
    chunks = [Chunk(file, piece.box, ()) for piece in pieces]
    slots = [
        Slot(chunk.key(piece.name), piece.values.dtype, (chunk.numel,))
        for piece, chunk in zip(pieces, chunks, strict=True)
    ]
    done = write_tensors(order.disk, order.temporary / file, slots, _values(order, pieces))
    rows = [
        [p.name, p.shape, str(p.values.dtype).removeprefix("torch."), p.box.start, p.box.shape, blocks]
        for p, blocks in zip(pieces, done.blocks, strict=True)
    ]
    return {"file": file, "nbytes": done.nbytes, "header_crc32": done.header_crc32, "rows": rows}


def _values(order: WriteOrder, pieces: list[TensorPiece]) -> Iterator[torch.Tensor]:
    """The values of the pieces; the next is asked for when the last is in the file."""
    last = max((number for number, piece in enumerate(pieces) if not piece.lasting), default=-1)
    for number, piece in enumerate(pieces):
        if number > last:
            order.written.set()
        yield piece.present


def _commit(order: WriteOrder, parts: list[list[Any]]) -> str | None:
    """Write the manifest and rename the folder; returns the problem, or None."""
    disk, path, temporary = order.disk, order.path, order.temporary
    try:
        if path.exists():
            raise CheckpointError("it exists already, and checkpoints are never overwritten; choose another path")
        with disk.create(temporary / MANIFEST) as file:
            disk.write(file, _manifest(order, parts).dump())
            disk.sync(file)
        read_manifest(temporary)
        disk.sync_folder(temporary)
        disk.rename(temporary, path)
        try:
            disk.sync_folder(path.parent)
            if order.keep is not None:
                retain(path, order.keep, disk)
        except Exception:
            with contextlib.suppress(OSError):
                disk.rename(path, temporary)
            raise
    except Exception as error:  # of any kind: the other ranks wait for a report
        return _text_of(error)
    return None


def _manifest(order: WriteOrder, parts: list[list[Any]]) -> Manifest:
    """The manifest of the shards of all ranks."""
    manifest = Manifest({**order.merge([facts for _, _, facts in parts]), "ranks": len(parts)})
    chunks: dict[str, list[Chunk]] = {}
    for _, shard, _ in parts:
        manifest.files[shard["file"]] = FileEntry(shard["nbytes"], shard["header_crc32"])
        for name, shape, dtype, start, lengths, blocks in shard["rows"]:
            entry = TensorEntry(tuple(shape), getattr(torch, dtype), ())
            known = manifest.tensors.setdefault(name, entry)
            if known != entry:
                raise CheckpointError(
                    f"'{name}' has another shape or dtype on another rank ({list(entry.shape)} and {entry.dtype}, "
                    f"{list(known.shape)} and {known.dtype}); make it equal on all "
                    f"ranks, or register it with persistent=False"
                )
            box = Box(tuple(start), tuple(lengths))
            chunks.setdefault(name, []).append(Chunk(shard["file"], box, tuple(blocks)))
    for name, parts_of in chunks.items():
        manifest.tensors[name] = replace(manifest.tensors[name], chunks=tuple(parts_of))
    return manifest


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
