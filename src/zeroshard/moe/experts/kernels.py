"""The products of experts, an expert at a time: gather, first product, activation, second product, while it is cached.

[Note: gates] A row's output is g * (h W + b). Its backward knows the gradient G of the token's output: the gradient of
g is <G W', h> + <G, b>, so outputs of experts need not be saved; g multiplies D-wide rows only, never hidden ones.

[Note: products left for later] Where a store of weight gradients is open (`step.context`), the backward
keeps the inputs of the products that make them: of every row the hidden features and the gradient of what the first
product made, and G and x as they are. Weights are no inputs of the graph then, as for linear layers.

Shapes: T tokens, k choices, R rows, n rows of one tile, D width, M made features, F hidden features, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroshard.errors import ModelError
from zeroshard.moe.exchange.dispatch import RowOrder, room_for_choices, sum_choices
from zeroshard.moe.experts.activations import Activation
from zeroshard.moe.experts.weight_gradients import StackGradient, Target, make_later
from zeroshard.step.context import WeightGradients, store_for

TILE = 1024  # rows whose hidden features are made at once


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The parameters of E experts.

    Attributes:
        up: [E, M, D]; where transposed [E, D, M].
        down: [E, D, F]; where transposed [E, F, D].
        activation: between the products.
        up_bias: [E, M], or None.
        down_bias: [E, D], or None.
        transposed: as said.
    """

    up: Tensor
    down: Tensor
    activation: Activation
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False


def expert_tokens(x: Tensor, order: RowOrder, gates: Tensor, stack: ExpertStack) -> Tensor:
    """Tokens [T, D] -> [T, D]: the sum over the kept choices of gate * expert(token).

    Args:
        gates: [T, k].
    """
    return _apply(x, gates, stack, order, order.counts)


def expert_rows(rows: Tensor, counts: Sequence[int], gates: Tensor | None, stack: ExpertStack) -> Tensor:
    """Rows [R, D] -> [R, D], sorted by expert: gate * expert(row).

    Args:
        counts: rows of each expert.
        gates: [R]; None for 1.
    """
    return _apply(rows, gates, stack, None, tuple(counts))


def check_counts(counts: Sequence[int], experts: int, rows: int) -> None:
    """Refuse counts that do not cover the rows: other rows would be memory that was never written.

    Raises:
        ModelError: there is not one count for each expert, one is negative, or they do not add up to the rows.
    """
    if len(counts) != experts or min(counts, default=0) < 0 or sum(counts) != rows:
        raise ModelError(
            f"{rows} rows were to be divided among {experts} experts by the counts {list(counts)}; they must be "
            f"{experts} counts of at least 0 that add up to {rows}."
        )


def _apply(
    x: Tensor, gates: Tensor | None, stack: ExpertStack, order: RowOrder | None, counts: tuple[int, ...]
) -> Tensor:
    check_counts(counts, len(stack.up), len(x) if order is None else order.rows)
    device = x.device.type
    known = torch.amp.is_autocast_available(device)  # not of the meta device
    if known and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    left = _Left.of(stack)
    job = _Job(stack.activation, stack.transposed, order, counts, torch.is_grad_enabled(), left)
    up, down, anchor = stack.up, stack.down, None
    if left is not None:
        up, down, anchor = up.detach(), down.detach(), x.new_zeros((), requires_grad=True)
    with torch.autocast(device, enabled=False) if known else nullcontext():
        done: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            x.contiguous(), gates, up, stack.up_bias, down, stack.down_bias, anchor, job
        )
    return done


@dataclass(frozen=True, slots=True)
class _Tile:
    expert: int
    size: int  # rows
    begins: bool  # the first of its expert
    ends: bool  # the last of its expert


@dataclass(frozen=True, slots=True)
class _Left:
    """The weights whose gradients are left to a store ([Note: products left for later]): up and down, where trained."""

    store: WeightGradients
    weights: Sequence[Tensor | None]

    @classmethod
    def of(cls, stack: ExpertStack) -> "_Left | None":
        """Those of a forward that runs now."""
        store, weights = store_for(stack.up, stack.down), (stack.up, stack.down)
        return None if store is None else cls(store, [one if one.requires_grad else None for one in weights])


