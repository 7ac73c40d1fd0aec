"""Whole parameters on every rank, for reads and writes (`engine.gathered()`), and copies of them for state dicts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.access.writes import Writes
from zeroshard.comm.collectives import Comm
from zeroshard.errors import CommError, PlanError
from zeroshard.parts.part import LateUpdates, Part, Parts
from zeroshard.parts.place import Axis, Piece, Split
from zeroshard.parts.weights import Gatherer
from zeroshard.units.adapters import magnitudes_of, row_norms
from zeroshard.units.flat import digest_of
from zeroshard.units.ignored import is_ignored


class Editing:
    """Gathers all parameters of one engine, and keeps the user's writes into them."""

    def __init__(self, parts: Parts, gatherer: Gatherer, late: LateUpdates, world: Comm, writes: Writes) -> None:
        self._parts, self._gatherer, self._late, self._writes, self._world = parts, gatherer, late, writes, world

    def whole(self) -> AbstractContextManager[None]:
        """Whole parameters on every rank inside; a collective call."""
        return self._gatherer.pinned()

    @contextmanager
    def gathered(self, writer: int | None) -> Iterator[None]:
        """Gathered parameters inside; writes are kept at the end; a collective call.

        Of a parameter that is split over an axis, each rank has and writes its part.

        Args:
            writer: the rank whose values all ranks take; by default all must write the same.

        Raises:
            PlanError: ranks that hold the same parameters wrote different values; or there is no rank `writer`, or it
                holds only parts of some parameters.
        """
        ranks = self._world.mesh.ranks
        if writer is not None and not 0 <= writer < ranks:
            raise PlanError(f"gathered(writer={writer}) names none of the ranks 0 to {ranks - 1}.")
        parts = self._parts.all
        split = next((name for part in parts for name in part.splits), None)
        if writer is not None and split is not None:
            raise PlanError(
                f"gathered(writer={writer}) lets rank {writer} write for all, and it holds only a part of '{split}'. "
                f"Let every rank write its own parts: engine.gathered()."
            )
        with self.whole():
            for part in parts:
                part.weights.begin_edit()
                part.edits = part.flat.edits
            self._world.agree(b"", "weights are copied")  # no rank writes before all have copied
            self._writes.allowed = True
            keep, broke = True, False
            try:
                yield
                keep = False
                self._make_alike(writer)
                keep = True
            except Exception:
                broke = keep and any(part.flat.edits != part.edits for part in parts)
                raise
            finally:  # writes before an exception of the user are kept too
                self._writes.allowed = False
                for part in parts:
                    part.keep_what_was_written() if keep else part.weights.end_edit(keep=False)
                if broke:
                    self._end_broken()
        self._world.agree(b"", "edited weights are in place")

    def _end_broken(self) -> None:
        """Wait, after an exception of the user, for the writes of all ranks into common memory; a collective call."""
        self._late.forget()  # updates that began from the old weights
        with suppress(CommError):  # of ranks without an exception
            self._world.agree(b"", "an exception inside of gathered()")

    def _make_alike(self, writer: int | None) -> None:
        """Make the values of all ranks equal wherever one of them wrote, or raise."""
        with torch.no_grad():
            for part in self._parts.all:
                for number in part.flat.moved() if part.flat.kinds is not None else ():
                    part.flat.take_over(number)
        mine = [n for n, part in enumerate(self._parts.all) if part.flat.edits != part.edits]
        by_rank = self._world.agree_on(mine, "which weights were written")
        written = sorted({n for numbers in by_rank for n in numbers})
        if written:
            self._late.forget()  # updates that began from the old weights
        parts = [self._parts.all[number] for number in written]
        if writer is None:
            found = [problem for problem in map(self._difference, parts) if problem is not None]
            problems = self._world.agree_on(found[:1], "differences of edited weights") if written else []
            for problem in (problem for several in problems for problem in several):
                raise PlanError(problem)
            self._compare_pieces(parts)
            return
        for part in parts:
            self._world.broadcast(part.weights.visible, f"edited weights {part.flat.label}", writer)

    def _difference(self, part: Part) -> str | None:
        """The first parameter whose owners wrote different values, as an error text; a collective call of owners."""
        flat, owners = part.flat, part.place.owners
        buffer = part.weights.visible
        mine = [digest_of([buffer[entry.offset : entry.stop]]) for entry in flat.index.entries]
        by_rank = owners.comm.agree_on(mine, f"digests of edited weights {flat.label}")
        for entry, found in zip(flat.index.entries, zip(*by_rank, strict=True), strict=True):
            if len(set(found)) > 1:
                first, *others = next(group for group in owners.groups if self._world.mesh.rank in group)
                other = next(rank for rank, digest in zip(others, found[1:], strict=True) if digest != found[0])
                return _differs(first, other, entry.name)
        return None

    def _compare_pieces(self, parts: Sequence[Part]) -> None:
        """Compare pieces of split parameters that several ranks hold; a collective call of all ranks, if any are split.

        Raises:
            PlanError: two ranks wrote different values.
        """
        cut = [(part, name, split) for part in parts for name, split in part.splits.items()]
        if not cut:
            return
        mine: dict[str, list[list[int]]] = {}
        for part, name, split in cut:
            number = [entry.name for entry in part.flat.index.entries].index(name)
            values = part.flat.view(part.weights.visible, number)
            runs = [(values.narrow(split.dimension, at, piece.length), piece) for at, piece in split.placed]
            mine[name] = [[p.start, p.stop, digest_of([run.contiguous().reshape(-1)])] for run, p in runs]
        seen: dict[tuple[str, int, int], tuple[int, int]] = {}
        for rank, theirs in enumerate(self._world.agree_on(mine, "digests of edited pieces")):
            for name, pieces in theirs.items():
                for start, stop, digest in pieces:
                    known, other = seen.setdefault((name, start, stop), (digest, rank))
                    if known != digest:
                        raise PlanError(_differs(other, rank, name))


