"""The collectives of the ranks that split layers among themselves, for activations and their gradients.

Shapes: B rows, T positions of a sequence, D width; t ranks. Rank r has positions [r·c, (r+1)·c) of T, where c = ⌈T/t⌉,
so that the last ranks have fewer where t does not divide T. Meta tensors are not sent: only their shapes are made.

A tensor that is equal on all ranks has a gradient that is equal on all ranks too; so the pairs of an operation and its
backward are (2104.04473, section 2.3; 2205.05198, section 4.2.2):

    copy_in   nothing, and a sum of the gradients       sum_out    a sum, and nothing
    gathered  a gather, and a sum whose own rows stay    summed     a sum whose own rows stay, and a gather
    cut_rows  own rows, and a gather                    join_rows  a gather, and own rows
"""

from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import Exchange, Pending
from zeroshard.parts.place import Axis
from zeroshard.traffic import Purpose

SEQUENCE = -2  # the dimension of positions in [..., T, D]


class TensorRanks:
    """The ranks among which layers are split.

    Attributes:
        size: how many they are; rank: this one among them.
    """

    def __init__(self, axis: Axis) -> None:
        self._comm = axis.comm
        self.size, self.rank = axis.size, axis.rank

    def rows(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """The positions [start, stop) of `total` that a rank has, this one by default."""
        rank = self.rank if rank is None else rank
        chunk = -(-total // self.size)
        return min(rank * chunk, total), min((rank + 1) * chunk, total)

    def start_sum(self, x: Tensor, label: str, purpose: Purpose = Purpose.SUM_ACTIVATIONS) -> Pending | None:
        """Start to overwrite `x`, which is contiguous, with its sum over the ranks; None where nothing is sent."""
        return None if x.is_meta or not x.numel() else self._comm.all_reduce(x, purpose, label)

    def sum(self, x: Tensor, label: str, purpose: Purpose = Purpose.SUM_ACTIVATIONS) -> Tensor:
        """The sum of `x` over the ranks, in the place of `x` if it is contiguous."""
        x = x.contiguous()
        pending = self.start_sum(x, label, purpose)
        if pending is not None:
            pending.wait()
        return x

    def maximum(self, x: Tensor, label: str, purpose: Purpose = Purpose.SUM_LOSSES) -> Tensor:
        """The largest of each element of `x` over the ranks, in the place of `x` if it is contiguous."""
        x = x.contiguous()
        if not x.is_meta and x.numel():
            self._comm.all_reduce(x, purpose, label, maximum=True).wait()
        return x

    def gather(self, x: Tensor, dim: int, total: int, label: str) -> Tensor:
        """The elements of all ranks along `dim`, `total` in all, of which `x` has those of `rows(total)`."""
        return self.start_gather(x, dim, total, label).result()

    def start_gather(self, x: Tensor, dim: int, total: int, label: str) -> "Gathering":
        """Start a `gather`."""
        dim %= x.dim()
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        chunk = -(-total // self.size)
        if x.is_meta:
            return Gathering(None, x.new_empty((self.size, *before, chunk, *after)), dim, total)
        if x.shape[dim] < chunk:
            x = torch.cat((x, x.new_zeros(*before, chunk - x.shape[dim], *after)), dim)
        own = x.contiguous()
        full = own.new_empty(self.size * own.numel())
        pending = self._comm.gather(full, own.view(-1), Purpose.GATHER_ACTIVATIONS, label)
        return Gathering(pending, full.view(self.size, *before, chunk, *after), dim, total)

    def scatter_sum(self, x: Tensor, dim: int, label: str) -> Tensor:
        """The sum of `x` over the ranks, of which this rank keeps `rows` along `dim`."""
        return self.start_scatter_sum(x, dim, label).result()

    def start_scatter_sum(self, x: Tensor, dim: int, label: str) -> "ScatteringSum":
        """Start a `scatter_sum`."""
        dim %= x.dim()
        total = x.shape[dim]
        start, stop = self.rows(total)
        before, after, chunk = x.shape[:dim], x.shape[dim + 1 :], -(-total // self.size)
        shape = (*before, chunk, *after)
        if x.is_meta:
            return ScatteringSum(None, x.new_empty(shape), dim, stop - start)
        if chunk * self.size != total:
            x = torch.cat((x, x.new_zeros(*before, chunk * self.size - total, *after)), dim)
        full = x.reshape(*before, self.size, chunk, *after).movedim(dim, 0).contiguous()
        exchange = self._comm.exchange(full.view(-1), full.new_empty, label, purpose=Purpose.SUM_ACTIVATIONS)
        return ScatteringSum(exchange, full[0], dim, stop - start)


class Gathering:
    """A gather under way."""

    def __init__(self, pending: Pending | None, parts: Tensor, dim: int, total: int) -> None:
        """`parts`: [t, ..., c, ...], which the ranks' own fill."""
        self._pending, self._parts, self._dim, self._total = pending, parts, dim, total

    def result(self) -> Tensor:
        """The whole [..., T, ...]."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            size, *shape = self._parts.shape
            shape[self._dim] *= size
            self._parts = self._parts.movedim(0, self._dim).reshape(shape).narrow(self._dim, 0, self._total)
            return self._parts
        if self._parts.is_meta:
            _, *shape = self._parts.shape
            shape[self._dim] = self._total
            return self._parts.new_empty(shape)
        return self._parts


class ScatteringSum:
    """A sum under way, of which this rank gets its own rows."""

    def __init__(self, exchange: Exchange | None, like: Tensor, dim: int, length: int) -> None:
        """`like`: [..., c, ...], as the rows of one rank."""
        self._exchange, self._like, self._dim, self._length = exchange, like, dim, length

    def result(self) -> Tensor:
        """The own rows of the sum, added in the order of the ranks."""
        own = self._like
        if self._exchange is not None:
            self._exchange.wait()
            first, second, *others = self._exchange.copies
            own = torch.add(first, second)
            for copy in others:
                own.add_(copy)
            self._exchange.done()
            own = own.view(self._like.shape)
        return own.narrow(self._dim, 0, self._length)


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
        """The sum, in the place of x."""
        ctx.mark_dirty(x)
        return ranks.sum(x, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient itself."""
        return gradients[0], None, None


class Gathered(torch.autograd.Function):
    """The rows of all ranks as the input of a split layer; of the gradient's sum over the ranks, own rows stay."""

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
    """Own rows of the sum over the ranks of the outputs of a split layer; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, dim: int, label: str) -> Tensor:
        """Sum, and keep own rows along `dim`."""
        ctx.ranks, ctx.dim, ctx.label, ctx.total = ranks, dim, label, x.shape[dim]
        return ranks.scatter_sum(x, dim, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Gather."""
        whole = ctx.ranks.gather(gradients[0], ctx.dim, ctx.total, f"gradient of {ctx.label}")
        return whole, None, None, None


class CutRows(torch.autograd.Function):
    """Own rows of x, which is equal on all ranks; the gradient is gathered."""

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
    """The rows of all ranks, for what is computed alike on all; own rows of the gradient."""

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


def _own(gradient: Tensor) -> Tensor:
    """A gradient that may be written: autograd may hand one tensor to several."""
    return gradient.clone(memory_format=torch.contiguous_format)
