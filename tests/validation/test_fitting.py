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


def one_step(plan: zs.Plan, rows: int = 1) -> None:
    made = engine(plan)
    made.backward(made(torch.ones(rows, 64)).sum())
    made.step()


STATES = 16 * sum(p.numel() for p in model().parameters())  # fp32: weights, gradients and two moments


def written(refused: "pytest.ExceptionInfo[BudgetExceeded]") -> list[zs.Plan]:
    """The plans of a message, which ends with one."""
    message = str(refused.value)
    assert message.endswith(").")
    plans: list[zs.Plan] = [eval(call, {"zs": zs}) for call in re.findall(r"zs\.Plan\(.*?\)(?=\. |\.$)", message)]
    return plans


def test_the_plan_fits_by_the_formulas() -> None:
    with pytest.raises(BudgetExceeded, match=r"needs less: [\d,]+ by the formulas") as refused:
        one_step(zs.Plan(zero=2, units=("Linear",), device_memory=STATES // 6))
    leaner = {"zero": 3, "offload": "optimizer,parameters", "units": ("Linear",), "device_memory": STATES // 6}
    assert written(refused) == [zs.Plan.from_dict(leaner)]
    with pytest.raises(BudgetExceeded, match="the lightest plan") as refused:
        one_step(zs.Plan(zero=2, device_memory=STATES // 2))
    assert written(refused) == [zs.Plan(zero=2, offload="optimizer", device_memory=STATES // 2)]
    one_step(*written(refused))


class Block(nn.Module):
    """A residual block that saves more for the backward than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(torch.tanh(self.up(x))))


def blocks_step(plan: zs.Plan) -> None:
    """One step of 2,000 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    made = zs.Engine(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3), plan, mesh=zs.Mesh())
    made.backward(made(torch.ones(2000, 64)).sum())
    made.step()


def test_recomputation_where_the_states_fit() -> None:
    with pytest.raises(BudgetExceeded, match="recompute only as many activations as the budget asks for") as refused:
        blocks_step(zs.Plan(zero=2, device_memory="14MiB"))
    first, second = written(refused)
    assert first == zs.Plan(zero=2, device_memory="14MiB", activations="auto")
    assert second == zs.Plan(zero=2, device_memory="14MiB", offload="optimizer")
    blocks_step(first)


def test_the_smallest_budget_where_nothing_fits() -> None:
    with pytest.raises(BudgetExceeded, match=r"the smallest budget that can work") as refused:
        engine(zs.Plan(zero=2, units=("Linear",), device_memory=1000))
    (smallest,) = written(refused)
    assert (smallest.zero, smallest.offload) == (3, "optimizer,parameters") and smallest.device_budget is not None
    engine(smallest)
    with pytest.raises(BudgetExceeded, match="No plan that differs in zero and offload"):
        engine(smallest.with_settings({"device_memory": smallest.device_budget - 1}))
