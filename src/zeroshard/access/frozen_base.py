"""The frozen weights that an engine read from files: checkpoints leave them out and keep their digests instead.

[Note: a base in files] A run that trains adapters has a base that no step changes, and that is in files already. A
checkpoint holds what is trained, and of each frozen tensor that came from files its shape, dtype and digest; resuming
reads the base from its files again and compares. Weights that were written after they were read
(`engine.gathered()`) are no longer those of the files, so checkpoints hold them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.digests import MODULUS, digest
from zeroshard.checkpoint.writer import TensorPiece
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CheckpointError
from zeroshard.optim.states.whole_states import merged_options
from zeroshard.parts.part import Part
from zeroshard.pipeline import buffers

Row = list[Any]  # of a tensor: its shape, its dtype, and its digest, or one rank's share of that


@dataclass(slots=True)
class FrozenBase:
    """The frozen weights of one engine that came from files.

    Attributes:
        source: the path of the files; None before any were read.
        rows: this rank's shares of the digests, by the name of the parameter; None until they are needed.
    """

    source: str | None = None
    rows: dict[str, Row] | None = None
    _read: dict[str, tuple[Part, int]] = field(default_factory=dict)  # by name its part, and that part's edits

    def take(self, source: Path | str | None, parts: Iterable[Part], adapters: Iterable[str]) -> None:
        """Note that all parameters were read from files.

        Args:
            adapters: names of parameters that were not.
        """
        own = set(adapters)
        self.source, self.rows = None if source is None else str(Path(source).absolute()), None
        frozen = ((part, entry.name) for part in parts if part.gradients is None for entry in part.flat.index.entries)
        self._read = {name: (part, part.flat.edits) for part, name in frozen if name not in own}

    def replaced(self, part: Part, parts: Iterable[Part]) -> None:
        """Follow frozen parameters of a part into others; those that are trained now are in no file any more."""
        self.rows = None
        kept = {name for name, (held, edits) in self._read.items() if held is part and part.flat.edits == edits}
        self._read = {name: row for name, row in self._read.items() if row[0] is not part}
        for other in parts:
            names = [entry.name for entry in other.flat.index.entries if entry.name in kept]
            self._read |= {name: (other, other.flat.edits) for name in names if other.gradients is None}

    def left_out(self, world: Comm) -> set[str]:
        """The names that a checkpoint leaves out; a collective call, if there may be any.

        They are frozen, came from files, and no rank has written them since.
        """
        if self.source is None or not self._read:
            return set()
        labels = {part.flat.label: part for part, _ in self._read.values()}
        still = {part.flat.label for part, edits in self._read.values() if part.flat.edits == edits}
        written = {
            label for theirs in world.agree_on(sorted(labels.keys() - still), "written base") for label in theirs
        }
        return {
            name for name, (part, _) in self._read.items() if part.gradients is None and part.flat.label not in written
        }

    def facts(self, names: set[str], pieces: Iterator[TensorPiece]) -> dict[str, Any]:
        """The facts of a checkpoint that leaves these names out; digests are computed once.

        Args:
            pieces: this rank's parts of all weights; of those that are left out, no other rank has the same elements.
        """
        if self.rows is None:
            self.rows = shares(names, pieces, {})
        return {"source": self.source, "tensors": {n: row for n, row in sorted(self.rows.items()) if n in names}}


def shares(names: set[str], pieces: Iterator[TensorPiece], dtypes: Mapping[str, torch.dtype]) -> dict[str, Row]:
    """This rank's shares of the digests of parameters.

    Args:
        dtypes: in which values are compared, by name; by default their own.
    """
    found: dict[str, Row] = {}
    for piece in pieces:
        name = piece.name.removeprefix("weight:")
        if name in names and piece.name != name:
            dtype = dtypes.get(name, piece.values.dtype)
            row = found.setdefault(name, [list(piece.shape), str(dtype).removeprefix("torch."), 0])
            row[2] = (row[2] + digest(piece.present.detach().to(dtype), piece.box, piece.shape)) % MODULUS
    return found


def merged_bases(everyone: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The facts of all ranks, with the sums of their shares."""
    source, tensors = None, dict[str, Row]()
    for mine in everyone:
        if mine is None:
            continue
        source = source or mine["source"]
        for name, (shape, dtype, share) in mine["tensors"].items():
            row = tensors.setdefault(name, [shape, dtype, 0])
            row[2] = (row[2] + share) % MODULUS
    return None if source is None else {"source": source, "tensors": dict(sorted(tensors.items()))}


def check_base(path: Path, facts: Mapping[str, Any], pieces: Iterator[TensorPiece], world: Comm) -> None:
    """Compare the digests of this engine's base with a checkpoint's; a collective call.

    Args:
        path: of the checkpoint.
        facts: its facts on the base.
        pieces: this rank's parts of the base's weights, of which some may be trained now.

    Raises:
        CheckpointError: on all ranks, if values differ.
    """
    wanted: Mapping[str, Row] = facts["tensors"]
    dtypes = {name: getattr(torch, row[1]) for name, row in wanted.items()}
    mine = shares(set(wanted), pieces, dtypes)
    found = merged_bases({"source": "here", "tensors": rows} for rows in world.agree_on(mine, "digests of the base"))
    tensors = (found or {"tensors": {}})["tensors"]
    other = sorted(name for name, row in wanted.items() if tensors.get(name) != list(row))
    if other:
        raise CheckpointError(
            f"{path} holds trained parameters alone, over a base whose '{other[0]}' has other values than this "
            f"engine's ({len(other)} of {len(wanted)} tensors differ). Its base was read from {facts['source']}: read "
            f"the same files first, by engine.load_weights(folder), in the same precision or a wider one."
        )


def without(pieces: Iterator[TensorPiece], names: set[str]) -> Iterator[TensorPiece]:
    """The pieces of all but these weights."""
    left = {f"weight:{name}" for name in names}
    return (piece for piece in pieces if piece.name not in left)


def merged_facts(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of a checkpoint: rank 0's, with those of each rank's own parts."""
    facts = dict(everyone[0])
    facts["optimizer"] = merged_options([rank["optimizer"] for rank in everyone])
    facts["gradient_layouts"] = {label: v for rank in everyone for label, v in rank["gradient_layouts"].items()}
    facts["buffers"] = buffers.merged_facts(everyone)
    if (base := merged_bases(rank.get("base") for rank in everyone)) is not None:
        facts["base"] = base
    facts["last_update"] = {stage: v for rank in everyone for stage, v in rank["last_update"].items()}
    never = [rank["never_written"] for rank in everyone]
    if facts["cut"][0] > 1:
        facts["never_written"] = None if None in never else sorted({name for names in never for name in names})
    return facts
