"""The exchange: rows of tokens go to the ranks that hold their experts, and come back.

Shapes: R rows of this rank, sorted by expert; M rows that this rank computes; D width; n ranks; E experts.

[Note: counts first] Ranks all-gather their numbers of rows for each expert, an [n, E] table. It has the size of every
message, so nothing is padded, and ranks without rows or experts without any are no exception.

[Note: rows by expert and source] What a rank computes is sorted by expert, and of one expert by the rank that the rows
come from. So the rows of an expert stand in the order in which one process would have those of all ranks.

[Note: shrinking batch] An expert gets k/E of a batch, so all n data ranks feed it: their dense layers are copies, and
of each expert there is one (Shazeer et al., 1701.06538, section 3.1).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.moe.exchange.dispatch import without_values
from zeroshard.parts.place import Axis
from zeroshard.traffic import TO_EVALUATE, Purpose

Table = Sequence[Sequence[int]]


def shared_out(experts: int, ranks: int) -> list[tuple[int, int]]:
    """The experts [first, stop) of each rank, dealt out evenly; the first ranks have more."""
    each, more = divmod(experts, ranks)
    cuts = list(accumulate((each + (rank < more) for rank in range(ranks)), initial=0))
    return list(pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Delivery:
    """The rows of one forward: how many go from each rank to each expert.

    Attributes:
        counts: [n][E] rows.
        held: the experts [first, stop) of each rank.
        rank: this one.
    """

    counts: Table
    held: Sequence[tuple[int, int]]
    rank: int

    def rows(self, source: int, destination: int) -> int:
        """Rows that a rank has for the experts of another."""
        first, stop = self.held[destination]
        return sum(self.counts[source][first:stop])

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(len(self.held))

    @property
    def sends(self) -> list[int]:
        """Rows of this rank for each."""
        return [self.rows(self.rank, other) for other in self.ranks]

    @property
    def receives(self) -> list[int]:
        """Rows of each for this rank."""
        return [self.rows(other, self.rank) for other in self.ranks]

    @property
    def local(self) -> list[int]:
        """Rows of each expert of this rank."""
        first, stop = self.held[self.rank]
        return [sum(row[expert] for row in self.counts) for expert in range(first, stop)]

    def by_expert(self, received: Sequence[Tensor]) -> Tensor:
        """[M, D], sorted by expert and source, from the rows of each source."""
        first, stop = self.held[self.rank]
        split = [rows.split(list(self.counts[r][first:stop])) for r, rows in enumerate(received)]
        return torch.cat([pieces[n] for n in range(stop - first) for pieces in split])

    def by_source(self, local: Tensor) -> Iterator[list[Tensor]]:
        """For each source in turn, its rows in pieces by expert, from rows [M, D] sorted by expert and source."""
        first, stop = self.held[self.rank]
        sizes = [self.counts[source][expert] for expert in range(first, stop) for source in self.ranks]
        pieces = local.split(sizes)
        for source in self.ranks:
            yield list(pieces[source :: len(self.held)])


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Rows of one mixture and one microbatch that a rank exchanges, and by formula the elements that it sends.

    R rows of D elements go out and back, in the forward and in the backward (GShard, 2006.16668, section 3.2; Switch,
    2101.03961, section 5.5).

    Attributes:
        out: choices of its tokens that fall on experts of other ranks.
        back: choices of other ranks' tokens that fall on its experts.
        width: D.
    """

    out: int
    back: int
    width: int

    @property
    def forward(self) -> int:
        """Elements that the rank sends: rows with their gates, and outputs to the ranks of the tokens."""
        return self.out * (self.width + 1) + self.back * self.width

    @property
    def backward(self) -> int:
        """Elements that it sends: gradients of outputs, and of rows and gates."""
        return self.out * self.width + self.back * (self.width + 1)


