"""Modules that are called outside of the model's forward, against a plain loop: alike over every transport."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import PlanError

STEPS = 3
OPTIMIZER = partial(torch.optim.Adam, lr=1e-2)


class Block(nn.Module):
    """A residual block of width 10."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 17), nn.Linear(17, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def batch(step: int, rank: int, ranks: int) -> Tensor:
    """A rank's part of the tokens [8, 6] of a step."""
    return torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


class Tower(nn.Module):
    """Blocks around a parameter of its own, with a method besides its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.full((10,), 0.1))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x + self.position)

    def first(self, x: Tensor) -> Tensor:
        """The features after one block."""
        return self.norm(self.blocks[0](x))

    def read(self, x: Tensor) -> Tensor:
        """A method that reads a parameter itself."""
        return self.blocks[1](x * self.position)


class Parted(nn.Module):
    """An embedding, a tower, an output layer that is tied to the embedding, and a value head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.tower = Tower()
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.value = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """The features of each token."""
        return self.tower(self.embed(tokens))


def build() -> Parted:
    torch.manual_seed(0)
    return Parted()


def chunked(model: Any, call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The output layer is called on chunks of rows, outside of the forward."""
    features, targets = call(tokens[:, :-1]), tokens[:, 1:]
    total = features.new_zeros(())
    for rows, wanted in zip(features.chunk(2), targets.chunk(2), strict=True):
        total = total + F.cross_entropy(model.head(rows).flatten(0, 1), wanted.flatten(), reduction="sum")
    return total / targets.numel()


def recomputed(model: Any, call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The same, and the logits of each chunk are computed again."""
    features, targets = call(tokens[:, :-1]), tokens[:, 1:]

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model.head(rows).flatten(0, 1), wanted.flatten(), reduction="sum")

    chunks = zip(features.chunk(2), targets.chunk(2), strict=True)
    parts = [checkpoint(part, *each, use_reentrant=False) for each in chunks]
    return sum(parts[1:], parts[0]) / targets.numel()


def valued(model: Any, call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """A value head on the features, and on those of a forward whose values nothing uses."""
    with torch.no_grad():
        before = model.value(call(tokens))
    return (model.value(call(tokens)) - 0.5 * before).square().mean()


def by_parts(model: Any, call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The whole model is never called: modules with and without units, a container, and a block with gradients."""
    x = model.embed(tokens)
    last = model.tower.blocks[2]
    features = model.tower(x) + model.tower.first(x) + last.down(torch.tanh(last.up(x)))
    return model.value[2](model.value[:2](features)).square().mean()


def by_methods(model: Any, call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """A method that reads a parameter, twice."""
    x = model.tower.read(model.embed(tokens))
    return (model.tower.read(x) + x).square().mean()


def twice(model: Any, call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """One block alone, many times."""
    x = model.embed(tokens)
    for _ in range(3):
        x = model.tower.blocks[1](x)
    return x.square().mean()


LOSSES = {each.__name__: each for each in (chunked, recomputed, valued, by_parts, by_methods, twice)}
PLANS: dict[str, dict[str, Any]] = {
    "network": {"zero": 3, "transport": "network"},
    "shared": {"zero": 3},
    "recomputed": {"zero": 3, "transport": "network", "recompute": "blocks"},
    "offloaded": {"zero": 3, "offload": "optimizer, parameters"},
}


def plain(name: str) -> PlainRun:
    steps = [[batch(step, 0, 1)] for step in range(STEPS)]
    return plain_loop(build(), OPTIMIZER, steps, lambda model, part: LOSSES[name](model, model, part))


def freed(model: nn.Module) -> bool:
    """Whether no parameter can be read."""
    for parameter in model.parameters():
        with pytest.raises(PlanError, match="zero=3"):
            parameter.sum()
    return True


def train(mesh: zs.Mesh, settings: dict[str, Any]) -> dict[str, Any]:
    answers = {}
    for name, loss_of in LOSSES.items():
        model = build()
        engine = zs.Engine(model, OPTIMIZER, zs.Plan(**settings), mesh=mesh)
        engine.register_forward_method(model.tower, "read")
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, engine, batch(step, mesh.rank, mesh.ranks))
            if settings.get("transport") == "network":
                assert freed(model), name
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        answers[name] = losses, engine.state_dict()
    return answers


@pytest.mark.parametrize("plan", PLANS)
def test_modules_called_alone_train_as_in_a_plain_loop(pool: Pool, plan: str) -> None:
    answers = pool.run(train, 2, PLANS[plan])
    for name in LOSSES:
        follows_plain_loop([mine[name] for mine in answers], plain(name))


def generate(mesh: zs.Mesh) -> list[Any]:
    """Lone calls of unlike numbers and modules on two ranks, one that fails, and a step after them."""
    model = build()
    engine = zs.Engine(model, OPTIMIZER, zs.Plan(zero=3, transport="network"), mesh=mesh)
    tokens, found = batch(0, 0, 1), []
    with torch.no_grad():
        for _ in range(2 + 3 * mesh.rank):
            x = model.embed(tokens)
            found.append(model.tower(x).sum().item())
    if mesh.rank:
        with pytest.raises(RuntimeError, match="shapes"):
            model.value(torch.ones(2, 3))
        found.append(model.tower.blocks[0](torch.ones(1, 10)).sum().item())
    engine.backward(engine(batch(0, mesh.rank, mesh.ranks)).square().mean())
    return [found, engine.step().grad_norm, freed(model)]


def test_ranks_may_make_unlike_lone_calls(pool: Pool) -> None:
    model = build()
    features = model.tower(model.embed(batch(0, 0, 1))).sum().item()
    block = model.tower.blocks[0](torch.ones(1, 10)).sum().item()
    model(batch(0, 0, 1)).square().mean().backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    for rank, (found, its_norm, free) in enumerate(pool.run(generate, 2)):
        assert found[: 2 + 3 * rank] == pytest.approx([features] * (2 + 3 * rank), rel=1e-5)
        assert found[2 + 3 * rank :] == pytest.approx([block] * rank, rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-5) and free


class Prompt(nn.Module):
    """A module that returns its parameter, and one that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.arange(10.0))
        self.drop = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5))

    def forward(self) -> Tensor:
        """The prompt itself."""
        return self.prompt


