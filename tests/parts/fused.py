"""A toy whose matrices a technique cuts as tensor parallelism does, and the plain loop to compare it with.

`Fused` is a small gated layer: its weight [D, 2F + C] is cut along dimension 1 in three pieces, of which the last is on
every rank (as keys and values of few heads are); its features are uneven over the ranks; `scale` is held whole, with
partial gradients.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.engine import techniques
from zeroshard.parts.place import Axis, Cuts, Partial, Piece, Split
from zeroshard.parts.technique import NewAxis

WIDTH, FEATURES, COMMON, ROWS = 4, 7, 3, 4
AXIS = "columns"


class CopyToAxis(torch.autograd.Function):
    """Nothing in the forward, the sum over an axis in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverAxis(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Fused(nn.Module):
    """Gated features, with some that all of them see: [.., D] -> [.., D]."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.group, self.act = FEATURES, None, nn.Tanh()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.weight = nn.Parameter(torch.empty(WIDTH, 2 * FEATURES + COMMON))
        self.bias = nn.Parameter(torch.empty(2 * FEATURES + COMMON))
        self.gain = nn.Parameter(torch.empty(FEATURES), requires_grad=False)
        self.out = nn.Parameter(torch.empty(FEATURES, WIDTH))
        self.register_buffer("seen", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Values that depend on shapes, on an attribute, and on the order of the draws."""
        nn.init.uniform_(self.scale, 0.5, 1.5)
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.uniform_(self.bias, -0.1, 0.1)
        nn.init.constant_(self.gain, 1.0 + self.features)
        nn.init.normal_(self.out, std=self.features**-0.5)
        self.seen.fill_(self.features)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        weight, bias = self.weight, self.bias
        if self.group is not None:  # the common features get a part of their gradient from each rank
            x = CopyToAxis.apply(x, self.group)
            cut = 2 * self.features
            weight = torch.cat([weight[:, :cut], CopyToAxis.apply(weight[:, cut:], self.group)], 1)
            bias = torch.cat([bias[:cut], CopyToAxis.apply(bias[cut:], self.group)])
        gate, up, common = (x * self.scale @ weight + bias).split([self.features, self.features, COMMON], -1)
        y = ((self.act(gate) * up + common.sum(-1, keepdim=True)) * self.gain) @ self.out
        return y if self.group is None else SumOverAxis.apply(y, self.group)


class Model(nn.Module):
    """Dense layers around two fused ones; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Fused(), Fused()])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


def shares(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first and the end of a rank's share, the larger ones first."""
    sizes = [total // ranks + (r < total % ranks) for r in range(ranks)]
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


class Columns:
    """Cuts each `Fused` over groups of `size` neighbouring ranks."""

    zones = None

    def __init__(self, size: int) -> None:
        self.size = size

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        groups = [list(range(first, first + self.size)) for first in range(0, ranks, self.size)]
        return {AXIS: NewAxis(groups, data=False)}

    def replicated_over(self, layer: str) -> str | None:
        return AXIS

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Cuts:
        axis, cuts = axes[AXIS], {}
        low, high = shares(FEATURES, axis.size, axis.rank)
        common = Piece(2 * FEATURES, 2 * FEATURES + COMMON, counted=axis.rank == 0)
        both = (Piece(low, high), Piece(FEATURES + low, FEATURES + high), common)
        for block in model.blocks:
            pieces = {"weight": (1, both), "bias": (0, both), "gain": (0, both[:1]), "out": (0, both[:1])}
            for name, (dimension, held) in pieces.items():
                whole = getattr(block, name)
                split = Split(AXIS, tuple(whole.shape), dimension, held)
                part = nn.Parameter(split.part_of(whole.detach()), requires_grad=whole.requires_grad)
                assert tuple(part.shape) == split.part_shape
                setattr(block, name, part)
                cuts[part] = split
            cuts[block.scale] = Partial(AXIS)
            block.features, block.group = high - low, axis.comm.mesh.gathers
        return cuts


@contextmanager
def cut_over(size: int | None) -> Iterator[None]:
    """Engines made inside are cut over so many ranks; `None` for none."""
    before = techniques.TECHNIQUES[:]
    techniques.TECHNIQUES[:] = [] if size is None else [lambda _: Columns(size)]
    try:
        yield
    finally:
        techniques.TECHNIQUES[:] = before


def engine_of(mesh: zs.Mesh, plan: Mapping[str, Any], size: int | None, seed: int = 0, meta: bool = False) -> zs.Engine:
    """An engine, cut over so many ranks; `None` for none."""
    torch.manual_seed(seed)
    with cut_over(size):
        with torch.device("meta" if meta else "cpu"):
            model = Model()
        return zs.Engine(model, lambda p: torch.optim.AdamW(p, lr=0.02), zs.Plan.from_dict(plan), mesh=mesh)


def rows(step: int, data_rank: int) -> Tensor:
    """A data rank's batch."""
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1000 * step + data_rank))


def plain(
    data_ranks: int, steps: int, clip: float = float("inf"), value: float | None = None, kind: float = 2.0
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and gradient norms of a plain loop over the batches of all data ranks."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for data_rank in range(data_ranks):
            (model(rows(step, data_rank)) / data_ranks).backward()
        if value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), value)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type=kind)))
        optimizer.step()
    return model.state_dict(), norms


def run(engine: zs.Engine, first: int, last: int) -> list[float]:
    """The gradient norms of some steps."""
    norms = []
    for step in range(first, last):
        if engine.plan.microbatches > 1:
            norms.append(engine.train_step(rows(step, engine.data_rank)).grad_norm)
        else:
            engine.backward(engine(rows(step, engine.data_rank)))
            norms.append(engine.step().grad_norm)
    return norms
