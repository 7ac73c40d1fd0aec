"""Reading a checkpoint: any range of any box of a tensor, each byte checked against its digest before it is used."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeroshard.checkpoint.boxes import Box, BoxValues, copy_common, cut, extent, one_by_one
from zeroshard.checkpoint.manifest import MANIFEST, Chunk, TensorEntry, file_of, read_manifest
from zeroshard.checkpoint.stream import BLOCK, bytes_of
from zeroshard.errors import CheckpointError, DamagedError

MOST_HEADER = 100_000_000  # bytes; safetensors reads no larger header


class Reader:
    """The facts of a checkpoint, and its tensors by range and box; reads only the blocks that hold them.

    Raises:
        CheckpointError: no checkpoint there, or one of another format. DamagedError: a damaged manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_manifest(path)
        self.facts, self.files, self.tensors = manifest.facts, manifest.files, manifest.tensors
        self._open: dict[str, Any] = {}
        self._positions: dict[str, list[range]] = {}
        self._kinds: dict[str, list[str]] = {}
        for kind, _, name in (full.partition(":") for full in self.tensors):
            self._kinds.setdefault(name, []).append(kind)

    def refuse_without_base(self) -> None:
        """Refuse a checkpoint as a source of all weights, if it left out a frozen base.

        Raises:
            CheckpointError: with the place of the base.
        """
        if base := self.facts.get("base"):
            way = "; or export it with --merge" if self.facts.get("adapters") else ""
            raise CheckpointError(
                f"{self.path} holds trained weights alone; its frozen base is in {base['source']}. Read that with "
                f"engine.load_weights and then this with engine.load, or save with engine.save(path, base=True)"
                f"{way}."
            )

    def names(self, kind: str) -> list[str]:
        """The logical names `NAME` of all tensors `kind:NAME`."""
        return [name.removeprefix(kind + ":") for name in self.tensors if name.startswith(kind + ":")]

    def kinds(self, name: str) -> list[str]:
        """The kinds of all tensors `kind:NAME`."""
        return self._kinds.get(name, [])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or None if it is missing."""
        return self.tensors[name].shape if name in self.tensors else None

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor, or None if it is missing."""
        return self.tensors[name].dtype if name in self.tensors else None

    def read(self, name: str, into: torch.Tensor, start: int) -> None:
        """Fill `into` (1-D) with elements of tensor `name`, from `start` on in row-major order.

        Raises:
            CheckpointError, DamagedError: as `fill`.
        """
        whole = Box.whole(self._entry(name).shape)
        wanted = cut(whole, start, min(start + into.numel(), whole.numel)) if start >= 0 else []
        self._fill(name, one_by_one(wanted, into), into.numel(), f"[{whole}]' from {start}")

    def fill(self, name: str, targets: Sequence[BoxValues]) -> None:
        """Fill boxes with elements of tensor `name`, one block at a time.

        Raises:
            CheckpointError: elements are missing, or a file cannot be read. DamagedError: a block does not match its
                digest.
        """
        whole = Box.whole(self._entry(name).shape)
        inside = [target for target in targets if target.box.inside(whole)]
        boxes = "; ".join(f"[{target.box}]" for target in targets)
        self._fill(name, inside, sum(target.values.numel() for target in targets), f"{boxes}'")

    def whole(self, name: str, rank: int = 0) -> torch.Tensor:
        """The copy of a tensor from `rank`, or the first copy if `rank` wrote none; flat and in its own dtype."""
        entry = self._entry(name)
        own = (chunk for chunk in entry.chunks if chunk.file == file_of(rank, len(self.files)))
        chunk = next(own, entry.chunks[0])
        blocks = [self._block(name, chunk, number) for number in range(len(chunk.crc32))]
        return torch.cat(blocks) if blocks else torch.empty(0, dtype=entry.dtype)

    def problems(self, sample: bool = False) -> Iterator[str]:
        """The problems of the content, each with its file and tensor; reads every byte.

        Args:
            sample: read only the headers and one block of every file.
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
                if chunk.file not in self._open or not chunk.numel or (sample and chunk.file in seen):
                    continue
                seen.add(chunk.file)
                try:
                    for number in range(1 if sample else len(chunk.crc32)):
                        self._block(name, chunk, number)
                except CheckpointError as error:
                    yield str(error)

    def _fill(self, name: str, targets: Sequence[BoxValues], numel: int, what: str) -> None:
        entry, filled = self.tensors[name], 0
        near = extent([Box.whole(entry.shape)], [target.box for target in targets])
        for chunk, place in zip(entry.chunks, self._places(name), strict=True):
            if place.start < near.stop and near.start < place.stop:
                filled += self._copy(name, chunk, targets)
        if filled != numel:
            raise CheckpointError(
                f"{self.path} holds {filled} of the {numel} elements of '{name}{what}; it is not whole."
            )

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor '{name}'.")
        return self.tensors[name]

    def _places(self, name: str) -> list[range]:
        """The range from the first to the last element of each chunk, as positions in the flattened tensor."""
        if name not in self._positions:
            entry = self.tensors[name]
            whole = [Box.whole(entry.shape)]
            self._positions[name] = [extent(whole, chunk.boxes(0, chunk.numel)) for chunk in entry.chunks]
        return self._positions[name]

    def _copy(self, name: str, chunk: Chunk, targets: Sequence[BoxValues]) -> int:
        """Fill boxes with their elements in a chunk; returns the number of elements."""
        step, filled, wanted = BLOCK // self.tensors[name].dtype.itemsize, 0, [target.box for target in targets]
        near = extent(chunk.boxes(0, chunk.numel), wanted)
        numbers = range(near.start // step, -(-near.stop // step))
        for number in numbers:
            held = chunk.boxes(number * step, min((number + 1) * step, chunk.numel))
            if len(numbers) == 1 or extent(held, wanted):  # in wide rows, some blocks hold no element of a box
                filled += copy_common(targets, self._block(name, chunk, number), held)
        return filled

    def _block(self, name: str, chunk: Chunk, number: int) -> torch.Tensor:
        """The values of one block of a chunk."""
        dtype, file = self.tensors[name].dtype, self._file(chunk.file)
        step = BLOCK // dtype.itemsize
        first, last = number * step, min((number + 1) * step, chunk.numel)
        try:
            values: torch.Tensor = file.get_slice(chunk.key(name))[first:last]
        except Exception as error:  # safetensors raises several kinds
            raise DamagedError(f"{self.path / chunk.file} does not hold '{name}' ({error}).") from error
        good = values.dtype == dtype and values.shape == (last - first,)
        if not good or zlib.crc32(bytes_of(values)) != chunk.crc32[number]:
            raise DamagedError(
                f"{self.path / chunk.file} is damaged in '{name}' (elements {first} to {last} of [{chunk.box}]); use "
                f"an earlier checkpoint."
            )
        return values

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
