"""Hooks around the step that go by elements work on slices; those that mix them are refused before any update."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.errors import OptimizerError

Optimizer = torch.optim.Optimizer


def gradients(optimizer: Optimizer) -> list[Any]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def clip_all(optimizer: Optimizer, *_: Any) -> None:
    """Above a threshold that no gradient here reaches."""
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e6)


def log_norms(optimizer: Optimizer, *_: Any) -> None:
    print([float(g.norm()) for g in gradients(optimizer)])


def halve(optimizer: Optimizer, *_: Any) -> None:
    for g in gradients(optimizer):
        g.mul_(0.5).clamp_(-0.1, 0.1)


def decay(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.mul_(0.9)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def step(engine: zs.Engine, number: int) -> None:
    engine.backward(engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean())
    engine.step()


@pytest.mark.parametrize(
    "hook, offload", [(clip_all, ""), (log_norms, ""), (clip_all, "optimizer"), (halve, "optimizer")]
)
def test_what_mixes_or_comes_late_is_refused(hook: Callable[..., None], offload: str) -> None:
    """The host's own Adam has used the gradients before hooks are called."""
    engine = zs.Engine(model(), torch.optim.AdamW, zs.Plan(zero=2, offload=offload), mesh=zs.Mesh())
    engine.optimizer.register_step_pre_hook(hook)
    with pytest.raises(OptimizerError, match=r"A hook around the step of AdamW.*engine\.clip_grad_norm"):
        step(engine, 0)


@pytest.mark.parametrize("offload", ["", "optimizer"])
def test_what_goes_by_elements_works(offload: str) -> None:
    layers, plain = model(), model()
    make = partial(torch.optim.SGD, lr=0.1)
    engine = zs.Engine(layers, make, zs.Plan(zero=2, offload=offload), mesh=zs.Mesh())  # type: ignore[arg-type]
    optimizer, calls = make(plain.parameters()), []
    for each in (engine.optimizer, optimizer):
        each.register_step_pre_hook(halve)
        each.register_step_post_hook(decay)
    engine.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for number in range(5):
        step(engine, number)
        optimizer.zero_grad()
        plain(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
    assert len(calls) >= 5
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[key], value)
