"""recompute="auto" under a budget that is too small: refused before the first update, as if nothing had run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from inside import held_states
from pool import Pool
from recompute.auto.test_auto import least_of
from selection import by_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.errors import BudgetExceeded

ADAM = partial(torch.optim.AdamW, lr=0.01)
LEFT_ALONE = "blocks that recompute by themselves"  # beside the settings of a plan


class Block(nn.Module):
    """Draws random numbers, and writes into buffers."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Linear(48, 16)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.one(x)).tanh(), 0.1, self.training)
        return x + (checkpoint(self.two, hidden, use_reentrant=False) if self.recomputes else self.two(hidden))


class Chain(nn.Module):
    """Blocks in a row, some of which recompute a part by themselves, and a loss that the model returns."""

    def __init__(self, recompute: Sequence[int] = ()) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        for number in recompute:
            self.blocks[number].recomputes = True
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(x)).square().mean()


def data(step: int, rank: int) -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(mesh: zs.Mesh, plan: dict[str, Any]) -> zs.Engine:
    torch.manual_seed(0)
    settings = {name: value for name, value in plan.items() if name != LEFT_ALONE}
    trained = Chain(plan.get(LEFT_ALONE, ()))
    return zs.Engine(trained, ADAM, zs.Plan.from_dict(settings), mesh=mesh, example=data(0, 0))


def refused(mesh: zs.Mesh, plan: dict[str, Any]) -> tuple[str, list[str]]:
    """The error, and what is not bit for bit as it was before the step."""
    engine = engine_of(mesh, plan)
    torch.manual_seed(7 + mesh.rank)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    draws = torch.get_rng_state()
    with pytest.raises(BudgetExceeded) as raised:
        engine.train_step(data(0, engine.data_rank))
    changed = [] if torch.equal(draws, torch.get_rng_state()) else ["random numbers"]
    changed += [name for name, value in engine.state_dict().items() if not torch.equal(value, weights[name])]
    changed += ["states"] if any(held_states(engine).values()) else []
    changed += ["steps"] if engine.steps else []
    return str(raised.value), changed


def peaks(mesh: zs.Mesh, plan: dict[str, Any], steps: int = 3) -> tuple[list[int], int]:
    """The most bytes of each step, the first included; and of all but activations."""
    engine, found = engine_of(mesh, plan), []
    for step in range(steps):
        with engine.trace(memory=True) as trace:
            engine.train_step(data(step, engine.data_rank))
        found.append(max(sum(event.nbytes.values()) for event in trace.memory))
    rows = [row for row in engine.memory() if row.tier == "device" and row.category != "activations"]
    return found, sum(row.peak_bytes for row in rows)


def at_budgets(mesh: zs.Mesh, plan: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """Three feasible budgets, the least among them, with the most bytes of each step."""
    auto = {**plan, "recompute": "auto"}
    found = peaks(mesh, {**plan, "recompute": "off", "device_memory": "1GiB"})
    everyone = Comm(mesh).agree_on([max(found[0]), found[1]], "budgets")
    kept, rest = (max(each) for each in zip(*everyone, strict=True))
    message, changed = refused(mesh, {**auto, "device_memory": rest + 2000})
    assert not changed, changed
    least = least_of(message)
    assert least_of(refused(mesh, {**auto, "device_memory": least - 1})[0]) == least
    if len(plan.get(LEFT_ALONE, ())) == 6:  # nothing is computed again
        assert kept <= least < 1.01 * kept  # with the copies of one block's buffers
        kept = least
    else:
        assert least < kept
    budgets = [least, (least + kept) // 2, kept]
    return [(budget, peaks(mesh, {**auto, "device_memory": budget})[0]) for budget in budgets]


ALONE = [
    {"zero": 0},
    {"zero": 0, "precision": "fp16", "microbatches": 2, "fp32_modules": ["BatchNorm1d"]},
    {"zero": 1, "precision": "bf16", "fp32_modules": ["BatchNorm1d"]},
    {"zero": 0, LEFT_ALONE: range(6)},
    {"zero": 0, "microbatches": 2, LEFT_ALONE: (0, 1, 3, 5)},
    {"zero": 0, LEFT_ALONE: (4, 5)},
]


@pytest.mark.parametrize("plan", by_default(ALONE, *ALONE[:2], *ALONE[3:5]), ids=str)
def test_nothing_has_changed_and_the_least_is_enough(plan: dict[str, Any]) -> None:
    for budget, found in at_budgets(zs.Mesh(0, 1), plan):
        assert max(found) <= budget, (budget, found)


TOGETHER: list[dict[str, Any]] = [
    {"zero": 0, "precision": "bf16", "microbatches": 2, "fp32_modules": ["BatchNorm1d"]},
    {"zero": 2, "transport": "network"},
    {"zero": 1, "pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.split": ["blocks.3"]},
    {"pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.split": ["blocks.3"], LEFT_ALONE: (0, 3, 4, 5)},
]


@pytest.mark.parametrize("plan", by_default(TOGETHER, *TOGETHER[1:]), ids=str)
def test_all_ranks_refuse_alike(pool: Pool, plan: dict[str, Any]) -> None:
    for answers in pool.run(at_budgets, 2, plan):
        for budget, found in answers:
            assert max(found) <= budget, (budget, found)


class Normed(nn.Module):
    """Saves copies of its running statistics where it is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))


def test_the_least_has_room_for_statistics_that_a_recomputation_saves() -> None:
    def train(budget: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(Normed() for _ in range(5)))
        engine = zs.Engine(model, ADAM, zs.Plan(recompute="auto", device_memory=budget))
        for step in range(3):
            x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).square().mean())
            engine.step()
        return engine.steps

    with pytest.raises(BudgetExceeded) as raised:
        train(120_000)
    least = least_of(str(raised.value))
    assert train(least) == 3
    with pytest.raises(BudgetExceeded, match=rf"device_memory={least} or more"):
        train(least - 200)
