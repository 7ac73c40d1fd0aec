"""Gradients limited by hand: under a loss scale, several times in a step, and not at all."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs


class Steep(nn.Module):
    """Its gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize(
    "limit, largest, moved",
    [
        (2.0, 8.0, [2.0, 0.5, -2.0]),
        (100.0, 8.0, [8.0, 0.5, -8.0]),  # 100 times the scale is more than fp16 can say
        (100.0, 80.0, None),  # and so is 80: an overflow, which the clipping does not hide
        (2.0, 80.0, None),  # nor where fp16 can say the limit
    ],
)
def test_values_are_clipped_below_the_loss_scale(limit: float, largest: float, moved: list[float] | None) -> None:
    plan = zs.Plan(precision="fp16", loss_scale=1024.0)
    engine = zs.Engine(Steep(), partial(torch.optim.SGD, lr=1.0), plan)
    engine.backward(engine(torch.tensor([largest, 0.5, -largest])))
    engine.clip_grad_value(limit)
    result = engine.step()
    assert result.skipped == (moved is None)
    assert (-engine.state_dict()["weight"]).tolist() == (moved or [0.0, 0.0, 0.0])


def stepped(plan: zs.Plan, *calls: tuple[str, float, float]) -> list[float]:
    """What a gradient of (3, 4, -1) became after these calls and a step."""
    engine = zs.Engine(Steep(), partial(torch.optim.SGD, lr=1.0), plan)
    engine.backward(engine(torch.tensor([3.0, 4.0, -1.0])))
    for name, limit, kind in calls:
        if name == "zero_grad":
            engine.optimizer.zero_grad()
            engine.backward(engine(torch.tensor([3.0, 4.0, -1.0])))
        elif name == "value":
            engine.clip_grad_value(limit)
        else:
            engine.clip_grad_norm(limit, kind)
    engine.step()
    values: list[float] = (-engine.state_dict()["weight"]).tolist()
    return values


@pytest.mark.parametrize(
    "calls",
    [
        (("norm", 0.5, 2.0), ("norm", 1.0, 2.0)),
        (("norm", 2.0, float("inf")), ("norm", 2.5, 2.0)),
        (("norm", 2.0, 2.0), ("value", 1.0, 0.0)),
        (("value", 2.0, 0.0), ("norm", 1.0, 1.0), ("value", 0.3, 0.0), ("norm", 0.2, 2.0)),
    ],
)
def test_clippings_of_one_step_follow_each_other_as_in_torch(calls: tuple[tuple[str, float, float], ...]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, 4.0, -1.0])
    for name, limit, kind in calls:
        if name == "value":
            nn.utils.clip_grad_value_([weight], limit)
        else:
            nn.utils.clip_grad_norm_([weight], limit, kind)
    assert stepped(zs.Plan(), *calls) == pytest.approx(weight.grad.tolist(), rel=1e-5)


def test_norms_of_complex_gradients() -> None:
    """Of any kind, and of gradients that are not finite."""

    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).real.sum()

    engine = zs.Engine(Phases(), partial(torch.optim.SGD, lr=1.0), zs.Plan(nonfinite="skip"))
    x = torch.tensor([3 + 4j, 1j])
    engine.backward(engine(x))
    norms = [engine.clip_grad_norm(float("inf"), kind) for kind in (1.0, 2.0, float("inf"))]
    assert norms == pytest.approx([6.0, 26**0.5, 5.0])
    assert not engine.step().skipped
    engine.backward(engine(x * float("inf")))
    assert engine.step().skipped


def test_a_clipping_ends_with_its_gradients() -> None:
    plan = zs.Plan(clip_norm=1.0)
    once = stepped(plan)
    assert torch.tensor(once).norm() == pytest.approx(1.0, rel=1e-5)
    assert stepped(plan, ("norm", 0.1, 2.0), ("zero_grad", 0.0, 0.0)) == once
    assert stepped(plan, ("norm", float("inf"), 2.0)) == once  # which measures only


def test_gradients_after_a_clipping_are_refused() -> None:
    engine = zs.Engine(Steep(), partial(torch.optim.SGD, lr=1.0), zs.Plan())
    x = torch.ones(3)
    engine.backward(engine(x))
    engine.clip_grad_norm(float("inf"))
    engine.backward(engine(x))
    assert engine.clip_grad_norm(1.0) == pytest.approx(12**0.5)
    engine.backward(engine(x))
    with pytest.raises(zs.PlanError, match="1 of 3 backwards of this step came after"):
        engine.step()
    for limit in (-1.0, float("nan")):
        with pytest.raises(zs.PlanError, match="max_norm"):
            engine.clip_grad_norm(limit)
