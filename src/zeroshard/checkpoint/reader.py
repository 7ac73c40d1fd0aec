"""Reading a checkpoint: any interval of any tensor, each byte checked against its digest before it is used."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeroshard.checkpoint.manifest import MANIFEST, Chunk, Entry, file_of, key_of, read_manifest
from zeroshard.checkpoint.stream import BLOCK, bytes_of
from zeroshard.errors import CheckpointError, DamagedError

MOST_HEADER = 100_000_000  # bytes that the library reads


class Reader:
    """The facts of a checkpoint, and its tensors by interval; reads only the blocks that are asked for.

    Raises:
        CheckpointError: no checkpoint there, or one of another format. DamagedError: a damaged manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_manifest(path)
        self.facts, self.files, self.tensors = manifest.facts, manifest.files, manifest.tensors
        self._open: dict[str, Any] = {}
        self._kinds: dict[str, list[str]] = {}
        for kind, _, of in (full.partition(":") for full in self.tensors):
            self._kinds.setdefault(of, []).append(kind)

    def names(self, kind: str) -> list[str]:
        """The logical names `NAME` of all tensors `kind:NAME`."""
        return [name.removeprefix(kind + ":") for name in self.tensors if name.startswith(kind + ":")]

    def kinds(self, name: str) -> list[str]:
        """The kinds of all tensors `kind:NAME`."""
        return self._kinds.get(name, [])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None if it is not there."""
        return self.tensors[name].shape if name in self.tensors else None

    def read(self, name: str, into: torch.Tensor, start: int) -> None:
        """Fill `into` (1-D) with the elements of tensor `name` from `start` on, one block at a time.

        Raises:
            CheckpointError: elements are missing, or a file cannot be read. DamagedError: a block is not what was
                written.
        """
        stop, filled = start + into.numel(), 0
        entry = self._entry(name)
        for chunk in entry.chunks:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            for first, values in self._blocks(name, entry, chunk, low, high):
                a, b = max(low, first), min(high, first + values.numel())
                into[a - start : b - start].copy_(values[a - first : b - first])
                filled += b - a
        if filled != into.numel():
            raise CheckpointError(
                f"{self.path} holds {filled} of the {into.numel()} elements of '{name}' from {start}; it is not whole."
            )

    def whole(self, name: str, rank: int = 0) -> torch.Tensor:
        """The copy of a tensor that `rank` wrote, flat and in its own dtype; the first one, if it wrote none."""
        entry = self._entry(name)
        own = (chunk for chunk in entry.chunks if chunk.file == file_of(rank, len(self.files)))
        chunk = next(own, entry.chunks[0])
        blocks = [values for _, values in self._blocks(name, entry, chunk, chunk.start, chunk.stop)]
        return torch.cat(blocks) if blocks else torch.empty(0, dtype=entry.dtype)

    def problems(self, sample: bool = False) -> Iterator[str]:
        """What is wrong with the content, each problem with its file and tensor: every byte is read.

        Args:
            sample: read the headers and one block of every file only.
        """
        for name in sorted(self.files):
            try:
                self._file(name)
            except CheckpointError as error:
                yield str(error)
        try:
            unlisted = {path.name for path in self.path.iterdir()} - {*self.files, MANIFEST}
        except OSError as error:
            unlisted = set()
            yield f"{self.path} cannot be read ({error.strerror}); use an earlier checkpoint."
        for name in sorted(unlisted):
            yield f"{self.path / name} is not in the manifest; it is of no use, remove it."
        seen: set[str] = set()
        for name, entry in self.tensors.items():
            for chunk in entry.chunks:
                if chunk.file not in self._open or chunk.start == chunk.stop or (sample and chunk.file in seen):
                    continue
                seen.add(chunk.file)
                stop = min(chunk.stop, chunk.start + 1) if sample else chunk.stop
                try:
                    for _ in self._blocks(name, entry, chunk, chunk.start, stop):
                        pass
                except CheckpointError as error:
                    yield str(error)

    def _entry(self, name: str) -> Entry:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor '{name}'.")
        return self.tensors[name]

    def _blocks(self, name: str, entry: Entry, chunk: Chunk, low: int, high: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of every block of a chunk that meets the elements [low, high)."""
        if low >= high:
            return
        step = BLOCK // entry.dtype.itemsize
        file = self._file(chunk.file)
        for number in range((low - chunk.start) // step, -(-(high - chunk.start) // step)):
            first = chunk.start + number * step
            last = min(first + step, chunk.stop)
            try:
                values = file.get_slice(key_of(name, chunk))[first - chunk.start : last - chunk.start]
            except Exception as error:  # the library raises its own kinds
                raise DamagedError(f"{self.path / chunk.file} does not hold '{name}' ({error}).") from error
            good = values.dtype == entry.dtype and values.numel() == last - first
            if not good or zlib.crc32(bytes_of(values)) != chunk.crc32[number]:
                raise DamagedError(
                    f"{self.path / chunk.file} is damaged in '{name}' (elements {first} to {last}); use an earlier "
                    f"checkpoint."
                )
            yield first, values

    def _file(self, name: str) -> Any:
        """An open file whose size and header are those of the manifest."""
        if name not in self._open:
            path, wanted = self.path / name, self.files[name]
            try:
                nbytes = path.stat().st_size
                if nbytes != wanted.nbytes or not path.is_file():
                    raise DamagedError(
                        f"{path} has {nbytes:,} bytes and {wanted.nbytes:,} were written; use an earlier checkpoint."
                    )
                with path.open("rb") as file:
                    head = file.read(8)
                    length = int.from_bytes(head, "little")
                    header = head + file.read(length) if length <= MOST_HEADER else b""
            except OSError as error:
                raise DamagedError(f"{path} cannot be read ({error.strerror}); use an earlier checkpoint.") from error
            if zlib.crc32(header) != wanted.header_crc32:
                raise DamagedError(f"{path} is damaged in its header; use an earlier checkpoint.")
            try:
                self._open[name] = safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
            except (OSError, SafetensorError) as error:
                raise DamagedError(f"{path} cannot be read ({error}); use an earlier checkpoint.") from error
        return self._open[name]
