"""Gradients that the user takes away, in a model in which those that come last are of small parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.errors import PlanError


def take_one(model: nn.Module) -> None:
    """Of the first layer's bias alone."""
    next(p for p in model.parameters() if p.dim() == 1).grad = None


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "model.zero_grad": lambda model: model.zero_grad(),
    "to zeros": lambda model: model.zero_grad(set_to_none=False),
    "one parameter": take_one,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))


def inputs(number: int, rank: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 40, generator=generator).chunk(ranks)[rank]


def discarding(mesh: zs.Mesh, way: str, zero: int) -> dict[str, torch.Tensor]:
    """The weights after two steps, in each of which the gradients of one of three backwards are taken away."""
    model = net()
    plan = zs.Plan(zero=zero, transport="network")
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh)
    for step in range(2):
        for number in range(3):
            engine.backward(engine(inputs(3 * step + number, mesh.rank, mesh.ranks)).square().mean())
            if number == step:
                WAYS[way](model)
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_taken_away_between_backwards_is_gone(pool: Pool, way: str, ranks: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(3):
            model(inputs(3 * step + number, 0, 1)).square().mean().backward()
            if number == step:
                WAYS[way](model)
        optimizer.step()
    for zero in range(4):
        for weights in pool.run(discarding, ranks, way, zero):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(
                    weights[name], value, msg=lambda text, where=(zero, name): f"{where}: {text}"
                )


def test_nothing_is_left_for_a_step_after_all_was_taken_away() -> None:
    model = net()
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1))
    engine.backward(engine(inputs(0, 0, 1)).square().mean())
    model.zero_grad()
    with pytest.raises(PlanError, match="gradient"):
        engine.step()


class Broken(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("broken")


def interrupted(mesh: zs.Mesh, settings: dict[str, Any], breaks: bool) -> list[torch.Tensor]:
    """The weights after two steps; with `breaks` a backward before the second one's raises, and is discarded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4)))
    plan = zs.Plan(**settings, transport="network", units=("Sequential",))
    engine = zs.Engine(model, partial(torch.optim.Adam, lr=0.1), plan, mesh=mesh)
    for step in range(2):
        if step and breaks:
            hook = model[1].register_forward_hook(lambda module, args, output: Broken.apply(output))
            with pytest.raises(ArithmeticError):
                engine.backward(engine(inputs(7, mesh.rank, mesh.ranks)).square().mean())
            hook.remove()
            engine.zero_grad()
        engine.backward(engine(inputs(step, mesh.rank, mesh.ranks)).square().mean())
        engine.step()
    return list(engine.state_dict().values())


@pytest.mark.parametrize("settings", [{"zero": 0}, {"zero": 3}, {"zero": 2, "offload": "optimizer"}], ids=str)
def test_what_an_interrupted_backward_had_begun_to_reduce_is_gone(pool: Pool, settings: dict[str, Any]) -> None:
    """With offloaded states, updates too that began from it."""
    assert all(map(torch.equal, *(pool.run(interrupted, 2, settings, breaks)[0] for breaks in (False, True))))


def test_a_train_step_that_raised_leaves_no_gradients() -> None:
    weights = []
    for breaks in (False, True):
        model = net()
        engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), zs.Plan(microbatches=2), loss=lambda y, x: y.mean())
        if breaks:
            calls = iter((False, True))
            hook = model.register_forward_pre_hook(lambda module, args, calls=calls: 1 / 0 if next(calls) else None)
            with pytest.raises(ZeroDivisionError):
                engine.train_step((inputs(7, 0, 1),))
            hook.remove()
        engine.train_step((inputs(0, 0, 1),))
        weights.append(list(engine.state_dict().values()))
    assert all(map(torch.equal, *weights))


class Branches(nn.Module):
    """A branch for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.last = nn.ModuleList([net() for _ in range(2)]), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        output: torch.Tensor = self.last(self.branches[branch](x))
        return output


ALL = {
    **{way: WAYS[way] for way in ("model.zero_grad", "to zeros")},
    "optimizer to zeros": lambda engine: engine.optimizer.zero_grad(set_to_none=False),
}


def discarding_branches(mesh: zs.Mesh, ways: list[str], zero: int) -> list[dict[str, torch.Tensor]]:
    """The weights after a step in which all gradients were taken away of a backward that used each rank's branch."""
    found = []
    for way in ways:
        torch.manual_seed(0)
        plan = zs.Plan(zero=zero, transport="network")
        engine = zs.Engine(Branches(), partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh)
        engine.backward(engine(inputs(0, mesh.rank, 2), mesh.rank).square().mean())
        ALL[way](engine if way == "optimizer to zeros" else engine.model)
        engine.backward(engine(inputs(1, mesh.rank, 2), 1).square().mean())
        engine.step()
        found.append(engine.state_dict())
    return found


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_that_one_rank_alone_had_are_gone_on_all(pool: Pool, zero: int) -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs(1, 0, 1), 1).square().mean().backward()
    optimizer.step()
    for found in pool.run(discarding_branches, 2, list(ALL), zero):
        for way, weights in zip(ALL, found, strict=True):
            torch.testing.assert_close(weights, model.state_dict(), msg=lambda text, way=way: f"{way}: {text}")


def discarding_alone(mesh: zs.Mesh) -> str:
    """The error of a step before which rank 1 took away one gradient, and rank 0 none."""
    model = net()
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), zs.Plan(zero=2), mesh=mesh)
    engine.backward(engine(inputs(0, mesh.rank, mesh.ranks)).square().mean())
    if mesh.rank:
        model[1].weight.grad = None
    return error_of(engine.step)


def test_a_gradient_that_one_rank_takes_away_is_named_with_the_rank(pool: Pool) -> None:
    for error in pool.run(discarding_alone, 2):
        assert "(rank 0: none; rank 1: 1.weight): do so on every rank alike" in error
