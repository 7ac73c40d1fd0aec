"""Experts are gathered and reduced together, whatever the routing: no rank waits for one that an expert left out."""

from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.moe.experts.experts import ExpertModules
from zeroshard.moe.routing.record import Routing
from zeroshard.units import find_units


class Alone(nn.Module):
    """A mixture without blocks around it; rank r of the data has one expert, r."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = ExpertModules(lambda: nn.Linear(4, 4), 4)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """[T, 4] and [T]."""
        chosen = expert.unsqueeze(-1)
        counts = torch.zeros(4, dtype=torch.int64)
        return self.experts(self.first(x), Routing(chosen, torch.ones(len(x), 1), None, counts)).square().mean()


def test_experts_are_no_units() -> None:
    assert [unit.name for unit in find_units(Alone())] == [""]
    with pytest.raises(zs.PlanError, match=r"The unit 'experts\.networks\.0' is inside of 'experts'"):
        find_units(Alone(), ["experts.networks.0"])


def data(data_rank: int) -> tuple[Tensor, Tensor]:
    """A data rank's tokens, and their expert."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(data_rank)), torch.full((3,), data_rank % 2)


def train(mesh: zs.Mesh, plan: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights."""
    torch.manual_seed(0)
    of = zs.Plan.from_dict(plan)
    engine = zs.Engine(Alone(), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), of, mesh=mesh)
    norms = [engine.train_step(data(engine.data_rank)).grad_norm for _ in range(3)]
    return norms, engine.state_dict()


@pytest.mark.parametrize("experts", by_default([1, 2, 4], 2))
def test_ranks_with_other_experts_do_not_wait(pool: Pool, experts: int) -> None:
    """Experts without tokens on a rank, and two that no rank has tokens for, which decay all the same."""
    torch.manual_seed(0)
    model = Alone()
    updates, norms = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), []
    for _ in range(3):
        updates.zero_grad()
        for data_rank in range(4):
            (model(*data(data_rank)) / 4).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        updates.step()
    plan = {"zero": 3, "transport": "network", "expert_parallel": experts}
    for found, weights in pool.run(train, 4, plan):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)