class ExpertRanks:
    """The ranks that divide the experts of mixtures.

    Args:
        machines: the ranks of each machine, for messages in two levels; None for messages in one.

    Attributes:
        size: number of ranks; rank: this rank's number.
    """

    def __init__(self, axis: Axis, machines: Sequence[Sequence[int]] | None = None) -> None:
        self.size, self.rank = axis.size, axis.rank
        self._comm = axis.comm
        self._levels = None if machines is None else _Levels(axis.comm, machines)
        self._has_formula = machines is None

    def delivery(self, counts: Sequence[int], like: Tensor, label: str) -> Delivery:
        """All-gather the number of rows of each rank for each expert; a collective call.

        Args:
            like: a tensor of the rows' device; where it has no values, all ranks are taken to have the same.
        """
        held = shared_out(len(counts), self.size)
        if like.is_meta:
            return Delivery([counts] * self.size, held, self.rank)
        table: Table
        own, comm = torch.tensor(counts, dtype=torch.int64, device=like.device), self._comm
        if comm.operands is not None:
            shown = comm.side_by_side(own, self.size * len(counts), _purpose(comm, Purpose.COUNT_TOKENS), label)
            shown.wait()
            tables = [shown.of(rank, own.shape) for rank in range(self.size)]
            table = [counts if without_values(each) else each.tolist() for each in tables]
            shown.done()
            return Delivery(table, held, self.rank)
        everyone = own.new_empty(self.size * len(counts))
        comm.gather(everyone, own, _purpose(comm, Purpose.COUNT_TOKENS), label).wait()
        table = [counts] * self.size if without_values(own) else everyone.view(self.size, -1).tolist()
        return Delivery(table, held, self.rank)

    def plan(self, elements: int) -> None:
        """Add elements by a formula to the planned count."""
        if self._has_formula and not self._comm.evaluates:
            count = self._comm.counts[Purpose.EXCHANGE_TOKENS]
            count.planned = (count.planned or 0) + elements

    def forget_formula(self) -> None:
        """Drop the planned count: a forward is recomputed in a backward, perhaps in part."""
        self._has_formula = False
        self._comm.counts[Purpose.EXCHANGE_TOKENS].planned = None

    def dispatch(self, rows: Tensor, delivery: Delivery, label: str) -> Tensor:
        """[R, D] -> [M, D]: bring rows to the ranks of their experts; a collective call."""
        if rows.is_meta:
            return rows.new_empty((sum(delivery.local), *rows.shape[1:]))
        if self._comm.operands is not None:
            return self._dispatch_shared(rows.contiguous(), delivery, label)
        if self._levels is not None:
            return delivery.by_expert(self._levels.dispatch(rows.contiguous(), delivery, label))
        received = rows.new_empty((sum(delivery.receives), *rows.shape[1:]))
        purpose = _purpose(self._comm, Purpose.EXCHANGE_TOKENS)
        self._comm.all_to_all(received, rows.contiguous(), delivery.receives, delivery.sends, purpose, label).wait()
        return delivery.by_expert(received.split(delivery.receives))

    def combine(self, local: Tensor, delivery: Delivery, label: str) -> Tensor:
        """[M, D] -> [R, D]: bring rows back to the ranks that sent them; a collective call."""
        rows = local.new_empty((sum(delivery.sends), *local.shape[1:]))
        if local.is_meta:
            return rows
        if self._comm.operands is not None:
            return self._combine_shared(local, delivery, rows, label)
        if self._levels is not None:
            return self._levels.combine(list(map(torch.cat, delivery.by_source(local))), delivery, label)
        out = torch.cat([piece for pieces in delivery.by_source(local) for piece in pieces])
        purpose = _purpose(self._comm, Purpose.EXCHANGE_TOKENS)
        self._comm.all_to_all(rows, out, delivery.sends, delivery.receives, purpose, label).wait()
        return rows

    def _dispatch_shared(self, rows: Tensor, delivery: Delivery, label: str) -> Tensor:
        """As `dispatch`, by shared memory."""
        width, parts = rows.shape[1:], list(rows.split(delivery.sends))
        own = parts[self.rank]
        with _Shown(self._comm, [*parts[: self.rank], *parts[self.rank + 1 :]], own, label) as shown:
            received = []
            for source in delivery.ranks:
                before = sum(delivery.rows(source, other) for other in range(self.rank) if other != source)
                shape = (delivery.rows(source, self.rank), *width)
                received.append(own if source == self.rank else shown.of(source, shape, before * width.numel()))
            return delivery.by_expert(received)

    def _combine_shared(self, local: Tensor, delivery: Delivery, rows: Tensor, label: str) -> Tensor:
        """As `combine`, by shared memory, into `rows`."""
        width, by_source = local.shape[1:], list(delivery.by_source(local))
        own = by_source.pop(self.rank)
        places = rows.split(delivery.sends)
        with _Shown(self._comm, [piece for pieces in by_source for piece in pieces], local[:0], label) as shown:
            if own:
                torch.cat(own, out=places[self.rank])
            for holder in (other for other in delivery.ranks if other != self.rank):
                before = sum(delivery.rows(other, holder) for other in range(self.rank) if other != holder)
                place = places[holder]
                place.copy_(shown.of(holder, tuple(place.shape), before * width.numel()))
        return rows


