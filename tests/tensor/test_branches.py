"""Data ranks that take other branches, or have no rows, where each splits its layers over several ranks."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

WIDTH, STEPS = 6, 4


class Branch(nn.Module):
    """A layer whose features can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D]."""
        return x + self.down(torch.tanh(self.up(x)))


class Branches(nn.Module):
    """Leaves its second branch out where the batch says so; returns the loss, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D]."""
        for number, block in enumerate(self.blocks):
            if number != 1 or x.sum() > 0:
                x = block(x)
        return x.square().sum()


def data(step: int, data_rank: int) -> Tensor:
    """From step 2 on one of the two has no rows."""
    sign = 1 if (step + data_rank) % 2 else -1
    rows = 3 if step < 2 or data_rank != step % 2 else 0
    return sign * torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + data_rank))


def build() -> Branches:
    torch.manual_seed(0)
    return Branches()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def follow(mesh: zs.Mesh, zero: int, transport: str) -> dict[str, Tensor]:
    """The weights of one rank."""
    engine = zs.Engine(build(), optimizer, zs.Plan(tensor_parallel=2, zero=zero, transport=transport), mesh=mesh)
    for step in range(STEPS):
        engine.backward(engine(data(step, engine.data_rank)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("zero, transport", [(0, "shared"), (3, "network")])
def test_they_train_like_one_process(pool: Pool, zero: int, transport: str) -> None:
    model = build()
    updates = optimizer(model.parameters())
    for step in range(STEPS):
        updates.zero_grad()
        for data_rank in range(2):
            (model(data(step, data_rank)) / 2).backward()
        updates.step()
    for mine in pool.run(follow, 4, zero, transport):
        torch.testing.assert_close(mine, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
