"""Whole parameters on every rank, for the user to read and write (`engine.gathered()`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.comm import Comm
from zeroshard.errors import PlanError
from zeroshard.parameters.writes import Writes
from zeroshard.parts.late import LateUpdates
from zeroshard.parts.part import Part, Parts
from zeroshard.units.digest import digest_of


class Brings(Protocol):
    """Gathers units."""

    def pinned(self) -> AbstractContextManager[None]:
        """Have every unit here inside; a collective call."""

    def visit(self, number: int) -> AbstractContextManager[None]:
        """Have one unit here inside; a collective call."""


class Editing:
    """Gathers all parameters of one engine, and takes over what is written into them."""

    def __init__(self, parts: Parts, gatherer: Brings, late: LateUpdates, world: Comm, writes: Writes) -> None:
        self._parts, self._gatherer, self._late, self._writes, self._world = parts, gatherer, late, writes, world

    def whole(self) -> AbstractContextManager[None]:
        """Whole parameters on every rank inside; a collective call."""
        return self._gatherer.pinned()

    @contextmanager
    def gathered(self, writer: int | None) -> Iterator[None]:
        """Whole parameters inside; what is written there is taken over at the end; a collective call.

        Args:
            writer: the rank whose values all take; by default all must write alike.

        Raises:
            PlanError: ranks wrote different values, or there is no such rank.
        """
        ranks = self._world.mesh.ranks
        if writer is not None and not 0 <= writer < ranks:
            raise PlanError(f"gathered(writer={writer}) names none of the ranks 0 to {ranks - 1}.")
        parts = self._parts.all
        with self.whole():
            for part in parts:
                part.weights.begin_edit()
                part.edits = part.flat.edits
            self._world.agree(b"", "weights are copied")  # before anybody writes
            self._writes.allowed = True
            keep = True
            try:
                yield
                keep = False
                self._make_alike(writer)
                keep = True
            finally:  # what was written before an exception of the user's own is kept too
                self._writes.allowed = False
                for part in parts:
                    part.keep_what_was_written() if keep else part.weights.end_edit(keep=False)
        self._world.agree(b"", "edited weights are in place")

    def _make_alike(self, writer: int | None) -> None:
        """Have the same values on all ranks wherever one of them wrote."""
        with torch.no_grad():
            for part in self._parts.all:
                for number in part.flat.moved() if part.flat.kinds is not None else ():
                    part.flat.take_over(number)
        mine = [n for n, part in enumerate(self._parts.all) if part.flat.edits != part.edits]
        everyone = self._world.agree_on(mine, "which weights were written")
        written = sorted({n for numbers in everyone for n in numbers})
        if written:
            self._late.forget()  # updates that began from the weights as they were
        for number in written:
            part = self._parts.all[number]
            if writer is not None:
                self._world.broadcast(part.weights.visible, f"edited weights {part.flat.label}", writer)
            elif self._world.mesh.ranks > 1:
                self._compare(part)

    def _compare(self, part: Part) -> None:
        flat = part.flat
        buffer = part.weights.visible
        mine = [digest_of([buffer[entry.offset : entry.stop]]) for entry in flat.index.entries]
        everyone = self._world.agree_on(mine, f"digests of edited weights {flat.label}")
        for entry, found in zip(flat.index.entries, zip(*everyone, strict=True), strict=True):
            if len(set(found)) > 1:
                other = next(rank for rank, digest in enumerate(found) if digest != found[0])
                raise PlanError(
                    f"Ranks 0 and {other} wrote different values into '{entry.name}' inside engine.gathered(). Write "
                    f"alike on every rank (the same values, seeds included), or let one rank write: "
                    f"engine.gathered(writer=0). Weights of this rank may differ from the others' now; go on from a "
                    f"checkpoint."
                )


def state_dict_by_unit(model: nn.Module, parts: Parts, gatherer: Brings) -> dict[str, Any]:
    """The complete state dict of a model that the device cannot hold, on every rank; a collective call."""
    found: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    keys: dict[int, list[str]] = {}
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            keys.setdefault(id(value), []).append(key)
            found[key] = value if isinstance(value, nn.Parameter) else value.detach().cpu().clone()
    for number, of_unit in enumerate(parts.of_units):
        with gatherer.visit(number):
            for parameter in (parameter for part in of_unit for parameter in part.flat.parameters):
                for key in keys.get(id(parameter), ()):
                    found[key] = parameter.detach().cpu().clone()
    return found
