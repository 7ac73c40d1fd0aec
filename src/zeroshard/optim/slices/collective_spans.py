"""Collective steps of an optimizer over one flat.

`RowSpans` steps over this rank's rows of a matrix ([Note: cut matrices] in `owners`), with one exchange for each round
of `row_reductions`. `JoinedSpans` steps over whole matrices whose parts several ranks hold.

[Note: joined matrices] If layers are split among ranks, no rank has a whole matrix, and an optimizer over whole tensors
needs the global one. So each matrix has one owner among the ranks with its parts. In an update these send it their
parts of gradient and values; it steps over the whole, keeps its states, and sends each rank its part of the new values.
Weights, master weights and gradients stay parts on the rank that computes with them; the whole is scratch. Pieces with
copies on several ranks are sent by the rank that counts them, and returned to all.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Arena
from zeroshard.optim.algorithms.row_reductions import RowReduction
from zeroshard.optim.algorithms.tensor_optimizer import Fused, PartialMatrices, TensorOptimizer
from zeroshard.optim.slices.spans import GradientOf, HeldTensors, SliceSpan, SpanOptimizer
from zeroshard.optim.trial.probe_optimizers import StateLayout
from zeroshard.parts.place import Axis, Split
from zeroshard.parts.planned import Wire, Work
from zeroshard.traffic import Purpose
from zeroshard.units import Entry, Index


class CollectiveSpans(ABC):
    """Replacement of a `SpanOptimizer` for a flat whose steps are collective calls.

    Args:
        comm: of the ranks of a step.
        label: of the flat.
        arena: for messages.
    """

    def __init__(self, optimizer: SpanOptimizer, comm: Comm, label: str, arena: Arena) -> None:
        self._optimizer, self._comm, self._label, self._arena = optimizer, comm, label, arena

    @property
    def reads_alone(self) -> bool:
        """False: a step may change gradients in place for messages."""
        return False

    @property
    def fuses(self) -> bool:
        """False: messages separate a step from work around it."""
        return False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's."""
        return self._optimizer.optimizer

    @property
    def held(self) -> HeldTensors:
        """The tensors that the optimizer holds."""
        return self._optimizer.held

    @property
    def layout(self) -> StateLayout:
        """Of its states."""
        return self._optimizer.layout

    def state_bytes(self, number: int) -> int:
        """Bytes of the states that this rank updates."""
        return self._optimizer.state_bytes(number)

    def join(self, number: int, gradient_of: GradientOf, then: Callable[[], None]) -> None:
        """As `step`, at once, and then call `then`."""
        self.step(number, gradient_of)
        then()

    @abstractmethod
    def step(self, number: int, gradient_of: GradientOf, fused: Fused | None = None) -> None:
        """One optimizer step on the flat; a collective call."""