@dataclass(frozen=True, slots=True)
class _Job:
    """Arguments other than tensors of the graph, for both directions."""

    activation: Activation
    transposed: bool
    order: RowOrder | None
    counts: tuple[int, ...]
    saves: bool
    left: _Left | None

    @property
    def largest(self) -> int:
        """Rows of the largest tile."""
        return min(max(self.counts, default=0), TILE)

    def room(self, x: Tensor) -> Tensor:
        """Where the rows are put before they are summed."""
        return torch.empty_like(x) if self.order is None else room_for_choices(x, self.order)

    def sum(self, room: Tensor) -> Tensor:
        """[T, D], or the rows themselves."""
        return room if self.order is None else sum_choices(room, self.order)

    def column(self, gates: Tensor | None) -> Tensor | None:
        """Gates [R, 1] in the order of rows."""
        if gates is None or self.order is None:
            return None if gates is None else gates.reshape(-1, 1)
        return gates.reshape(-1, 1).index_select(0, self.order.choices)

    def uncolumn(self, column: Tensor, gates: Tensor) -> Tensor:
        """Gradients [R, 1] in the shape of gates; zeros for choices without a row."""
        if self.order is not None:
            column = room_for_choices(column, self.order).index_copy_(0, self.order.choices, column)
        return column.view(gates.shape).to(gates.dtype)


class _Tiles:
    """The tiles of all rows, and their parts of tensors: views of all at once cost a fraction of slices one by one."""

    def __init__(self, job: _Job) -> None:
        self._all = [
            _Tile(expert, min(TILE, count - at), at == 0, at + TILE >= count)
            for expert, count in enumerate(job.counts)
            for at in range(0, count, TILE)
        ]
        self._sizes, self._order = [tile.size for tile in self._all], job.order

    def __iter__(self) -> Iterator[_Tile]:
        """Experts without rows have none."""
        return iter(self._all)

    def parts(self, rows: Tensor | None) -> Sequence[Any]:
        """The rows [n, ...] of each, of rows [R, ...]; None for each of None."""
        return [None] * len(self._all) if rows is None else rows.split(self._sizes)

    def rooms(self, room: Tensor) -> list[Tensor]:
        """The first n rows of `room`, for each."""
        views = {size: room[:size] for size in set(self._sizes)}
        return [views[size] for size in self._sizes]

    def taking(self, x: Tensor, into: Tensor) -> Callable[[int], Tensor]:
        """A function that takes the rows [n, D] of a tile, of tokens [T, D] or of rows; copies go to `into`."""
        if self._order is None:
            return self.parts(x).__getitem__
        tokens, rooms = self.parts(self._order.tokens), self.rooms(into)
        return lambda number: torch.index_select(x, 0, tokens[number], out=rooms[number])

    def putting(self, room: Tensor) -> Callable[[int, Tensor], object]:
        """A function that puts the rows of a tile into `room`."""
        if self._order is None:
            parts = self.parts(room)
            return lambda number, rows: parts[number].copy_(rows)
        choices = self.parts(self._order.choices)
        return lambda number, rows: room.index_copy_(0, choices[number], rows)


