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


def test_every_rank_is_in_one_part() -> None:
    mesh = zs.Mesh()
    assert mesh.split([[0]]).ranks == 1
    for parts in ([], [[0], [0]], [[1]], [[0, 1]]):
        with pytest.raises(PlanError, match="must be in one part"):
            mesh.split(parts)
