"""Collectives among tensor ranks, for activations and their gradients, and the zones of a forward.

A zone is the division of the next operation's activations among the ranks: whole, by positions, or by features.

Shapes: B rows, T positions of a sequence, D width; t ranks. Rank r has positions [r·c, (r+1)·c) of T, where c = ⌈T/t⌉,
so that the last ranks have fewer if t does not divide T. Meta tensors are not sent: only their shapes are computed.

A tensor that is equal on all ranks has an equal gradient on all ranks too; so the pairs of an operation and its
backward are (2104.04473, section 2.3; 2205.05198, section 4.2.2):

    copy_in   nothing, and a sum of the gradients       sum_out    a sum, and nothing
    gathered  a gather, and a sum whose own rows stay    summed     a sum whose own rows stay, and a gather
    cut_rows  own rows, and a gather                    join_rows  a gather, and own rows
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Comm
from zeroshard.comm.pending import Exchange, Pending, SideBySide
from zeroshard.errors import BatchError
from zeroshard.parts.place import Axis
from zeroshard.parts.zones import DividedActivations, Division, Moved
from zeroshard.parts.zones import Zone as Zone
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.step.context import context
from zeroshard.traffic import TO_EVALUATE, Purpose

SEQUENCE = -2  # the dimension of positions in [..., T, D]


class TensorRanks:
    """The ranks among which layers are split.

    Attributes:
        size: number of ranks; rank: this rank's number.
        sums_rows: whether a row-parallel layer has run on this rank, and not for shapes alone, since this was reset.
        has_formulas: whether training traffic is also planned by formulas.
    """

    def __init__(self, axis: Axis) -> None:
        self._comm = axis.comm
        self.size, self.rank = axis.size, axis.rank
        self.has_formulas = self.sums_rows = False

    def rows(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """The positions [start, stop) of `total` on a rank, by default this one."""
        rank = self.rank if rank is None else rank
        chunk = -(-total // self.size)
        return min(rank * chunk, total), min((rank + 1) * chunk, total)

    def start_sum(self, x: Tensor, label: str, purpose: Purpose = Purpose.SUM_ACTIVATIONS) -> "Summing":
        """Start to overwrite the contiguous `x` with its sum over the ranks."""
        return Summing(self, x, label, purpose)

    def sum(self, x: Tensor, label: str, purpose: Purpose = Purpose.SUM_ACTIVATIONS) -> Tensor:
        """The sum of `x` over the ranks, in place if `x` is contiguous."""
        return self.start_sum(x.contiguous(), label, purpose).result()

    def maximum(self, x: Tensor, label: str, purpose: Purpose = Purpose.SUM_LOSSES) -> Tensor:
        """The elementwise maximum of `x` over the ranks, in place if `x` is contiguous."""
        x = x.contiguous()
        if not x.is_meta and x.numel():
            self._comm.all_reduce(x, self.counted_as(purpose), label, maximum=True).wait()
        return x

    def gather(self, x: Tensor, dim: int, total: int, label: str) -> Tensor:
        """The elements of all ranks along `dim`, `total` in all; `x` has this rank's `rows(total)`."""
        return self.start_gather(x, dim, total, label).result()

    def start_gather(self, x: Tensor, dim: int, total: int, label: str) -> "Gathering":
        """Start a `gather`."""
        return Gathering(self, x, dim % x.dim(), total, label)

    def scatter_sum(self, x: Tensor, dim: int, label: str) -> Tensor:
        """This rank's `rows` along `dim` of the sum of `x` over the ranks."""
        return self.start_scatter_sum(x, dim, label).result()

    def start_scatter_sum(self, x: Tensor, dim: int, label: str) -> "ScatteringSum":
        """Start a `scatter_sum`."""
        return ScatteringSum(self, x, dim % x.dim(), label)

    def counted_as(self, purpose: Purpose) -> Purpose:
        """The purpose under which a collective is counted: another one in evaluation."""
        return TO_EVALUATE[purpose] if self._comm.evaluates else purpose

    def note_row(self, x: Tensor) -> None:
        """Note that a row-parallel layer reads x."""
        self.sums_rows |= not x.is_meta
        if torch._C._current_graph_task_id() != -1:
            self.forget_formulas()  # recomputed in a backward, perhaps in part

    def plan(self, purpose: Purpose, elements: int) -> None:
        """Add elements by a formula to the planned count of a purpose."""
        if self.has_formulas and not self._comm.evaluates:
            count = self._comm.counts[purpose]
            count.planned = (count.planned or 0) + elements

    def forget_formulas(self) -> None:
        """Drop the planned counts: a collective without a formula runs."""
        self.has_formulas = False
        for purpose in (Purpose.SUM_ACTIVATIONS, Purpose.GATHER_ACTIVATIONS):
            self._comm.counts[purpose].planned = None

    @property
    def comm(self) -> Comm:
        """Communicator of the tensor ranks."""
        return self._comm