class _Experts(torch.autograd.Function):
    """The anchor keeps the node in the graph where nothing else needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor | None, *rest: Any) -> Tensor:
        *weights, _, job = rest
        output, made = _forward(x, gates, job, weights)
        if job.saves:
            ctx.save_for_backward(x, gates, made, *weights)
            ctx.job, ctx.targets = job, [None if weight is None else Target(weight) for weight in weights]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_gates, *wanted, _, _ = ctx.needs_input_grad
        x, gates, made, *weights = ctx.saved_tensors
        sums = [
            target.gradient(weight, x.dtype, ctx.job.transposed) if wants else None
            for weight, target, wants in zip(weights, ctx.targets, wanted, strict=True)
        ]
        gradient, kept = gradients[0].contiguous(), _Kept.of(made, ctx.job)
        found = _backward(gradient, (x, gates, made, *weights), ctx.job, sums, (of_x, of_gates), kept)
        if kept is not None:
            kept.leave(gradient, x, gates, ctx.job)
        return (*found, *(None if each is None else each.finish(ctx.job.counts) for each in sums), None, None)


@dataclass(slots=True)
class _Kept:
    """Inputs of products left for later, for all rows.

    Attributes:
        of_made: [R, M]; None where no product needs it.
        hidden: [R, F]; None where no product needs it.
    """

    of_made: Tensor | None
    hidden: Tensor | None

    @classmethod
    def of(cls, made: Tensor, job: _Job) -> "_Kept | None":
        """Room for it, if there are such products."""
        if job.left is None:
            return None
        up, down = job.left.weights
        features = int(made.shape[-1] * job.activation.features)
        hidden = made if job.activation.overwrites else None if down is None else made.new_empty(len(made), features)
        return cls(None if up is None else torch.empty_like(made), None if down is None else hidden)

    def leave(self, gradient: Tensor, x: Tensor, gates: Tensor | None, job: _Job) -> None:
        """Leave the products to the store."""
        assert job.left is not None
        products = (
            (self.of_made, partial(_up_products, x, gates)),
            (self.hidden, partial(_down_products, gradient, gates)),
        )
        for weight, (kept, add) in zip(job.left.weights, products, strict=True):
            if weight is not None and kept is not None:
                job.left.store.add(weight, make_later(partial(add, kept, job), job.counts, x.dtype, job.transposed))


def _down_products(gradient: Tensor, gates: Tensor | None, hidden: Tensor, job: _Job, into: StackGradient) -> None:
    tiles, narrow = _Tiles(job), gradient.new_empty(2, job.largest, gradient.shape[-1])
    take, products = tiles.taking(gradient, narrow[0]), tiles.rooms(narrow[1])
    columns, parts = tiles.parts(job.column(gates)), tiles.parts(hidden)
    for i, tile in enumerate(tiles):
        of_output, g = take(i), columns[i]
        weighed = of_output if g is None else torch.mul(of_output, g, out=products[i])
        _add((into, None), tile, weighed, parts[i])


def _up_products(x: Tensor, gates: Tensor | None, of_made: Tensor, job: _Job, into: StackGradient) -> None:
    tiles, narrow = _Tiles(job), x.new_empty(job.largest, x.shape[-1])
    take, rooms = tiles.taking(x, narrow), tiles.rooms(narrow)
    columns, parts = tiles.parts(job.column(gates)), tiles.parts(of_made)
    for i, tile in enumerate(tiles):
        _add((into, None), tile, parts[i], take(i), columns[i], rooms[i])


def _each(stacked: Tensor, like: Tensor) -> Callable[[int], Tensor]:
    """The weight or bias of an expert, in the dtype of the rows: weights change their dtype for a product only."""
    views = stacked.unbind()
    return views.__getitem__ if stacked.dtype == like.dtype else lambda expert: views[expert].to(like.dtype)


def _products(stacked: Tensor, bias: Tensor | None, like: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
    """The product of an expert's rows [n, in] with its weight, of [E, in, out], in the memory of the last argument."""
    weight_of = _each(stacked, like)
    if bias is None:
        return lambda expert, rows, into: torch.mm(rows, weight_of(expert), out=into)
    bias_of = _each(bias, like)
    return lambda expert, rows, into: torch.addmm(bias_of(expert), rows, weight_of(expert), out=into)


