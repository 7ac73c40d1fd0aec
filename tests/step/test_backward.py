"""Backwards of forwards that were made before an update of the weights."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.errors import PlanError

PLANS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 2, "offload": "optimizer"},
    {"zero": 3, "transport": "network"},
    {"zero": 3, "offload": "optimizer,parameters"},
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def late(mesh: zs.Mesh) -> list[dict[str, torch.Tensor]]:
    """The weights after steps between which a backward came too late, and one came in a step that was skipped."""
    found = []
    for settings in PLANS:
        plan = zs.Plan.from_dict({"nonfinite": "skip", **settings})
        engine = zs.Engine(net(), partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh)
        x = torch.linspace(-1, 1, 8).view(2, 4)
        old = engine(x).square().mean()
        engine.backward(engine(x).mean())
        engine.step()
        with pytest.raises(PlanError, match=r"made 1 update\(s\) of the weights ago"):
            engine.backward(old)
        kept = engine(x).square().mean()
        engine.backward(engine(x).mean() * float("nan"))
        assert engine.step().skipped
        engine.backward(kept)  # of the weights that there are
        engine.step()
        found.append(engine.state_dict())
    return found


def test_a_backward_after_the_update_is_refused(pool: Pool) -> None:
    """As by torch where a saved weight was changed in place; its gradients would be those of neither weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    old = model(x).square().mean()
    for power in (1, 2):
        optimizer.zero_grad()
        model(x).pow(power).mean().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    for found in pool.run(late, 2):
        for weights in found:
            torch.testing.assert_close(weights, model.state_dict())
