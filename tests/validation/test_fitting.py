"""The way out of a device's budget that is too small, by the formulas."""

import re

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.errors import BudgetExceeded


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def engine(plan: zs.Plan) -> zs.Engine:
    return zs.Engine(model(), lambda ps: torch.optim.AdamW(ps, lr=1e-3), plan, mesh=zs.Mesh())


def one_step(plan: zs.Plan) -> None:
    made = engine(plan)
    made.backward(made(torch.ones(1, 64)).sum())
    made.step()


STATES = 16 * sum(p.numel() for p in model().parameters())  # fp32: weights, gradients and two moments


def test_the_options_fit_by_the_formulas() -> None:
    with pytest.raises(BudgetExceeded, match=r"With --zero 3 --offload optimizer,parameters it takes [\d,]+ by the"):
        one_step(zs.Plan(zero=2, units=("Linear",), device_memory=STATES // 6))
    with pytest.raises(BudgetExceeded, match="With --offload optimizer it takes"):
        one_step(zs.Plan(zero=2, device_memory=STATES // 2))
    one_step(zs.Plan(zero=2, offload="optimizer", device_memory=STATES // 2))


def test_the_smallest_budget_where_nothing_fits() -> None:
    with pytest.raises(BudgetExceeded, match=r"the smallest budget that can work with --zero 3") as refused:
        engine(zs.Plan(zero=2, units=("Linear",), device_memory=1000))
    smallest = re.search(r"device_memory=(\d+)", str(refused.value))
    assert smallest is not None
    plan = {"zero": 3, "offload": "optimizer,parameters", "units": ("Linear",)}
    engine(zs.Plan.from_dict({**plan, "device_memory": int(smallest[1])}))
    with pytest.raises(BudgetExceeded, match="No plan that differs in zero and offload"):
        engine(zs.Plan.from_dict({**plan, "device_memory": int(smallest[1]) - 1}))
