"""Models as people write them, and a plain torch loop to compare with. No class here knows of zeroshard.

An entry of `ZOO` says how to build the model, the batch of a step (tensors [B, ...], the same on every rank), and the
loss of what the model returned. `alone` trains it in one process, `train` on one rank of an engine.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import zeroshard as zs

STEPS = 4
WIDTH = 10  # few rank counts divide what is made of it
# A wide epsilon: where a gradient is nothing but rounding, Adam would blow it up to a whole step.
LEARNING_RATE = 1e-2
OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=1e-3, weight_decay=0.1)


def loss_of(output: Any, batch: Any) -> Tensor:
    """The loss that the model returned."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Attributes:
        build: makes the model; random numbers are seeded before.
        batch: the keywords of the model's forward in a step, from a generator that is seeded for the step.
        loss: of (what the model returned, the batch).
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], Tensor] = loss_of


def numbers(rows: int = 8, columns: int = WIDTH) -> Callable[[torch.Generator], dict[str, Any]]:
    """Batches of normal numbers `x` [rows, columns]."""
    return lambda generator: {"x": torch.randn(rows, columns, generator=generator)}


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """Three blocks between two layers."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


# Records in, records out


@dataclass
class Record:
    """What goes from block to block; torch's trees take it for one leaf."""

    hidden: Tensor
    notes: dict[str, Any]


class Opaque:
    """An object that holds things in slots."""

    __slots__ = ("belief", "inner")

    def __init__(self, inner: Any, belief: torch.distributions.Normal) -> None:
        self.inner, self.belief = inner, belief


class Pair(NamedTuple):
    """A named tuple."""

    value: Tensor
    name: str


class RecordBlock(nn.Module):
    """A record in, a record out, with tensors at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, record: Record) -> Record:
        gates = [*record.notes["gates"], Pair(torch.sigmoid(self.gate(record.hidden)), "gate")]
        return Record(self.block(record.hidden) * gates[-1].value, {"gates": gates})


class Records(nn.Module):
    """A dict of tensors in, an opaque object with a distribution out; the loss is made outside of the model."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([RecordBlock() for _ in range(3)])
        self.again = again

    def forward(self, inputs: dict[str, Tensor]) -> Opaque:
        record = Record(inputs["x"] * inputs["scale"], {"gates": []})
        for block in self.blocks:
            record = checkpoint(block, record, use_reentrant=False) if self.again else block(record)
        neighbours = torch.diag(torch.ones(WIDTH - 1), 1).to_sparse()  # which autograd saves
        mean = torch.sparse.mm(neighbours, record.hidden.T).T
        return Opaque([record], torch.distributions.Normal(mean, record.notes["gates"][-1].value))


def record_batch(generator: torch.Generator) -> dict[str, Any]:
    """A dict in the keyword `inputs`."""
    return {"inputs": {"x": torch.randn(8, WIDTH, generator=generator), "scale": torch.rand(8, 1, generator=generator)}}


def record_loss(output: Opaque, batch: dict[str, Any]) -> Tensor:
    """How unlikely the input is, and the size of what the record holds."""
    surprise = -output.belief.log_prob(batch["inputs"]["x"]).mean()
    return surprise + output.inner[0].hidden.square().mean() + output.inner[0].notes["gates"][0].value.mean()


# Parameters that are handed around


class Prompt(nn.Module):
    """Hands out its parameter: itself, or a view of it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(1, WIDTH))
        self.whole = whole

    def forward(self, rows: int) -> Tensor:
        return self.vector if self.whole else self.vector.expand(rows, -1)


class Prompted(nn.Module):
    """Prompt tuning: blocks get prompts that other modules hand out; a parameter and a view of one leave the model."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Prompt(whole) for whole in (True, False, False)])
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.centre = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Any]:
        for prompt, block in zip(self.prompts, self.blocks, strict=True):
            x = block(x + prompt(len(x)))
        return {"hidden": x, "centre": self.centre, "part": (self.centre[:3], None)}


def prompted_loss(output: dict[str, Any], batch: dict[str, Any]) -> Tensor:
    """A centre loss, of parameters that the model returned."""
    return (output["hidden"] - output["centre"]).square().mean() + output["part"][0].square().sum()


# Weights that are shared, skipped, recomputed, normed


class Recurrent(nn.Module):
    """A cell used five times in one forward, a block reused over depth, an LSTM, normed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)])
        shared = Block()
        self.depth = nn.ModuleList([shared, Block(), shared, shared])
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bounded = parametrizations.spectral_norm(nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        a = b = torch.zeros_like(x)
        for _ in range(5):
            a = self.cells[0](x, a)
            b = self.cells[1](a, b)
        seen = []
        for block in self.depth:
            b = block(b)
            seen.append(b)
        return self.bounded(self.normed(self.lstm(torch.stack(seen, 1))[0])).square().mean()


class Choosy(nn.Module):
    """The data decide which blocks are used, in a fixed order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block() for name in "abcd"})
        self.leave = nn.Linear(WIDTH, 1)

    def route(self, x: Tensor) -> str:
        """The names of the blocks to use, one after the other."""
        return "a" + "b" * bool(x[0, 0] > 0) + "c" * bool(x[0, 1] > 0) + "d" * bool(x[0, 2] > 0)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.route(x):
            x = self.blocks[name](x)
        return self.leave(x).square().mean()


class Fickle(Choosy):
    """They also decide in which order, and how often."""

    def route(self, x: Tensor) -> str:
        return "".join("abcd"[int(4 * row[0].abs()) % 4] for row in x[:3])


