"""A budget that one rank alone exceeds: `BudgetExceeded` on all ranks within seconds, when made and in a later step."""

import time
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool, impatient
from torch import nn

import zeroshard as zs
from zeroshard.comm.mesh import mesh_of
from zeroshard.errors import BudgetExceeded
from zeroshard.train.sizes import GPTConfig

UNEVEN = GPTConfig(vocabulary=400, context=8, width=16, heads=2, layers=2)  # the embedding, on stage 0, is the most


def make(mesh: zs.Mesh, memory: int | None, **settings: Any) -> zs.Engine:
    plan = zs.Plan.from_dict({"device_memory": memory, "timeout": 30.0, **settings})
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    return zs.Engine(Untied(), optimizer, plan, example=(torch.zeros(1, 8, dtype=torch.int64),) * 2, mesh=mesh)


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def caught(call: Any) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        call()
    except BudgetExceeded as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def over_budget(everyone: zs.Mesh, case: str) -> list[tuple[str, float]]:
    mesh = mesh_of([0, 1], everyone.device, 20.0)  # groups of its own: a rank leaves a collective that others began
    if everyone.rank > 1:
        return []
    with impatient():
        batch = (torch.zeros(2, 8, dtype=torch.int64),) * 2
        if case == "weights":
            return [caught(partial(make, mesh, 20_000, pipeline_parallel=2, microbatches=2))]
        if case == "states":
            return [caught(partial(make, mesh, 60_000, pipeline_parallel=2, microbatches=2))]
        settings = {"pipeline_parallel": 2, "microbatches": 2} if case == "step" else {"zero": 3}
        engine = make(mesh, None, **settings)
        if mesh.rank == 1:
            engine.ledger.budgets["device"] = engine.ledger.total("device")
        return [caught(partial(engine.train_step, batch))]


@pytest.mark.parametrize("case", ["weights", "states", "step", "step-of-slices"])
def test_a_rank_over_budget_ends_all_ranks_alike(pool: Pool, case: str) -> None:
    first, second = (answers[0] for answers in pool.run(over_budget, 4, case)[:2])
    found, (others, seconds) = (first[0], second) if case in ("weights", "states") else (second[0], first)
    assert "device" in found
    assert "Rank" not in found
    assert others.startswith(f"Rank {int(case.startswith('step'))} is over its budget: ")
    assert seconds < 15.0  # of the 20 that it would wait
