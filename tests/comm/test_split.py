"""Engines on some of the ranks, and several engines whose models train each other, against plain loops."""

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import PlainRun, follows_plain_loop
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import PlanError

ADAM = partial(torch.optim.Adam, lr=1e-2)
STEPS = 3


class Gan(nn.Module):
    """A generator and a discriminator as parts of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def build() -> Gan:
    torch.manual_seed(0)
    return Gan()


def data(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    noise, real = torch.randn(8, 4, generator=generator), torch.randn(8, 8, generator=generator)
    return noise.chunk(ranks)[rank], real.chunk(ranks)[rank]


def losses_of(generator: Any, discriminator: Any, noise: Tensor, real: Tensor) -> tuple[Tensor, Any]:
    """The discriminator's loss, and a function that makes the generator's."""
    fake = generator(noise)
    first = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
    return first, lambda: F.softplus(-discriminator(fake)).mean()


def plain() -> PlainRun:
    gan, seen = build(), PlainRun()
    optimizers = ADAM(gan.discriminator.parameters()), ADAM(gan.generator.parameters())
    for step in range(STEPS):
        first, second = losses_of(gan.generator, gan.discriminator, *data(step, 0, 1))
        for loss, optimizer in zip((lambda first=first: first, second), optimizers, strict=True):
            value = loss()
            value.backward()
            optimizer.step()
            gan.zero_grad()
        seen.losses.append(first.item() + value.item())
    seen.weights = gan.state_dict()
    return seen


def train(mesh: zs.Mesh, settings: dict[str, Any], alone: bool) -> Any:
    """The ranks 0 and 1 train; the third of three has an engine of its own, or none."""
    place = mesh.split([[0, 1], [2]]) if mesh.ranks == 3 else mesh
    if mesh.rank == 2:
        engine = zs.Engine(nn.Linear(2, 1), ADAM, zs.Plan(zero=2), mesh=place) if alone else None
        if engine is not None:
            engine.backward(engine(torch.ones(1, 2)).sum())
        return engine and engine.step().step
    gan, plan = build(), zs.Plan(**settings)
    discriminator = zs.Engine(gan.discriminator, ADAM, plan, mesh=place)
    generator = zs.Engine(gan.generator, ADAM, plan, mesh=place)
    losses = []
    for step in range(STEPS):
        first, second = losses_of(generator, discriminator, *data(step, place.rank, place.ranks))
        discriminator.backward(first)
        discriminator.step()
        value = second()
        generator.backward(value)
        generator.step()
        discriminator.zero_grad()
        losses.append(first.item() + value.item())
    states = {"discriminator": discriminator.state_dict(), "generator": generator.state_dict()}
    return losses, {f"{kind}.{name}": v for kind in ("generator", "discriminator") for name, v in states[kind].items()}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("settings", [{"zero": 0}, {"zero": 2}, {"zero": 3, "transport": "network"}], ids=str)
def test_two_models_train_each_other(pool: Pool, settings: dict[str, Any], ranks: int) -> None:
    answers = pool.run(train, ranks, settings, settings["zero"] == 2)
    follows_plain_loop(answers[:2], plain())
    assert answers[2:] in ([], [None], [1])


class Speaker(nn.Module):
    """A causal model of tokens [B, T] with an output [B, T, V], or one number for each token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 8), nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x: Tensor = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            x = x + block(x.cumsum(1) / (places + 1).unsqueeze(-1))
        return self.head(x)  # type: ignore[no-any-return]


def four_models() -> dict[str, nn.Module]:
    """A policy and its value, and a reference and a reward, which are frozen."""
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {
        "policy": Speaker(11),
        "value": Speaker(1),
        "reward": Speaker(1).requires_grad_(False),
    }
    reference = Speaker(11).requires_grad_(False)
    reference.load_state_dict(models["policy"].state_dict())
    return models | {"reference": reference}


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """Of tokens [B, 3:7]."""
    made: Tensor = model(tokens[:, :-1]).log_softmax(-1)[:, 2:]
    return made.gather(-1, tokens[:, 3:].unsqueeze(-1)).squeeze(-1)


def proximal_steps(models: dict[str, Any], step: int, rank: int, ranks: int, update: Any) -> list[float]:
    """One round of PPO (1707.06347) with a penalty for leaving the reference: generate, judge, and two updates each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (8, 3), generator=generator).chunk(ranks)[rank]
    noise = -torch.empty(8, 4, 11).exponential_(generator=generator).log().chunk(ranks)[rank]
    with torch.no_grad():
        for place in range(4):
            chosen = (models["policy"](tokens)[:, -1] + noise[:, place]).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
        old, known = log_probabilities(models["policy"], tokens), log_probabilities(models["reference"], tokens)
        rewards = models["reward"](tokens)[:, 3:, 0] - 0.1 * (old - known)
        returns = rewards.flip(1).cumsum(1).flip(1)
        advantages = returns - models["value"](tokens)[:, 2:-1, 0]
    losses = []
    for _ in range(2):
        ratio = (log_probabilities(models["policy"], tokens) - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        update("policy", loss)
        error = F.mse_loss(models["value"](tokens)[:, 2:-1, 0], returns)
        update("value", error)
        losses.append(loss.item() + error.item())
    return losses


def plain_proximal() -> PlainRun:
    models, seen = four_models(), PlainRun()
    optimizers = {name: ADAM(models[name].parameters()) for name in ("policy", "value")}

    def update(name: str, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[name].step()
        models[name].zero_grad()

    for step in range(STEPS):
        seen.losses += proximal_steps(models, step, 0, 1, update)
    seen.weights = {f"{kind}.{name}": v for kind, model in models.items() for name, v in model.state_dict().items()}
    return seen


def train_four(mesh: zs.Mesh, settings: dict[str, Any]) -> Any:
    place = mesh.split([[0, 1], [2]]) if mesh.ranks == 3 else mesh
    if mesh.rank == 2:
        return None
    plan = zs.Plan(**settings)
    engines = {name: zs.Engine(model, ADAM, plan, mesh=place) for name, model in four_models().items()}

    def update(name: str, loss: Tensor) -> None:
        engines[name].backward(loss)
        engines[name].step()
        engines[name].zero_grad()

    losses = []
    for step in range(STEPS):
        losses += proximal_steps(engines, step, place.rank, place.ranks, update)
    states = {kind: engine.state_dict() for kind, engine in engines.items()}
    return losses, {f"{kind}.{name}": v for kind, state in states.items() for name, v in state.items()}


@pytest.mark.parametrize(
    "settings",
    [{"zero": 0}, {"zero": 1}, {"zero": 2, "offload": "optimizer"}, {"zero": 3}, {"zero": 3, "transport": "network"}],
    ids=str,
)
def test_the_four_models_of_reinforcement_learning(pool: Pool, settings: dict[str, Any]) -> None:
    """On two ranks, of three in all under ZeRO 3 over the network."""
    answers = pool.run(train_four, 3 if "transport" in settings else 2, settings)
    follows_plain_loop(answers[:2], plain_proximal())
    assert answers[2:] in ([], [None])


def test_every_rank_is_in_one_part() -> None:
    mesh = zs.Mesh()
    assert mesh.split([[0]]).ranks == 1
    for parts in ([], [[0], [0]], [[1]], [[0, 1]]):
        with pytest.raises(PlanError, match="must be in one part"):
            mesh.split(parts)