def set_magnitudes(model: nn.Module, editing: Editing, names: Sequence[str]) -> None:
    """Set magnitudes of DoRA to the norms of the rows that they scale; a collective call, if there are any.

    Args:
        names: of the parameters.
    """
    if not names:
        return
    layers = magnitudes_of(model)
    with editing.gathered(None), torch.no_grad():
        for name in names:
            layer, adapter = layers[name]
            if not layer.get_base_layer().weight.is_meta:  # else it is on another stage
                model.get_parameter(name).copy_(row_norms(layer, adapter))


def _differs(first: int, other: int, name: str) -> str:
    return (
        f"Ranks {first} and {other} wrote different values into '{name}' inside engine.gathered(). Write alike on "
        f"every rank (the same values, seeds included), or let one rank write: engine.gathered(writer=0). Weights of "
        f"this rank may differ from the others' now; go on from a checkpoint."
    )


class WholeTensors:
    """Assembles split parameters from the parts of all ranks.

    Args:
        axes: over which parameters are split, by name.
        tied: for parameters with several names, each further name and the first.
    """

    def __init__(self, parts: Parts, axes: Mapping[str, Axis], tied: Mapping[str, str]) -> None:
        self._axes, self._tied = axes, tied
        self._held = {name: split for part in parts.all for name, split in part.splits.items()}
        self._everywhere: dict[str, list[Split]] = {}  # by name, the parts of the ranks of its axis

    def put_together(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of this rank with whole tensors on the host instead of parts; a collective call."""
        return {key: self.copy(key, value) if self._name(key) in self._held else value for key, value in state.items()}

    def copy(self, key: str, value: Any) -> Any:
        """A copy on the host of an entry of a state dict, whole for a split parameter; a collective call."""
        if not isinstance(value, Tensor):
            return value
        split = self._held.get(self._name(key))
        return value.detach().cpu().clone() if split is None else self._whole(self._name(key), split, value.detach())

    def _name(self, key: str) -> str:
        return self._tied.get(key, key)

    def _whole(self, name: str, split: Split, part: Tensor) -> Tensor:
        whole, comm = torch.empty(split.shape, dtype=part.dtype), self._axes[split.axis].comm
        for rank, theirs in enumerate(self._of_ranks(name, split)):
            values = part.contiguous() if rank == comm.mesh.rank else part.new_empty(theirs.part_shape)
            comm.broadcast(values, f"part of {name}", rank)
            theirs.put(values, whole)
        return whole

    def _of_ranks(self, name: str, split: Split) -> list[Split]:
        """The parts of all ranks of an axis; a collective call the first time, for all parameters split over it."""
        if name not in self._everywhere:
            names = sorted(n for n, other in self._held.items() if other.axis == split.axis)
            mine = [[[piece.start, piece.stop] for piece in self._held[n].pieces] for n in names]
            by_rank = self._axes[split.axis].comm.agree_on(mine, f"parts over {split.axis}")
            for n, everyone in zip(names, zip(*by_rank, strict=True), strict=True):
                self._everywhere[n] = [
                    replace(self._held[n], pieces=tuple(Piece(*ends) for ends in pieces)) for pieces in everyone
                ]
        return self._everywhere[name]


def state_dict_by_unit(model: nn.Module, parts: Parts, gatherer: Gatherer, wholes: WholeTensors) -> dict[str, Any]:
    """The complete state dict of a model that the device cannot hold, on every rank; a collective call."""
    found: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    keys: dict[int, list[str]] = {}
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            keys.setdefault(id(value), []).append(key)
            held = isinstance(value, nn.Parameter) and not is_ignored(value)
            found[key] = value if held else value.detach().cpu().clone()
    for number, of_unit in enumerate(parts.of_units):
        with gatherer.visit(number):
            for parameter in (parameter for part in of_unit for parameter in part.flat.parameters):
                for key in keys.get(id(parameter), ()):
                    found[key] = wholes.copy(key, parameter)
    return found