def _forward(x: Tensor, gates: Tensor | None, job: _Job, weights: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The output, and the results [R, M] of the first products (hidden features, where they overwrite these)."""
    up, up_bias, down, down_bias = weights
    up, down = (up, down) if job.transposed else (up.mT, down.mT)
    tiles, features = _Tiles(job), up.shape[-1]
    hidden_features = 0 if job.activation.overwrites else int(features * job.activation.features)
    made = x.new_empty(sum(job.counts) if job.saves else job.largest, features)
    gathered = x.new_empty(0 if job.order is None else job.largest, x.shape[-1])
    outputs = tiles.rooms(x.new_empty(job.largest, x.shape[-1]))
    hidden_rooms = tiles.rooms(x.new_empty(job.largest, hidden_features))
    parts, columns = (tiles.parts if job.saves else tiles.rooms)(made), tiles.parts(job.column(gates))
    room = job.room(x)
    take, put = tiles.taking(x, gathered), tiles.putting(room)
    first, second = _products(up, up_bias, x), _products(down, down_bias, x)
    for i, tile in enumerate(tiles):
        part = first(tile.expert, take(i), parts[i])
        output = second(tile.expert, job.activation.hidden(part, hidden_rooms[i]), outputs[i])
        put(i, output if columns[i] is None else output.mul_(columns[i]))
    return job.sum(room), made


def _backward(
    gradient: Tensor,
    saved: tuple[Any, ...],
    job: _Job,
    sums: Sequence[StackGradient | None],
    wanted: tuple[bool, bool],
    kept: _Kept | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the gates ([Note: gates]); those of the weights are added to `sums`.

    Args:
        kept: filled in, where products are left for later.
    """
    x, gates, made, up, _, down, down_bias = saved
    up, down = (up.mT, down.mT) if job.transposed else (up, down)
    tiles, activation, column = _Tiles(job), job.activation, job.column(gates)
    room = job.room(x) if wanted[0] else None
    of_column = None if column is None or not wanted[1] else torch.empty_like(column)
    narrow = x.new_empty(2, job.largest, x.shape[-1])
    wide = x.new_empty(2, job.largest, int(made.shape[-1] * activation.features))
    made_rooms = tiles.rooms(x.new_empty(job.largest if activation.features < 1 else 0, made.shape[-1]))
    (rows_rooms, products), (hidden_rooms, others) = map(tiles.rooms, narrow), map(tiles.rooms, wide)
    parts, columns, of_columns = tiles.parts(made), tiles.parts(column), tiles.parts(of_column)
    kept_hidden = tiles.parts(None if kept is None or activation.overwrites else kept.hidden)
    kept_made = tiles.parts(None if kept is None else kept.of_made)
    take_gradient, take = tiles.taking(gradient, narrow[0]), tiles.taking(x, narrow[0])
    put = None if room is None else tiles.putting(room)
    through_down, through_up = _products(down, None, x), _products(up, None, x)
    bias_of = None if down_bias is None else _each(down_bias, x)
    for i, tile in enumerate(tiles):
        part, g, of_g = parts[i], columns[i], of_columns[i]
        of_output = take_gradient(i)
        weighed = of_output if g is None else torch.mul(of_output, g, out=products[i])
        hidden = part if activation.overwrites else activation.hidden(part, hidden_rooms[i], made_rooms[i])
        _add(sums[2:], tile, weighed, hidden)
        of_hidden = through_down(tile.expert, of_output, others[i])
        if kept_hidden[i] is not None:
            kept_hidden[i].copy_(hidden)
        if of_g is not None:
            torch.sum(torch.mul(of_hidden, hidden, out=hidden_rooms[i]), -1, keepdim=True, dtype=of_g.dtype, out=of_g)
            if bias_of is not None:
                of_g += (of_output @ bias_of(tile.expert)).unsqueeze(-1)
        of_made = activation.gradient(of_hidden, part, made_rooms[i])
        if kept_made[i] is not None:
            kept_made[i].copy_(of_made)
        _add(sums[:2], tile, of_made, take(i), g, rows_rooms[i])
        if put is not None:
            of_rows = through_up(tile.expert, of_made, products[i])
            put(i, of_rows if g is None else of_rows.mul_(g))
    of_gates = None if of_column is None or gates is None else job.uncolumn(of_column, gates)
    return None if room is None else job.sum(room), of_gates


def _add(
    sums: Sequence[StackGradient | None],
    tile: _Tile,
    of_outputs: Tensor,
    inputs: Tensor,
    gates: Tensor | None = None,
    into: Tensor | None = None,
) -> None:
    """Add the contribution of a tile to the gradients of a weight and its bias.

    Args:
        of_outputs: [n, O]; still to be multiplied by the gates, if there are any.
        inputs: [n, I].
        gates: [n, 1].
        into: [n, I], where inputs times gates may be put.
    """
    of_weight, of_bias = sums
    if of_bias is not None:
        of_bias.add_rows(tile.expert, of_outputs, gates, tile.begins, tile.ends)
    if of_weight is not None:
        weighed = inputs if gates is None else torch.mul(inputs, gates, out=into)
        of_weight.add_product(tile.expert, of_outputs, weighed, tile.begins, tile.ends)
