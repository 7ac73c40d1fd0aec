"""Writing a checkpoint: every rank its shard, rank 0 the manifest, and one rename that makes it exist.

    step-00000100.tmp-TOKEN/rank-*.safetensors    each rank writes and syncs its own
    step-00000100.tmp-TOKEN/MANIFEST.json         rank 0, when all have said what they wrote; synced, then the folder
    step-00000100/                                renamed, and the folder above synced

Digests are made from memory before a byte is written, so that what a disk or a wire changes is seen. The manifest is
read back before the rename, and a sample of the rest before older checkpoints go. Whatever fails on any rank, the
folder of that name is not there, and all ranks learn why.

[Note: two boards] Ranks tell each other what they wrote by the engine's own agreements where they wait for the disk,
and through the key-value store where a thread writes while training goes on: the thread must not start collectives.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeroshard.checkpoint.boxes import Box, cut
from zeroshard.checkpoint.disk import Disk
from zeroshard.checkpoint.folder import retain
from zeroshard.checkpoint.manifest import MANIFEST, Chunk, Entry, FileEntry, Manifest, file_of, read_manifest
from zeroshard.checkpoint.stream import Slot, in_order, write_tensors
from zeroshard.comm import Comm
from zeroshard.errors import CheckpointError
from zeroshard.ledger import Category, Ledger
from zeroshard.mesh import Mesh
from zeroshard.platform import accelerator
from zeroshard.rendezvous import give_up

POLLS = 0.005, 0.1  # seconds between looks into the store, at first and at most


@dataclass(frozen=True, slots=True)
class Piece:
    """The values of one box of the tensor `name` of shape `shape`, in the row-major order of the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor

    @classmethod
    def whole(cls, name: str, values: torch.Tensor) -> "Piece":
        """All of a tensor."""
        return cls(name, tuple(values.shape), Box.whole(tuple(values.shape)), values)

    @classmethod
    def cut(
        cls, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor, box: Box | None = None
    ) -> "Iterator[Piece]":
        """A range of the flattened tensor that a rank has; of the range of an empty tensor, that tensor.

        Args:
            shape: of the tensor as the checkpoint holds it.
            start: the first element of the range in the tensor of this rank.
            values: of the range (1-D); the pieces are views of them.
            box: which part of the tensor this rank has; all of it by default.
        """
        whole, at = Box.whole(shape), 0
        parts = cut(box or whole, start, start + values.numel()) if whole.numel else [whole]
        for part in parts:
            yield cls(name, shape, part, values[at : at + part.numel])
            at += part.numel


