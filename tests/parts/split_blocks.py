"""A toy of tensor parallelism for the small models of blocks, with and without sequence parallelism, in plain torch.

The embedding and the output layer that is tied to it are split by vocabulary (13 over 2 ranks: 7 and 6), each block's
first matrix by outputs (17: 9 and 8) and its second by inputs. Logits are gathered, since this is a toy. With
`sequence` each rank has the norms and residuals of some positions (5 over 2 ranks: 3 and 2).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.parts.place import Axis, Partial, Piece, Split
from zeroshard.parts.technique import NewAxis
from zeroshard.units.forwards import insert, replaced

POSITIONS = 5  # of the sequences of `engine.models.batch`


def even_cuts(size: int, ranks: int) -> list[int]:
    """Where `size` is cut among ranks; the last have fewer."""
    each = -(-size // ranks)
    return [min(size, each * rank) for rank in range(ranks + 1)]


class _Through(torch.autograd.Function):
    """Two linear functions, each the other's transpose: one in the forward, one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


class Between:
    """What goes between the ranks of an axis; nothing does for tensors on the meta device."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def copied(self, x: Tensor) -> Tensor:
        """x, whose gradients of all ranks add up."""
        return _Through.apply(x, torch.clone, self._sum)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, whose gradient is that of each."""
        return _Through.apply(x, self._sum, torch.clone)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of an x that all have alike."""
        return _Through.apply(x, lambda x: self._part(x, dim), lambda g: self._join(g, dim, x.shape[dim]))

    def gathered(self, x: Tensor, dim: int, size: int) -> Tensor:
        """All parts; what is made of them is alike on all ranks."""
        return _Through.apply(x, lambda x: self._join(x, dim, size), lambda g: self._part(g, dim))

    def gathered_for_parts(self, x: Tensor, dim: int, size: int) -> Tensor:
        """All parts; each rank makes a part of something of them."""
        return _Through.apply(x, lambda x: self._join(x, dim, size), lambda g: self._part(self._sum(g), dim))

    def summed_parts(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum."""
        return _Through.apply(x, lambda x: self._part(self._sum(x), dim), lambda g: self._join(g, dim, x.shape[dim]))

    def _sum(self, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        if not x.is_meta:
            dist.all_reduce(x, group=self.axis.comm.mesh.gathers)
        return x

    def _part(self, x: Tensor, dim: int) -> Tensor:
        cuts = even_cuts(x.shape[dim], self.axis.size)
        return x.narrow(dim, cuts[self.axis.rank], cuts[self.axis.rank + 1] - cuts[self.axis.rank]).clone()

    def _join(self, x: Tensor, dim: int, size: int) -> Tensor:
        whole = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
        whole.narrow(dim, even_cuts(size, self.axis.size)[self.axis.rank], x.shape[dim]).copy_(x)
        return self._sum(whole)


class SplitBlocks:
    """The technique, over the axis "tensor" of `ranks` neighbours."""

    zones = None

    def __init__(self, ranks: int = 2, sequence: bool = False) -> None:
        self.ranks, self.sequence = ranks, sequence
        self._splits: dict[nn.Parameter, Split | Partial] = {}
        self._blocks: list[str] = []

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        groups = [list(range(first, first + self.ranks)) for first in range(0, ranks, self.ranks)]
        return {"tensor": NewAxis(groups, data=False)}

    def replicated_over(self, layer: str) -> str | None:
        return None if self.sequence and layer in self._blocks[1:] else "tensor"

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Split | Partial]:
        between = Between(axes["tensor"])
        self._splits = {}
        self._embedding(model, between)
        blocks = dict(model.blocks.named_children())
        self._blocks = [f"blocks.{name}" for name in blocks]
        for block in blocks.values():
            self._block(block, between)
        if self.sequence:
            first, *_, last = blocks.values()
            insert(first, "divided", lambda plain: _entering(plain, between))
            insert(last, "divided", lambda plain: _leaving(plain, between))
        return self._splits

    def _part(self, module: nn.Module, name: str, dim: int, axis: Axis) -> nn.Parameter:
        """Put this rank's part in the place of a parameter."""
        whole = getattr(module, name)
        low, high = even_cuts(whole.shape[dim], axis.size)[axis.rank : axis.rank + 2]
        part = nn.Parameter(whole.detach().narrow(dim, low, high - low).clone(), whole.requires_grad)
        self._splits[part] = Split("tensor", tuple(whole.shape), dim, (Piece(low, high),))
        module._parameters[name] = part
        return part

    def _embedding(self, model: nn.Module, between: Between) -> None:
        axis, embed, head = between.axis, model.embed, model.head
        vocabulary, tied = embed.weight.shape[0], head.weight is embed.weight
        first = even_cuts(vocabulary, axis.size)[axis.rank]
        weight = self._part(embed, "weight", 0, axis)
        if tied:
            head._parameters["weight"] = weight
        else:
            self._part(head, "weight", 0, axis)

        def looked_up(ids: Tensor) -> Tensor:
            own = embed.weight
            mine = (ids >= first) & (ids < first + own.shape[0])
            rows = F.embedding((ids - first).clamp(0, own.shape[0] - 1), own) * mine[..., None]
            return between.summed(rows)

        def logits(plain: Any) -> Any:
            return lambda x: between.gathered(plain(between.copied(x)), x.dim() - 1, vocabulary)

        insert(embed, "divided", lambda _: looked_up)
        insert(head, "divided", logits)

    def _block(self, block: nn.Module, between: Between) -> None:
        axis, up, down = between.axis, block.up, block.down
        self._part(up, "weight", 0, axis)
        self._part(up, "bias", 0, axis)
        self._part(down, "weight", 1, axis)
        if self.sequence:
            self._splits |= dict.fromkeys((*block.norm.parameters(), down.bias), Partial("tensor"))

        def upward(plain: Any) -> Any:
            return lambda x: plain(between.gathered_for_parts(x, 1, POSITIONS) if self.sequence else between.copied(x))

        def downward(plain: Any) -> Any:
            deferred = replaced(down, plain)

            def forward(x: Tensor) -> Tensor:
                x = F.linear(x, down.weight) if deferred is None else deferred(x, biased=False)
                return (between.summed_parts(x, 1) if self.sequence else between.summed(x)) + down.bias

            return forward

        insert(up, "divided", upward)
        insert(down, "divided", downward)


def _entering(plain: Callable[..., Any], between: Between) -> Callable[..., Any]:
    return lambda x: plain(between.own(x, 1))


def _leaving(plain: Callable[..., Any], between: Between) -> Callable[..., Any]:
    return lambda x: between.gathered(plain(x), 1, POSITIONS)