class _Shown:
    """Rows for other ranks in shared memory, until this rank has read theirs."""

    def __init__(self, comm: Comm, pieces: Sequence[Tensor], like: Tensor, label: str) -> None:
        filled = [piece for piece in pieces if piece.numel()] or [like[:0]]
        elements = sum(piece.numel() for piece in filled)
        self._shown = comm.side_by_side(filled, elements, _purpose(comm, Purpose.EXCHANGE_TOKENS), label)

    def __enter__(self) -> Any:
        self._shown.wait()
        return self._shown

    def __exit__(self, *error: object) -> None:
        self._shown.done()


class _Levels:
    """Messages in two levels: within machines first, then between ranks at the same place of each machine.

    Rank j of a machine gets from its neighbours all rows for the ranks j of all machines, and exchanges those with the
    ranks j: n/m messages between machines for each rank, where there were n - n/m, m being the ranks of a machine.

    Args:
        machines: the ranks of each, equally many.
    """

    def __init__(self, comm: Comm, machines: Sequence[Sequence[int]]) -> None:
        rank = comm.mesh.rank
        self._comm, self._machines = comm, machines
        self._inside = comm.part(machines, "experts of a machine")
        self._across = comm.part(list(zip(*machines, strict=True)), "experts at one place of machines")
        self._machine = next(members for members in machines if rank in members)
        self._places = [members[self._machine.index(rank)] for members in machines]

    @property
    def _purpose(self) -> Purpose:
        return _purpose(self._comm, Purpose.EXCHANGE_TOKENS)

    def dispatch(self, rows: Tensor, delivery: Delivery, label: str) -> list[Tensor]:
        """The rows of each source for this rank, from this rank's rows in the order of their destinations."""
        parts = rows.split(delivery.sends)
        columns = list(zip(*self._machines, strict=True))  # the ranks at each place of a machine
        out = [[parts[rank] for rank in column] for column in columns]
        sizes = [[delivery.rows(source, rank) for rank in self._places] for source in self._machine]
        near = _exchanged(self._inside, out, sizes, self._purpose, label)
        out = [[near[source][number] for source in range(len(near))] for number in range(len(self._machines))]
        sizes = [[delivery.rows(source, delivery.rank) for source in members] for members in self._machines]
        far = _exchanged(self._across, out, sizes, self._purpose, label)
        found = {source: far[m][i] for m, members in enumerate(self._machines) for i, source in enumerate(members)}
        return [found[source] for source in delivery.ranks]

    def combine(self, parts: Sequence[Tensor], delivery: Delivery, label: str) -> Tensor:
        """This rank's rows in the order of their destinations, from those of each source."""
        out = [[parts[source] for source in members] for members in self._machines]
        sizes = [[delivery.rows(source, rank) for source in self._machine] for rank in self._places]
        far = _exchanged(self._across, out, sizes, self._purpose, label)
        out = [[far[number][i] for number in range(len(self._machines))] for i in range(len(self._machine))]
        columns = list(zip(*self._machines, strict=True))
        sizes = [[delivery.rows(delivery.rank, rank) for rank in column] for column in columns]
        near = _exchanged(self._inside, out, sizes, self._purpose, label)
        found = {rank: near[i][m] for i, column in enumerate(columns) for m, rank in enumerate(column)}
        return torch.cat([found[rank] for rank in delivery.ranks])