class Thrifty(Chain):
    """Blocks, a part of a block, and the whole stack are recomputed in the backward, in one of torch's two ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks[:2]:
            x = self.again(block, x)
        x = self.again(lambda x: self.again(self.blocks[2], self.blocks[0](x)), x)
        return self.leave(x).square().mean()


# Low-rank adapters


class Adapted(nn.Module):
    """LoRA (Hu et al., 2106.09685): a frozen layer and a trainable product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 3)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return y


def adapted() -> nn.Module:
    """A frozen chain; the layers of its blocks have adapters."""
    model = Chain().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


# Compiled blocks


def compiled(kind: str) -> nn.Module:
    """Blocks compiled in place, wrapped by `torch.compile`, or the whole model wrapped."""
    model: nn.Module = Chain()
    if kind == "inside":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    elif kind == "wrapped":
        wrap = partial(torch.compile, backend="aot_eager", fullgraph=True)
        model.blocks = nn.ModuleList([wrap(block) for block in model.blocks])
    else:
        model = torch.compile(model, backend="aot_eager")
    return model


# Convolutions


class Residual(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


class Convolutions(nn.Module):
    """A small residual network for images [B, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Residual(6), Residual(6))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 4)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.pool(self.layers(self.stem(images)))
        return F.cross_entropy(self.head(x.flatten(1)), classes)


def image_batch(generator: torch.Generator) -> dict[str, Any]:
    """Images [8, 3, 8, 8] and classes [8]."""
    classes = torch.randint(4, (8,), generator=generator)
    return {"images": torch.randn(8, 3, 8, 8, generator=generator), "classes": classes}


ZOO: dict[str, Case] = {
    "chain": Case(Chain, numbers()),
    "records": Case(Records, record_batch, record_loss),
    "records-recomputed": Case(partial(Records, again=True), record_batch, record_loss),
    "prompted": Case(Prompted, numbers(), prompted_loss),
    "recurrent": Case(Recurrent, numbers()),
    "choosy": Case(Choosy, numbers()),
    "fickle": Case(Fickle, numbers()),
    "thrifty": Case(partial(Thrifty, False), numbers()),
    "thrifty-reentrant": Case(partial(Thrifty, True), numbers()),
    "adapted": Case(adapted, numbers()),
    **{f"compiled-{kind}": Case(partial(compiled, kind), numbers()) for kind in ("inside", "wrapped", "whole")},
    "convolutions": Case(Convolutions, image_batch),
}


def build(case: Case, seed: int = 0) -> nn.Module:
    """The model with the same weights every time."""
    torch.manual_seed(seed)
    return case.build()


def batch(case: Case, step: int, rank: int, ranks: int) -> dict[str, Any]:
    """Rank `rank`'s part of the batch of a step."""
    whole = case.batch(torch.Generator().manual_seed(100 + step))
    part: dict[str, Any] = tree_map_only(Tensor, lambda value: value.chunk(ranks)[rank], whole)
    return part


def values_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the state dict."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in module.state_dict().items()}


def alone(
    case: Case, parts: int = 1, before_step: Callable[[nn.Module, int], None] = lambda model, step: None
) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses, and final weights per part, of a plain loop in one process.

    With one part, on the whole batch. With several, each has a copy of the model and its own rows; gradients are
    averaged (None counts as zero unless it is None in all parts), as N data-parallel ranks would do.
    """
    models = [build(case)]
    models += [deepcopy(models[0]) for _ in range(parts - 1)]
    optimizers = [OPTIMIZER([p for p in model.parameters() if p.requires_grad]) for model in models]
    losses = []
    for step in range(STEPS):
        total = 0.0
        for part, model in enumerate(models):
            before_step(model, step)
            model.zero_grad()
            rows = batch(case, step, part, parts)
            loss = case.loss(model(**rows), rows)
            loss.backward()
            total += loss.item() / parts
        losses.append(total)
        for same in zip(*(model.parameters() for model in models), strict=True):
            found = [p.grad for p in same if p.grad is not None]
            mean = sum(found) / parts if found else None
            for p in same:
                p.grad = None if mean is None else mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return losses, [values_of(model) for model in models]


def engine_for(mesh: zs.Mesh, case: Case, **plan: Any) -> zs.Engine:
    """An engine over the model; other ranks than 0 start from other weights, so rank 0's must win."""
    model = build(case, seed=mesh.rank)
    return zs.Engine(
        model, lambda ps: OPTIMIZER([p for p in ps if p.requires_grad]), zs.Plan.from_dict(plan), mesh=mesh
    )


def train(mesh: zs.Mesh, case: Case, **plan: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of this rank and the final weights."""
    engine = engine_for(mesh, case, **plan)
    losses = []
    for step in range(STEPS):
        rows = batch(case, step, mesh.rank, mesh.ranks)
        loss = case.loss(engine(**rows), rows)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


def check(
    answers: list[tuple[list[float], dict[str, Any]]], losses: list[float], weights: list[dict[str, Any]]
) -> None:
    """The ranks' mean losses and each rank's weights are those of the plain loop, to 1e-5."""
    mean = torch.tensor([mine for mine, _ in answers], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=0)
    for rank, (_, found) in enumerate(answers):
        expected = weights[rank % len(weights)]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            where = f"rank {rank}, {name}"
            assert found[name].dtype == value.dtype, where
            size = max(float(value.abs().max()), LEARNING_RATE) if value.is_floating_point() else 0.0
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-5 * size, msg=lambda text, where=where: f"{where}: {text}"
            )