class Snapshot:
    """Copies of a rank's pieces on the host, in buffers that stay from one checkpoint to the next."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffers: dict[tuple[str, Box], torch.Tensor] = {}

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same pieces, with values that no step changes any more."""
        before, self._buffers = self._buffers, {}
        copies, devices = [], set[torch.device]()
        for piece in pieces:
            values = piece.values.detach()
            buffer = before.pop((piece.name, piece.box), None)
            if buffer is None or (buffer.dtype, buffer.numel()) != (values.dtype, values.numel()):
                self._enter(buffer, values)
                buffer = accelerator.page_locked(values.numel(), values.dtype, values.device)
            buffer.copy_(values.reshape(-1), non_blocking=True)
            devices.add(values.device)
            self._buffers[piece.name, piece.box] = buffer
            copies.append(replace(piece, values=buffer))
        for buffer in before.values():
            self._enter(buffer, None)
        for device in devices:
            accelerator.finish_stream(device)
        return copies

    def _enter(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        if old is not None:
            self._ledger.give(Category.BUFFERS, old.nbytes, "checkpoint", tier="host")
        if new is not None:
            self._ledger.take(Category.BUFFERS, new.nbytes, "checkpoint", tier="host")


class Board(Protocol):
    """How ranks tell each other how far they are; calls come in the same order on all ranks."""

    def collect(self, word: Any) -> list[Any]:
        """On rank 0 every rank's word (whatever JSON holds), in rank order; on the others nothing."""

    def spread(self, word: Any) -> Any:
        """Rank 0's word, on every rank."""


class Meeting:
    """The board of ranks that wait for each other."""

    def __init__(self, comm: Comm, name: str) -> None:
        self._comm, self._name = comm, name

    def collect(self, word: Any) -> list[Any]:
        """All words, on every rank."""
        return self._comm.agree_on(word, f"parts of {self._name}")

    def spread(self, word: Any) -> Any:
        """Rank 0's word."""
        return self._comm.agree_on(word, f"end of {self._name}")[0]


class Notes:
    """The board of threads: notes in the store, which are looked for now and then.

    Raises:
        CheckpointError: from `collect` and `spread`, when a rank has failed, or the store does not answer.
    """

    def __init__(self, mesh: Mesh, token: str) -> None:
        self._mesh, self._token = mesh, token

    def collect(self, word: Any) -> list[Any]:
        """On rank 0 all words, which are taken out of the store."""
        mesh, store = self._mesh, self._mesh.store
        if mesh.ranks == 1 or store is None:
            return [word]
        if mesh.rank:
            with _Naming(self._mesh):
                store.set(f"save/{self._token}/{mesh.rank}", json.dumps(word))
            return []
        words = [word]
        for rank in range(1, mesh.ranks):
            words.append(json.loads(self._look_for(f"save/{self._token}/{rank}")))
            with _Naming(self._mesh):
                store.delete_key(f"save/{self._token}/{rank}")
        return words

    def spread(self, word: Any) -> Any:
        """Rank 0's word, which stays in the store."""
        mesh, store = self._mesh, self._mesh.store
        if mesh.ranks == 1 or store is None:
            return word
        if mesh.rank == 0:
            with _Naming(self._mesh):
                store.set(f"save/{self._token}/end", json.dumps(word))
            return word
        return json.loads(self._look_for(f"save/{self._token}/end"))

    def _look_for(self, key: str) -> bytes:
        """Wait for a note: as long as training goes on, and for the timeout where it has ended or waits for this."""
        mesh, pause, moved = self._mesh, POLLS[0], time.monotonic()
        assert mesh.store is not None and mesh.failures is not None
        while True:
            with _Naming(self._mesh):
                if mesh.store.check([key]):
                    return mesh.store.get(key)
                if mesh.failures.check(["failure"]):
                    raise CheckpointError(mesh.failures.get("failure").decode())
            if threading.main_thread().is_alive() and not getattr(threading.current_thread(), "awaited", False):
                moved = time.monotonic()
            elif time.monotonic() - moved > mesh.timeout:
                raise CheckpointError(f"another rank was silent for {mesh.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLLS[1])


class _Naming:
    """Turns an error of the store into a `CheckpointError`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, dist.DistError):
            raise CheckpointError(give_up(self._mesh.store)) from error


@dataclass(slots=True)
class Order:
    """One checkpoint as one rank is to write it.

    Attributes:
        token: what tells the folder that is being written from that of any other try.
        pieces: this rank's.
        facts: this rank's facts.
        merge: makes the manifest's facts out of those of all ranks; called on rank 0.
        keep: how many checkpoints of the folder stay; None for all.
    """

    path: Path
    token: str
    pieces: list[Piece]
    facts: dict[str, Any]
    merge: Callable[[list[dict[str, Any]]], dict[str, Any]]
    keep: int | None = None
    disk: Disk = field(default_factory=Disk)

    @property
    def temporary(self) -> Path:
        """Where it is being written."""
        return self.path.with_name(f"{self.path.name}.tmp-{self.token}")


def write(order: Order, mesh: Mesh, board: Board) -> None:
    """Carry out an order; every rank calls it, and all succeed or all raise.

    Raises:
        CheckpointError: some rank could not write.
    """
    problem, words = None, {}
    try:
        order.disk.make_folder(order.temporary)
        json.dumps(order.facts)  # what is no JSON cannot even be told
        words = _write_shard(order, file_of(mesh.rank, mesh.ranks))
    except Exception as error:  # of whatever kind: the others wait for a word
        problem = _in_words(error)
    try:
        parts = board.collect([problem, words, None if problem else order.facts])
    except CheckpointError as error:  # a rank is gone
        parts = [[_in_words(error), {}, None]]
    if mesh.rank == 0:
        problem = next((words for words, _, _ in parts if words), None) or _commit(order, parts)
        if problem:
            order.disk.remove(order.temporary)
    problem = board.spread(problem)
    if problem:
        raise CheckpointError(
            f"The checkpoint {order.path} was not written: {problem.rstrip('.')}. Earlier ones are as they were; mend "
            f"that and save again."
        )
    if mesh.pulse is not None:
        mesh.pulse.committed(order.facts["step"])


class _Writer(threading.Thread):
    """The thread that writes a checkpoint; `awaited` while another stands still for it."""

    awaited = False


class Saving:
    """A checkpoint on its way to the disk, or already there.

    Attributes:
        path: where it will be.
        exposed_seconds: how long the caller stood still for it.
        problem: why it is not there; None while under way and after success.
        seen: whether `wait` has raised it.
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self.exposed_seconds = 0.0
        self.problem: CheckpointError | None = None
        self.seen = False
        self._work = work
        self._thread = _Writer(target=self._run, name=f"zeroshard saves {path.name}", daemon=True)

    @property
    def done(self) -> bool:
        """Whether it is on the disk, or has failed."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def wait(self) -> Path:
        """Wait until it is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self.join()
        if self.problem is not None:
            self.seen = True
            raise self.problem
        return self.path

    def join(self, seconds: float | None = None) -> None:
        """Wait until it is on the disk or has failed, at most so long; a problem is left for others to see."""
        if self._thread.ident is not None:
            self._thread.awaited = True
            self._thread.join(seconds)
            self._thread.awaited = False

    def _run(self) -> None:
        try:
            self._work()
        except CheckpointError as error:
            self.problem = error
        except BaseException as error:  # no thread may die in silence
            self.problem = CheckpointError(f"The checkpoint {self.path} was not written: {error!r}.")


def _write_shard(order: Order, file: str) -> dict[str, Any]:
    """Write a rank's pieces; what the manifest must know of them."""
    pieces = sorted(order.pieces, key=lambda piece: in_order(piece.values.dtype))
    chunks = [Chunk(file, piece.box, ()) for piece in pieces]
    slots = [
        Slot(chunk.key(piece.name), piece.values.dtype, (chunk.numel,))
        for piece, chunk in zip(pieces, chunks, strict=True)
    ]
    done = write_tensors(order.disk, order.temporary / file, slots, (piece.values for piece in pieces))
    rows = [
        [p.name, p.shape, str(p.values.dtype).removeprefix("torch."), p.box.start, p.box.shape, blocks]
        for p, blocks in zip(pieces, done.blocks, strict=True)
    ]
    return {"file": file, "nbytes": done.nbytes, "header_crc32": done.header_crc32, "rows": rows}


def _commit(order: Order, parts: list[list[Any]]) -> str | None:
    """Write the manifest and let the checkpoint exist; returns what went wrong."""
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
    except Exception as error:  # of whatever kind: the others wait for a word
        return _in_words(error)
    return None


def _manifest(order: Order, parts: list[list[Any]]) -> Manifest:
    """What all ranks wrote."""
    manifest = Manifest({**order.merge([facts for _, _, facts in parts]), "ranks": len(parts)})
    chunks: dict[str, list[Chunk]] = {}
    for _, words, _ in parts:
        manifest.files[words["file"]] = FileEntry(words["nbytes"], words["header_crc32"])
        for name, shape, dtype, start, lengths, blocks in words["rows"]:
            entry = Entry(tuple(shape), getattr(torch, dtype), ())
            known = manifest.tensors.setdefault(name, entry)
            if known != entry:
                raise CheckpointError(
                    f"'{name}' has another shape or dtype on another rank ({list(entry.shape)} and {entry.dtype}, "
                    f"{list(known.shape)} and {known.dtype}); let it be alike on all, or persistent=False"
                )
            box = Box(tuple(start), tuple(lengths))
            chunks.setdefault(name, []).append(Chunk(words["file"], box, tuple(blocks)))
    for name, parts_of in chunks.items():
        manifest.tensors[name] = replace(manifest.tensors[name], chunks=tuple(parts_of))
    return manifest


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