def _exchanged(
    comm: Comm, out: Sequence[Sequence[Tensor]], sizes: Table, purpose: Purpose, label: str
) -> list[Sequence[Tensor]]:
    """The pieces that each rank has for this one, whose rows are `sizes`, from this one's pieces for each rank."""
    rows = torch.cat([piece for pieces in out for piece in pieces])
    receives, sends = [sum(each) for each in sizes], [sum(map(len, pieces)) for pieces in out]
    into = rows.new_empty((sum(receives), *rows.shape[1:]))
    if comm.mesh.ranks == 1:
        into = rows
    else:
        comm.all_to_all(into, rows, receives, sends, purpose, label).wait()
    return [part.split(list(each)) for part, each in zip(into.split(receives), sizes, strict=True)]


def _purpose(comm: Comm, purpose: Purpose) -> Purpose:
    """The purpose under which a collective is counted: another one in evaluation."""
    return TO_EVALUATE[purpose] if comm.evaluates else purpose


def dispatch_with_grad(rows: Tensor, ranks: ExpertRanks, delivery: Delivery, label: str) -> Tensor:
    """[R, D] -> [M, D] with autograd: `ExpertRanks.dispatch`, and `combine` for gradients."""
    return _with_grad(rows, ranks.dispatch, ranks.combine, delivery, label)


def combine_with_grad(local: Tensor, ranks: ExpertRanks, delivery: Delivery, label: str) -> Tensor:
    """[M, D] -> [R, D] with autograd: `ExpertRanks.combine`, and `dispatch` for gradients."""
    return _with_grad(local, ranks.combine, ranks.dispatch, delivery, label)


Moves = Callable[[Tensor, Delivery, str], Tensor]


def _with_grad(x: Tensor, move: Moves, reverse: Moves, delivery: Delivery, label: str) -> Tensor:
    moved: Tensor = _Moved.apply(x, move, reverse, delivery, label)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    """A permutation of rows over ranks, whose backward is the reverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Moves, reverse: Moves, delivery: Delivery, label: str) -> Tensor:
        ctx.reverse, ctx.delivery, ctx.label = reverse, delivery, label
        return move(x, delivery, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.reverse(gradients[0], ctx.delivery, f"gradient of {ctx.label}"), None, None, None, None


BUFFERS = "buffers_of_experts"  # an attribute of a module of experts on several ranks: its `ExpertBuffers`


class ExpertBuffers:
    """The buffers of one mixture: each rank of a group writes those of its own experts, and has those of all.

    Args:
        modules: one for each expert; none where their parameters are stacked.
    """

    def __init__(self, modules: Sequence[nn.Module], axis: Axis, path: str) -> None:
        self._comm, self._label = axis.comm, f"buffers of {path}"
        first, stop = shared_out(len(modules), axis.size)[axis.rank]
        self._modules = [(module, first <= number < stop) for number, module in enumerate(modules)]

    @torch.no_grad()
    def share(self) -> None:
        """Copy the buffers of other ranks' experts from these ranks; a collective call, if there are any."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, bool]]] = defaultdict(list)
        for module, held in self._modules:
            for buffer in module.buffers():
                by_dtype[buffer.dtype].append((buffer, held))
        for dtype, buffers in by_dtype.items():
            own = [(buffer if held else torch.zeros_like(buffer)).reshape(-1) for buffer, held in buffers]
            flat = torch.cat(own).to(torch.uint8 if dtype == torch.bool else dtype)
            self._comm.all_reduce(flat, Purpose.CONTROL, self._label).wait()  # one rank's values, and zeros
            for (buffer, _), values in zip(buffers, flat.split([part.numel() for part in own]), strict=True):
                buffer.copy_(values.view_as(buffer))