class Prompted(nn.Module):
    """A model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Prompt(), Prompt()])
        self.out = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number per row."""
        return self.out(x + self.prompts[0]() * self.prompts[1]())


UNTRAINED = {"prompts.0.drop.0.weight", "prompts.0.drop.0.bias"}  # which the loss does not reach


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"rng": "exact"}])
def test_strict_plans_of_one_rank_call_modules_alone(settings: dict[str, Any]) -> None:
    model = Prompted()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    plan = zs.Plan(zero=3, strict=True, microbatches=2, **settings)
    engine = zs.Engine(model, OPTIMIZER, plan, loss=lambda out, x: model.out(model.prompts[1].drop(out * x)).mean())
    prompt = model.prompts[0]()
    assert freed(model) and torch.equal(prompt.float(), torch.arange(10.0))
    losses = [engine.train_step(torch.ones(4, 10, dtype=torch.bfloat16 if settings.get("precision") else None)).loss]
    assert losses[0] is not None and freed(model)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, kept[name].to(value.dtype)) == (name in UNTRAINED), name


def test_registered_methods_of_copies_are_plain_and_mistakes_are_named() -> None:
    model = build()
    engine = zs.Engine(model, OPTIMIZER, zs.Plan(zero=3, strict=True))
    x = torch.ones(1, 10)
    with pytest.raises(PlanError, match="register_forward_method"):
        model.tower.read(x)
    engine.register_forward_method(model.tower, "read")
    with engine.gathered():
        copied = copy.deepcopy(model)
    torch.testing.assert_close(model.tower.read(x), copied.tower.read(x))  # other alignments, other last bits
    assert freed(model)
    with torch.no_grad():
        copied.tower.position.add_(1)
    assert not torch.equal(model.tower.read(x), copied.tower.read(x))
    with pytest.raises(PlanError, match="'reed'"):
        engine.register_forward_method(model.tower, "reed")
    with pytest.raises(PlanError, match="of elsewhere"):
        engine.register_forward_method(copied.tower, "read")
