"""Dispatch: the rows of chosen tokens in the order of their experts, and their sums in the order of tokens.

Dropless and sorted: nothing is padded, and choices that have no place in their expert's capacity are left out before
any row is copied. No sum is made by scattered additions, so results are the same on every device and in every run.
Shapes: T tokens, k choices of each, E experts, R kept choices, D features.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import ModelError
from zeroshard.moe.routing.record import Routing


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The kept choices of a routing, sorted by expert; those of one expert stand in the order of tokens.

    Attributes:
        choices: [R], int64: token * k + choice of each row.
        tokens: [R], int64: the token of each row.
        counts: rows of each expert, E of them.
        shape: T and k.
    """

    choices: Tensor
    tokens: Tensor
    counts: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def rows(self) -> int:
        """R."""
        return len(self.choices)


def order_of(routing: Routing, experts: int) -> RowOrder:
    """Sort the kept choices by expert. Reads the counts on the host, which waits for the device once.

    Args:
        experts: E.

    Raises:
        ModelError: experts that are not there were chosen.
    """
    tokens, k = routing.experts.shape
    chosen = routing.experts.reshape(-1).long()  # a router of the user's may give fewer bits
    if without_values(chosen):  # in a rehearsal: balanced, and all kept
        counts = tuple((len(chosen) + expert) // experts for expert in range(experts))
        return RowOrder(chosen, chosen, counts, (tokens, k))
    kept = None if routing.kept is None else routing.kept.reshape(-1).nonzero().squeeze(1)
    if kept is not None:
        chosen = chosen[kept]
    ascending, order = torch.sort(chosen, stable=True)
    choices = order if kept is None else kept[order]
    starts = torch.searchsorted(ascending, torch.arange(experts + 1, device=chosen.device)).tolist()
    if starts[0] > 0 or starts[-1] < len(chosen):
        wrong = ascending[0 if starts[0] > 0 else -1].item()
        raise ModelError(
            f"A router chose expert {wrong}, and experts 0 to {experts - 1} are there. Experts without weights, such "
            f"as the identity, cannot be dispatched to; apply them beside the mixture."
        )
    counts = tuple(end - start for start, end in pairwise(starts))
    return RowOrder(choices, choices if k == 1 else choices // k, counts, (tokens, k))


def without_values(x: Tensor) -> bool:
    """Whether a tensor has a shape alone, as those of a rehearsal."""
    return x.is_meta or type(x.detach()) is not Tensor


def gather_rows(x: Tensor, order: RowOrder) -> Tensor:
    """The rows [R, D] of the tokens [T, D]; the gradient of a token is the sum over its choices, in their order."""
    rows: Tensor = _Gather.apply(x, order)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, order: RowOrder) -> Tensor:
    """The sums [T, D] of the rows [R, D] of each token, in the order of its choices, added in fp32 at least."""
    summed: Tensor = _Combine.apply(rows, order)  # type: ignore[no-untyped-call]
    return summed


def gather_gates(gates: Tensor, order: RowOrder) -> Tensor:
    """The gates [R] of the rows, from those of the choices [T, k]."""
    return gates.reshape(-1).index_select(0, order.choices)


def room_for_choices(like: Tensor, order: RowOrder) -> Tensor:
    """A tensor [T * k, D] for the rows of all choices, with zeros where choices may be without a row."""
    tokens, k = order.shape
    make = like.new_empty if order.rows == tokens * k else like.new_zeros
    return make((tokens * k, like.shape[-1]))


def sum_choices(placed: Tensor, order: RowOrder) -> Tensor:
    """[T * k, D] -> [T, D]; sums of 16-bit numbers are made in fp32."""
    tokens, k = order.shape
    return placed if k == 1 else placed.view(tokens, k, placed.shape[-1]).sum(1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return combine(gradients[0], ctx.order), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return sum_choices(room_for_choices(rows, order).index_copy_(0, order.choices, rows), order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_rows(gradients[0], ctx.order), None