class Summing:
    """A pending sum: ranks that read each other's tensors add in rank order, others in their backend's order.

    Two ranks on CPUs all-gather whole tensors: gloo's all-reduce sends as many bytes, and takes thrice the CPU time.
    """

    def __init__(self, ranks: TensorRanks, x: Tensor, label: str, purpose: Purpose) -> None:
        self._x, self._size = x, ranks.size
        self._pending: Pending | None = None
        self._both: Tensor | None = None
        if x.is_meta or not x.numel():
            return
        comm, purpose = ranks.comm, ranks.counted_as(purpose)
        if comm.operands is not None:
            self._pending = comm.side_by_side(x, 2 * x.numel(), purpose, label)
        elif ranks.size == 2 and not is_accelerator(x.device):
            self._both = x.new_empty(2, x.numel())
            self._pending = comm.gather(self._both.view(-1), x.view(-1), purpose, label)
        else:
            self._pending = comm.all_reduce(x, purpose, label)

    def result(self) -> Tensor:
        """x, overwritten."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        if isinstance(pending, SideBySide):
            _add([pending.of(rank, self._x.shape) for rank in range(self._size)], self._x)
            pending.done()
        elif self._both is not None:
            _add([each.view(self._x.shape) for each in self._both], self._x)
            self._both = None
        return self._x


class Gathering:
    """A pending gather."""

    def __init__(self, ranks: TensorRanks, x: Tensor, dim: int, total: int, label: str) -> None:
        self._ranks, self._dim, self._total, self._x = ranks, dim, total, x
        self._shape = (*x.shape[:dim], total, *x.shape[dim + 1 :])
        self._whole: Tensor | None = x.new_empty(self._shape) if x.is_meta else None
        self._pending: Pending | None = None
        comm, purpose = ranks.comm, ranks.counted_as(Purpose.GATHER_ACTIVATIONS)
        if x.is_meta:
            return
        elements = torch.Size(self._shape).numel()
        if comm.operands is not None:
            self._pending = comm.side_by_side(x, elements, purpose, label)
            return
        chunk = -(-total // ranks.size)
        if x.shape[dim] < chunk:
            x = torch.cat((x, x.new_zeros(*x.shape[:dim], chunk - x.shape[dim], *x.shape[dim + 1 :])), dim)
        own = x.contiguous()
        self._parts = own.new_empty((ranks.size, *own.shape))
        padding = self._parts.numel() - elements
        self._pending = comm.gather(self._parts.view(-1), own.view(-1), purpose, label, padding)

    def result(self) -> Tensor:
        """The whole [..., T, ...]."""
        if self._whole is None:
            assert self._pending is not None
            self._pending.wait()
            if isinstance(self._pending, SideBySide):
                self._whole = self._copied(self._pending)
            else:
                size, *shape = self._parts.shape
                shape[self._dim] *= size
                whole = self._parts.movedim(0, self._dim).reshape(shape).narrow(self._dim, 0, self._total)
                self._whole = whole.detach()  # no view to autograd, so that later operations may write into it
                del self._parts
        return self._whole

    def _copied(self, pending: SideBySide) -> Tensor:
        whole, ranks = self._x.new_empty(self._shape), self._ranks
        for rank in range(ranks.size):
            start, stop = ranks.rows(self._total, rank)
            place = whole.narrow(self._dim, start, stop - start)
            place.copy_(pending.of(rank, place.shape))
        pending.done()
        return whole


class ScatteringSum:
    """A pending reduce-scatter: this rank's rows of the sum, added in rank order."""

    def __init__(self, ranks: TensorRanks, x: Tensor, dim: int, label: str) -> None:
        self._ranks, self._dim, self._x = ranks, dim, x
        self._pending: SideBySide | Exchange | None = None
        total, comm, purpose = x.shape[dim], ranks.comm, ranks.counted_as(Purpose.SUM_ACTIVATIONS)
        start, stop = ranks.rows(total)
        self._start, self._length = start, stop - start
        if x.is_meta:
            return
        if comm.operands is not None:
            self._pending = comm.side_by_side(x, x.numel(), purpose, label)
            return
        before, after, chunk = x.shape[:dim], x.shape[dim + 1 :], -(-total // ranks.size)
        if chunk * ranks.size != total:
            x = torch.cat((x, x.new_zeros(*before, chunk * ranks.size - total, *after)), dim)
        self._full = x.reshape(*before, ranks.size, chunk, *after).movedim(dim, 0).contiguous()
        padding = self._full.numel() - self._x.numel()
        self._pending = comm.exchange(self._full.view(-1), x.new_empty, label, padding, purpose)

    def result(self) -> Tensor:
        """This rank's rows of the sum."""
        pending, self._pending = self._pending, None
        own = self._x.narrow(self._dim, self._start, self._length)
        if pending is None:
            return own
        pending.wait()
        if isinstance(pending, SideBySide):
            shape, ranks = tuple(self._x.shape), range(self._ranks.size)
            own = _add([pending.of(rank, shape).narrow(self._dim, self._start, self._length) for rank in ranks])
        else:
            own = _add(pending.copies).view(self._full.shape[1:]).narrow(self._dim, 0, self._length)
            del self._full
        pending.done()
        return own.detach()  # no view to autograd, so that later operations may write into it


def _add(operands: list[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum in the order given; `into` may be one of the operands."""
    first, second, *others = operands
    if into is not None and any(other is into for other in others):
        into.copy_(_add(operands))
        return into
    total: Tensor = torch.add(first, second) if into is None else torch.add(first, second, out=into)
    for other in others:
        total.add_(other)
    return total


class CopyIn(torch.autograd.Function):
    """x, equal on all ranks, as the input of a split layer; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, label: str) -> Tensor:
        """x itself."""
        ctx.ranks, ctx.label = ranks, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The sum of the gradients."""
        return ctx.ranks.sum(_own(gradients[0]), f"gradient of {ctx.label}"), None, None


class SumOut(torch.autograd.Function):
    """The sum over the ranks of the outputs of a split layer; the gradient is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, label: str) -> Tensor:
        """The sum, in place of x."""
        ctx.mark_dirty(x)
        total = _once(lambda: ranks.sum(x, label), x)
        return x if total is x else x.copy_(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient itself."""
        return gradients[0], None, None


class Gathered(torch.autograd.Function):
    """The rows of all ranks as the input of a split layer; the gradient is this rank's rows of its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, dim: int, total: int, label: str) -> Tensor:
        """Gather along `dim`."""
        ctx.ranks, ctx.dim, ctx.label = ranks, dim, label
        return ranks.gather(x, dim, total, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Own rows of the sum."""
        return ctx.ranks.scatter_sum(gradients[0], ctx.dim, f"gradient of {ctx.label}"), None, None, None, None


class Summed(torch.autograd.Function):
    """This rank's rows of the sum of a split layer's outputs over the ranks; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, dim: int, label: str) -> Tensor:
        """Sum, and keep own rows along `dim`."""
        ctx.ranks, ctx.dim, ctx.label, ctx.total = ranks, dim, label, x.shape[dim]
        rows = _once(lambda: ranks.scatter_sum(x, dim, label), x)
        return rows.data if rows._is_view() else rows  # autograd forbids changes in place to views made here

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Gather."""
        whole = ctx.ranks.gather(gradients[0], ctx.dim, ctx.total, f"gradient of {ctx.label}")
        return whole, None, None, None


class CutRows(torch.autograd.Function):
    """This rank's rows of x, which is equal on all ranks; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, dim: int, label: str) -> Tensor:
        """Own rows along `dim`."""
        ctx.ranks, ctx.dim, ctx.label, ctx.total = ranks, dim, label, x.shape[dim]
        start, stop = ranks.rows(ctx.total)
        return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Gather."""
        whole = ctx.ranks.gather(gradients[0], ctx.dim, ctx.total, f"gradient of {ctx.label}")
        return whole, None, None, None


class JoinRows(torch.autograd.Function):
    """The rows of all ranks, for equal operations on all; the gradient is cut to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, dim: int, total: int, label: str) -> Tensor:
        """Gather along `dim`."""
        ctx.ranks, ctx.dim, ctx.total = ranks, dim, total
        return ranks.gather(x, dim, total, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Own rows."""
        start, stop = ctx.ranks.rows(ctx.total)
        return gradients[0].narrow(ctx.dim, start, stop - start), None, None, None, None


def _once(make: Callable[[], Tensor], written: Tensor) -> Tensor:
    """A sum in a forward, which a recomputation does not repeat; it may overwrite `written`."""
    results = context.kept
    return make() if results is None else results.once(make, written)


def _own(gradient: Tensor) -> Tensor:
    """A copy of a gradient for in-place changes: autograd may pass one tensor to several nodes."""
    return gradient.clone(memory_format=torch.contiguous_format)


class Zones:
    """The zone of a model's current forward.

    Attributes:
        now: zone of the next operation.
        around: zone outside of split layers: `SEQUENCE` in blocks under sequence parallelism, else `WHOLE`.
        positions: length of whole sequences while `around` is `SEQUENCE`.
        axis: the tensor axis; None before the model is cut.
        moved: called at each border, for random numbers.
    """

    def __init__(self) -> None:
        self.now = self.around = Zone.WHOLE
        self.positions = 0
        self.axis: Axis | None = None
        self.moved: Moved = lambda zone, around: None
        self._columns: tuple[DividedActivations, ...] = ()

    def enter(self, zone: Zone, columns: DividedActivations | None = None) -> None:
        """Enter a zone.

        Args:
            columns: the features and heads of the column-parallel layer that begins it.
        """
        if self.now is not zone:
            self.now, self._columns = zone, ()
        if columns is not None and columns not in self._columns:
            self._columns += (columns,)
        self.moved(zone, False)

    def leave(self) -> None:
        """Leave the split layers for the zone around them."""
        self.now = self.around
        self.moved(None, False)

    def enter_sequence(self, positions: int) -> None:
        """Enter the zone in which each rank has some of `positions`."""
        self.now = self.around = Zone.SEQUENCE
        self.positions = positions
        self.moved(Zone.SEQUENCE, True)

    def leave_block(self) -> None:
        """Leave a block: activations stay divided, but all ranks draw equal random skips of the next block."""
        self.moved(Zone.WHOLE, False)

    def enter_block(self) -> None:
        """Enter the next block of a stack."""
        self.moved(None, False)

    def recall(self, positions: int) -> None:
        """Restore the zone of a block for its backward, in which parts of it may be recomputed."""
        if self.around is Zone.WHOLE:
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)
        self.now = self.around = Zone.SEQUENCE
        self.positions = positions

    def _forget(self) -> None:
        self.now = self.around = Zone.WHOLE

    @property
    def divided(self) -> DividedActivations | None:
        """The division of the next operation's activations among the ranks; None if they are whole."""
        if self.now is Zone.WHOLE or self.axis is None:
            return None
        if self.now is Zone.COLUMNS:
            return _joined(self._columns)
        return _positions(self.positions, self.axis.size, self.axis.rank)

    def total(self, x: Tensor, ranks: TensorRanks) -> int:
        """The number of rows over all ranks, for x [..., T/t, D], or x [B·T/t, D] with rows and positions merged.

        Raises:
            BatchError: the ranks do not divide the positions.
        """
        own, (start, stop) = x.shape[-2], ranks.rows(self.positions)
        if x.dim() > 2 and own == stop - start:
            return self.positions
        if self.positions % ranks.size:
            raise BatchError(
                f"Sequences of {self.positions} positions do not divide among tensor_parallel={ranks.size} ranks, and "
                f"a layer reads rows of shape {tuple(x.shape)}. Make the length of sequences a multiple of "
                f"{ranks.size}, or set TensorParallel({ranks.size}, sequence=False)."
            )
        return own * ranks.size

    def reset(self) -> None:
        """Return to the zone `WHOLE`, as a forward begins or its blocks end."""
        self.now = self.around = Zone.WHOLE
        self.moved(Zone.WHOLE, True)


@lru_cache(maxsize=256)
def _positions(total: int, ranks: int, rank: int) -> DividedActivations:
    """The division of `total` positions for one rank."""
    chunk = -(-total // ranks)
    first = min(rank * chunk, total)
    return DividedActivations(positions=Division(total, first, min(chunk, total - first)))


@lru_cache(maxsize=256)
def _joined(columns: tuple[DividedActivations, ...]) -> DividedActivations:
    """The union of the heads and features of the entered column-parallel layers."""
    heads = dict.fromkeys(division for each in columns for division in each.heads)
    features = dict.fromkeys(division for each in columns for division in each.features)
    return DividedActivations(heads=tuple(heads), features=tuple(features))
