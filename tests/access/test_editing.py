"""Writes inside of `engine.gathered()` that an exception ends, on all ranks."""

import time
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zeroshard as zs

PLANS: list[dict[str, Any]] = [{"zero": 2}, {"zero": 2, "offload": "optimizer"}, {"zero": 3, "transport": "network"}]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def halve(engine: zs.Engine, seconds: float) -> None:
    """Halve all weights, and raise later."""
    with engine.gathered(), torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)
        time.sleep(seconds)
        raise ZeroDivisionError


def interrupted(mesh: zs.Mesh) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """The weights after the exception, which comes late on the last rank, and after a step that began before it."""
    found = []
    for settings in PLANS:
        engine = zs.Engine(net(), partial(torch.optim.AdamW, lr=0.1), zs.Plan(**settings), mesh=mesh)
        x = torch.linspace(-1, 1, 8).view(2, 4)
        for step in range(2):
            engine.backward(engine(x).square().mean())
            if step == 1:
                with pytest.raises(ZeroDivisionError):
                    halve(engine, 0.1 * mesh.rank)
                written = engine.state_dict()
            engine.step()
        found.append((written, engine.state_dict()))
    return found


def test_writes_before_an_exception_are_there_for_all_ranks(pool: Pool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    for step in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            written = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
    for found in pool.run(interrupted, 2):
        for at_once, later in found:
            torch.testing.assert_close(at_once, written)
            torch.testing.assert_close(later, model.state_dict())
