"""Gradients limited by hand under a loss scale."""

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
