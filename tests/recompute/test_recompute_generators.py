"""Recomputed blocks that draw from Python's and numpy's generators, or their own, meet the numbers of their forward."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from recompute.test_recompute import POLICIES, SGD, WIDTH, Stack, batch
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import PlanError


class Draws(nn.Module):
    """Draws from a generator of one kind, from the step `begins` on."""

    kind, begins = "python", 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.python, self.numpy = random.Random(3), np.random.default_rng(4)
        self.old, self.torch = np.random.RandomState(5), torch.Generator().manual_seed(6)
        self.register_buffer("calls", torch.zeros(()))

    def draw(self) -> float:
        return {
            "python": lambda: random.gauss(0.0, 1.0),
            "numpy": lambda: float(np.random.randn()),  # keeps a second number for the next call
            "an attribute: python": lambda: self.python.random(),
            "an attribute: numpy": lambda: float(self.numpy.random()),
            "an attribute: numpy's old": lambda: float(self.old.rand()),
            "an attribute: torch": lambda: float(torch.rand((), generator=self.torch)),
        }[self.kind]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = self.draw() if self.calls > self.begins else 1.0
        return x + torch.tanh(self.linear(x) * factor) * factor


class DrawsBetween(Stack):
    """Leaves blocks out by Python's random numbers; the blocks draw none."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x) if random.random() < 0.7 else x
        return self.leave(x).square().mean()


def train(model: nn.Module, plan: dict[str, Any], steps: int = 3) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    engine = zs.Engine(model, SGD, zs.Plan.from_dict(plan))
    for step in range(steps):
        engine.backward(engine(batch(step, 0)))
        engine.step()
    return engine.state_dict(), (random.random(), np.random.rand(), torch.rand(()).item(), engine.recomputed > 0)


def take_step(engine: zs.Engine, step: int) -> None:
    """With random numbers that go by the step alone."""
    random.seed(step)
    engine.backward(engine(batch(step, 0)))
    engine.step()


def stack(kind: str, begins: int = 0) -> Stack:
    torch.manual_seed(0)
    model = Stack(4, Draws)
    for block in model.blocks:
        block.kind, block.begins = kind, begins
    return model


def same(found: dict[str, Tensor], kept: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, kept[name]) for name, value in found.items())


KINDS = ["python", "numpy", "an attribute: python", "an attribute: numpy", "an attribute: numpy's old",
         "an attribute: torch"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_draws_what_its_forward_drew(kind: str) -> None:
    kept, after = train(stack(kind), {"recompute": "off"})
    for policy in POLICIES:
        found, draws = train(stack(kind), {"recompute": policy})
        assert same(found, kept) and draws == (*after[:3], True), policy
    found, draws = train(stack(kind), {"recompute": "auto", "device_memory": 75_000})
    assert same(found, kept) and draws == (*after[:3], True)


def test_blocks_that_begin_to_draw_later_are_refused_once_and_then_replayed(tmp_path: Path) -> None:
    kept, found = (zs.Engine(stack("python", begins=1), SGD, zs.Plan(recompute=way)) for way in ("off", "blocks"))
    take_step(kept, 0), take_step(found, 0), take_step(kept, 1)
    with (
        pytest.warns(UserWarning, match="for the first time, and not in its first one"),
        pytest.raises(PlanError, match="its values are others"),
    ):
        take_step(found, 1)
    kept.save(tmp_path / "c", wait=True)
    found.load(tmp_path / "c")
    take_step(kept, 2), take_step(found, 2)
    assert same(found.state_dict(), kept.state_dict())
    torch.manual_seed(0)
    model = DrawsBetween(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, {"recompute": "blocks"}, 5)


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * random.random())


def staged(mesh: zs.Mesh, recompute: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Fickle() for _ in range(4)))
    stages = zs.Pipeline(2, balance="parameters")  # by time they could begin elsewhere, and draw other numbers
    plan = zs.Plan(pipeline_parallel=stages, microbatches=4, recompute=recompute)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    engine = zs.Engine(model, SGD, plan, mesh=mesh, example=x[:2], loss=lambda y, _: y.square().mean())
    random.seed(1 + mesh.rank)
    for _ in range(2):
        engine.train_step(x)
    return engine.state_dict()


@pytest.mark.parametrize("recompute", by_default(["blocks", "selective"], "blocks"))
def test_chunks_of_a_pipeline(pool: Pool, recompute: str) -> None:
    kept, found = pool.run(staged, 2, "off"), pool.run(staged, 2, recompute)
    assert all(map(same, found, kept))