class RowSpans(CollectiveSpans):
    """Steps over this rank's rows of a matrix, the only parameter of its flat."""

    @property
    def matrices(self) -> None:
        """None: the spans are rows, with their own states."""
        return None

    def add(
        self, index: Index, groups: Sequence[int], owned: torch.Tensor, start: int, tier: str | None = "device"
    ) -> int:
        """As `SpanOptimizer.add`."""
        (entry,), (self._group,) = index.entries, groups
        self._shape, self._dtype = entry.shape, owned.dtype
        shares = [index.slice_numel(rank) / index.numel for rank in range(index.ranks)]
        self._shares = torch.tensor(shares, dtype=torch.float64, device=owned.device)
        return self._optimizer.add(index, groups, owned, start, tier)

    def spans(self, number: int) -> list[SliceSpan]:
        """The rows."""
        return self._optimizer.spans(number)

    def split(self, number: int, cuts: Sequence[int]) -> None:
        """Allocate the scratch of an update; one parameter needs no cuts."""
        for scratch in self._scratch(max(self._reduced_numels, default=0)):
            self._arena.give(scratch)

    def rebind(self, number: int, owned: torch.Tensor, start: int) -> None:
        """Point the rows at `owned`, which begins at `start` and holds the same values."""
        self._optimizer.rebind(number, owned, start)

    def step(self, number: int, gradient_of: GradientOf, fused: Fused | None = None) -> None:
        """One optimizer step on the rows; a collective call."""
        optimizer = self.optimizer
        assert isinstance(optimizer, TensorOptimizer)
        optimizer.partial = PartialMatrices([span.tensor for span in self.spans(number)], self._reduce)
        try:
            self._optimizer.step(number, gradient_of)
        finally:
            del optimizer.partial

    def wire(self, work: Work) -> Wire:
        """This rank's parts of all reductions, to each other rank."""
        yield Purpose.ASK_FOR_ROWS, (self._comm.mesh.ranks - 1) * sum(self._reduced_numels) * work.updates

    @property
    def _reduced_numels(self) -> Sequence[int]:
        """Elements of the reductions of a step, by round."""
        optimizer = self.optimizer
        assert isinstance(optimizer, TensorOptimizer)
        return optimizer.reduced_numels(self._shape, optimizer.param_groups[self._group])

    def _reduce(self, reductions: Sequence[RowReduction]) -> list[torch.Tensor]:
        """All-gather the parts of all ranks, and reduce them in rank order."""
        ranks, sizes = self._comm.mesh.ranks, [each.part.numel() for each in reductions]
        message, arrived = self._scratch(sum(sizes))
        message.view(ranks, -1).copy_(torch.cat([each.part.reshape(-1) for each in reductions]))
        each_rank = [sum(sizes)] * ranks
        self._comm.all_to_all(arrived, message, each_rank, each_rank, Purpose.ASK_FOR_ROWS, self._label).wait()
        device = reductions[0].part.device
        if self._shares.device != device:  # where the rows were when they were added
            self._shares = self._shares.to(device)
        columns = arrived.view(ranks, -1).to(device).split(sizes, 1)
        found = [each.total(parts, self._shares) for each, parts in zip(reductions, columns, strict=True)]
        self._arena.give(arrived)
        self._arena.give(message)
        return found

    def _scratch(self, numel: int) -> list[torch.Tensor]:
        """Buffers for messages of `numel` elements to and from each rank."""
        total = self._comm.mesh.ranks * numel
        return [self._arena.take(total, self._dtype, "answers about rows") for _ in range(2)]


Views = Sequence[Sequence[torch.Tensor]]  # for each rank


