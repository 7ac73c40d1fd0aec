"""The end of a step: statistics of all data ranks, and biases that move by them, as in one process."""

from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.moe.layer import MoE
from zeroshard.moe.routing.balance import Losses
from zeroshard.moe.routing.gating import Gating
from zeroshard.moe.routing.router import Router
from zeroshard.step.context import Within

WIDTH, TOKENS, EXPERTS, STEPS = 6, 8, 5, 4
BIASED = Gating(choices=2, score="sigmoid", normalise="before", bias_step=0.1, init="normal", init_scale=0.5)
GLOBAL = Gating(choices=2, losses=Losses(balance=0.5, scope="global"), init="normal", init_scale=0.5)


class Block(nn.Module):
    """A dense layer and a mixture."""

    def __init__(self, gating: Gating) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.mixture = MoE(WIDTH, 8, EXPERTS, router=Router(WIDTH, EXPERTS, gating))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        return x + self.mixture(self.dense(x))


class Layers(nn.Module):
    """Two blocks; returns the loss."""

    def __init__(self, gating: Gating) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(gating) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build(gating: Gating) -> Layers:
    """A model of known weights."""
    torch.manual_seed(0)
    return Layers(gating)


def data(step: int, data_rank: int) -> Tensor:
    """A data rank's batch."""
    return torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + data_rank))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Of the scale of gradients."""
    return torch.optim.SGD(parameters, lr=0.1)


def alone(gating: Gating, data_ranks: int) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Weights and biases of a loop that has the batches of all data ranks at once, and the last loads."""
    model = build(gating)
    updates = optimizer(model.parameters())
    for step in range(STEPS):
        updates.zero_grad()
        with Within(penalty_weight=1.0):
            model(torch.cat([data(step, rank) for rank in range(data_ranks)])).backward()
        updates.step()
        loads = []
        for block in model.blocks:
            layer = block.mixture
            loads.append(layer.experts.statistics.load.tolist())
            layer.router.update_bias(layer.experts.statistics.load)
            layer.experts.statistics.clear()
    return dict(model.state_dict()), loads


def train(mesh: zs.Mesh, plan: dict[str, Any], gating: Gating) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights and biases, and the loads of the mixtures on this rank in the last step."""
    of = zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan})
    engine = zs.Engine(build(gating), optimizer, of, mesh=mesh, example=data(0, 0)[:2])
    for step in range(STEPS):
        engine.train_step(data(step, engine.data_rank))
    loads = [
        block.mixture.experts.statistics.last.get("load", torch.zeros(0)).tolist() for block in engine.model.blocks
    ]
    return engine.state_dict(), loads


@pytest.mark.parametrize(
    "ranks, plan, data_ranks",
    [
        (2, {"zero": 1, "microbatches": 2}, 2),
        (4, {"zero": 3, "expert_parallel": 4, "microbatches": 2}, 4),
        (4, {"pipeline_parallel": 2, "expert_parallel": 2, "microbatches": 2}, 2),
        (2, {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe", "microbatches": 2}, 1),
    ],
    ids=["data", "experts", "stages", "recomputed"],
)
def test_biases_move_by_the_load_of_all(pool: Pool, ranks: int, plan: dict[str, Any], data_ranks: int) -> None:
    wanted, loads = alone(BIASED, data_ranks)
    assert any(bool(value.abs().max() >= 0.2) for name, value in wanted.items() if name.endswith("bias"))
    for weights, found in pool.run(train, ranks, plan, BIASED):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert all(mine in ([], load) for mine, load in zip(found, loads, strict=True)) and any(found)


@pytest.mark.parametrize("experts", by_default([1, 2], 2))
def test_losses_over_the_global_batch(pool: Pool, experts: int) -> None:
    """The same as one process with all tokens at once, which a loss of each rank's own tokens is not."""
    wanted, _ = alone(GLOBAL, 2)
    for weights, _ in pool.run(train, 2, {"zero": 2, "expert_parallel": experts}, GLOBAL):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_a_router_of_two_mixtures_moves_once_by_the_load_of_both() -> None:
    model, literal = build(BIASED), build(BIASED)
    for each in (model, literal):
        each.blocks[1].mixture.router = each.blocks[0].mixture.router
    engine = zs.Engine(model, optimizer, zs.Plan())
    updates = optimizer(literal.parameters())
    for step in range(STEPS):
        engine.train_step(data(step, 0))
        updates.zero_grad()
        with Within(penalty_weight=1.0):
            literal(data(step, 0)).backward()
        updates.step()
        statistics = [block.mixture.experts.statistics for block in literal.blocks]
        literal.blocks[0].mixture.router.update_bias(statistics[0].load + statistics[1].load)
        for each in statistics:
            each.clear()
    found = engine.state_dict()
    for name, value in literal.state_dict().items():
        torch.testing.assert_close(found[name], value)
