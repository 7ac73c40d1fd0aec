"""C_B of ZeRO-R (1910.02054, section 6.2): the largest temporary buffer is the same at any depth."""

from functools import partial
from typing import Any

import pytest
import torch
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse

DEPTHS = (8, 32, 128)


class Chain(nn.Module):
    """A number of alike layers, and a loss that the model returns."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def rehearsed(monkeypatch: pytest.MonkeyPatch, plan: zs.Plan, layers: int) -> tuple[int, int]:
    """Bytes of the largest single buffer that a rank of two takes on the device, and of all of them at the peak."""
    taken: list[int] = []
    take = Ledger.take

    def noted(
        ledger: Ledger, category: Category, nbytes: int, label: str, padding: int = 0, tier: str = "device"
    ) -> None:
        if category is Category.BUFFERS and tier == "device":
            taken.append(nbytes)
        take(ledger, category, nbytes, label, padding, tier)

    task = TrainingTask(
        partial(Chain, layers), lambda rows: (torch.ones(rows, 8),), partial(torch.optim.SGD, lr=0.1), 2
    )
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "take", noted)
        found = rehearse(task, plan, 0, 2, 1)
    return max(taken, default=0), found.memory["buffers"]


PLANS: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2},
    {"zero": 3, "precision": "bf16"},
    {"zero": 2, "offload": "optimizer"},
]


@pytest.mark.parametrize("plan", by_default(PLANS, PLANS[1], PLANS[2]), ids=str)
def test_the_largest_buffer_is_the_same_at_any_depth(monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]) -> None:
    made = zs.Plan.from_dict({"transport": "network", "units": ["Linear"], **plan})
    found = [rehearsed(monkeypatch, made, layers) for layers in DEPTHS]
    largest, everything = zip(*found, strict=True)
    assert largest[0] > 0 and set(largest) == {largest[0]}
    assert everything[1] == everything[2], everything