class MatrixScratch(Protocol):
    """Buffers for whole matrices; an `Arena`, or one in the memory of the host."""

    def take(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """An uninitialised 1-D tensor of `numel` elements."""

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor of `take`."""


@dataclass(slots=True)
class Matrix:
    """A matrix with a part on this rank.

    Attributes:
        split: its split over the ranks.
        owner: the rank that updates it.
        part: this rank's elements, as a span of the flat.
        entry: index entry of the whole, if this rank is the owner; else None.
    """

    split: Split
    owner: int
    part: SliceSpan
    entry: Entry | None = None

    def numel(self, rank: int, counted: bool) -> int:
        """Elements of a rank's part; with `counted` only of the pieces that it counts."""
        pieces = [piece for piece in self.split.by_rank[rank] if piece.counted or not counted]
        others = math.prod(self.split.shape) // max(1, self.split.shape[self.split.dimension])
        return others * sum(piece.length for piece in pieces)

    def of_part(self, part: torch.Tensor, counted: bool) -> Iterator[torch.Tensor]:
        """The pieces of this rank's part; with `counted` only those that it counts."""
        for first, piece in self.split.placed:
            if piece.counted or not counted:
                yield part.narrow(self.split.dimension, first, piece.length)

    def of_whole(self, wholes: torch.Tensor, rank: int, counted: bool) -> Iterator[torch.Tensor]:
        """Views of a rank's pieces in the whole; `wholes` is the buffer of all matrices of this owner."""
        assert self.entry is not None
        whole = wholes[self.entry.offset : self.entry.stop].view(self.entry.shape)
        for piece in self.split.by_rank[rank]:
            if piece.counted or not counted:
                yield whole.narrow(self.split.dimension, piece.start, piece.length)


class JoinedSpans(CollectiveSpans):
    """Steps over whole matrices, for one flat with parts of them ([Note: joined matrices]).

    Args:
        splits: of the parameters of the flat, by name.
        owners: owner of each parameter of this rank's slice.
        comm: of the ranks that hold the parts.
        label: of the flat.
        arena: for messages.
        wholes: buffers of whole matrices, in the memory where the flat is updated.
    """

    def __init__(
        self,
        optimizer: SpanOptimizer,
        splits: Mapping[str, Split],
        owners: Mapping[str, int],
        comm: Comm,
        label: str,
        arena: Arena,
        wholes: MatrixScratch,
    ) -> None:
        super().__init__(optimizer, comm, label, arena)
        self._splits, self._owners, self._wholes = splits, owners, wholes
        self._matrices: dict[str, Matrix] = {}
        self._index = Index.of([], 1)

    def add(
        self, index: Index, groups: Sequence[int], owned: torch.Tensor, start: int, tier: str | None = "device"
    ) -> int:
        """As `SpanOptimizer.add`: the optimizer has the whole matrices that this rank updates."""
        for number, entry in enumerate(index.entries):
            if entry.name in self._owners:
                values = owned[entry.offset - start : entry.stop - start].view(entry.shape)
                span = SliceSpan(entry.offset, entry.stop, groups[number], values)
                self._matrices[entry.name] = Matrix(self._splits[entry.name], self._owners[entry.name], span)
        mine = {name: matrix for name, matrix in self._matrices.items() if matrix.owner == self._comm.mesh.rank}
        self._index = Index.of([(name, torch.Size(matrix.split.shape)) for name, matrix in mine.items()], 1)
        for matrix, entry in zip(mine.values(), self._index.entries, strict=True):
            matrix.entry = entry
        nothing = torch.full((1,), float("nan"), dtype=owned.dtype, device=owned.device)
        self._absent = nothing.expand(self._index.numel)  # placeholder of the wholes between updates
        self._number = self._optimizer.add(self._index, [m.part.group for m in mine.values()], self._absent, 0, tier)
        return self._number

    def spans(self, number: int) -> list[SliceSpan]:
        """This rank's parts of the matrices."""
        return [matrix.part for matrix in self._matrices.values()]

    @property
    def matrices(self) -> Mapping[str, SliceSpan]:
        """The whole matrices that this rank updates, by name."""
        entries = self._index.entries
        return {entries[self._index.number_at(s.start)].name: s for s in self._optimizer.spans(self._number)}

    def split(self, number: int, cuts: Sequence[int]) -> None:
        """Allocate the scratch of an update; spans of one parameter each need no cuts."""
        whole, sent, updated = self._index.numel, self._numel_out(counted=True), self._numel_out(counted=False)
        wholes = self._wholes.take(2 * whole, self._absent.dtype, "whole matrices")
        for pair in ((2 * sum(sent.values()), 2 * whole), (sum(self._numel_in().values()), sum(updated.values()))):
            for scratch in [self._take(numel) for numel in pair]:
                self._arena.give(scratch)
        self._wholes.give(wholes)

    def rebind(self, number: int, owned: torch.Tensor, start: int) -> None:
        """Point the parts at `owned`, which begins at `start` and holds the same values."""
        for matrix in self._matrices.values():
            span = matrix.part
            span.tensor.data = owned[span.start - start : span.stop - start].view(span.tensor.shape)

    def step(self, number: int, gradient_of: GradientOf, fused: Fused | None = None) -> None:
        """One optimizer step on the whole of each matrix of the flat that has a gradient; a collective call."""
        parts = {name: matrix.part.tensor.detach() for name, matrix in self._matrices.items()}
        found = {name: gradient_of(matrix.part) for name, matrix in self._matrices.items()}
        gradients = {name: parts[name] if g is None else g.view(parts[name].shape) for name, g in found.items()}
        wholes = self._wholes.take(2 * self._index.numel, self._absent.dtype, "whole matrices")
        gradient, values = wholes.tensor_split(2)
        self._exchange(
            [
                [view for name, m in self._of(rank) for part in (gradients[name], parts[name])
                 for view in m.of_part(part, counted=True)]
                for rank in self._ranks
            ],
            [
                [view for _, m in self._mine for whole in (gradient, values)
                 for view in m.of_whole(whole, rank, counted=True)]
                for rank in self._ranks
            ],
            f"matrices of {self._label}",
        )  # fmt: skip
        has = {entry.offset for entry in self._index.entries if found[entry.name] is not None}
        self._optimizer.rebind(number, values, 0)
        self._optimizer.step(number, lambda span: gradient[span.start : span.stop] if span.start in has else None)
        self._optimizer.rebind(number, self._absent, 0)
        self._exchange(
            [[view for _, m in self._mine for view in m.of_whole(values, rank, False)] for rank in self._ranks],
            [[view for name, m in self._of(rank) for view in m.of_part(parts[name], False)] for rank in self._ranks],
            f"updated matrices of {self._label}",
        )
        self._wholes.give(wholes)

    def wire(self, work: Work) -> Wire:
        """Gradients and values to other owners, and new values of own matrices to the other ranks."""
        out = sum(numel for rank, numel in self._numel_out(counted=True).items() if rank != self._comm.mesh.rank)
        back = sum(numel for rank, numel in self._numel_in().items() if rank != self._comm.mesh.rank)
        yield Purpose.JOIN_MATRICES, (2 * out + back) * work.updates

    @property
    def _ranks(self) -> range:
        return range(self._comm.mesh.ranks)

    @property
    def _mine(self) -> list[tuple[str, Matrix]]:
        return self._of(self._comm.mesh.rank)

    def _of(self, rank: int) -> list[tuple[str, Matrix]]:
        """The matrices that a rank updates."""
        return [(name, matrix) for name, matrix in self._matrices.items() if matrix.owner == rank]

    def _numel_out(self, counted: bool) -> dict[int, int]:
        """Elements of this rank's parts of the matrices of each rank."""
        here = self._comm.mesh.rank
        return {rank: sum(m.numel(here, counted) for _, m in self._of(rank)) for rank in self._ranks}

    def _numel_in(self) -> dict[int, int]:
        """Elements of each rank's parts of this rank's matrices."""
        return {rank: sum(m.numel(rank, False) for _, m in self._mine) for rank in self._ranks}

    def _take(self, numel: int) -> torch.Tensor:
        return self._arena.take(numel, self._absent.dtype, "whole matrices")

    def _exchange(self, out: Views, into: Views, label: str) -> None:
        """All-to-all of matrix pieces: pack by destination, exchange, unpack."""
        sends, receives = ([sum(view.numel() for view in of) for of in each] for each in (out, into))
        message, arrived = self._take(sum(sends)), self._take(sum(receives))
        with torch.no_grad():
            for place, view in _laid_out(message, out):
                place.copy_(view)
            self._comm.all_to_all(arrived, message, receives, sends, Purpose.JOIN_MATRICES, label).wait()
            for place, view in _laid_out(arrived, into):
                view.copy_(place)
        self._arena.give(arrived)
        self._arena.give(message)


Steps = SpanOptimizer | JoinedSpans | RowSpans  # over one flat


def _laid_out(
    message: torch.Tensor, views: Iterable[Iterable[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The consecutive views of a message [M] for some tensors, each with its tensor."""
    at = 0
    for view in (view for of in views for view in of):
        yield message[at : at + view.numel()].view(view.shape), view
        at += view.numel()


def spans_of(
    optimizer: SpanOptimizer,
    members: Mapping[str, nn.Parameter],
    splits: Mapping[str, Split],
    axes: Mapping[str, Axis],
    slices: Axis,
    label: str,
    arena: Arena,
    wholes: MatrixScratch,
) -> Steps:
    """The steps over a flat: the optimizer itself, or collective steps over matrices with parts in the flat.

    Args:
        members: the parameters of the flat as in `deal_out`, by name.
        splits: splits of the parameters that are parts.
        axes: axes of the splits, by name.
        slices: the axis over which the flat is sliced.
        label, arena, wholes: as for `JoinedSpans`.
    """
    if any(map(optimizer.owners.cuts, members.values())):
        return RowSpans(optimizer, slices.comm, label, arena)
    joined, axis = optimizer.owners.joined, next((split.axis for split in splits.values() if split.by_rank), None)
    if joined is None or axis is None:
        return optimizer
    owners = {name: rank for name, parameter in members.items() if (rank := joined.rank_of(parameter)) is not None}
    # even without a matrix in this rank's slice: all ranks must start the same collectives
    return JoinedSpans(optimizer, splits, owners, axes[axis].comm, label, arena, wholes)
