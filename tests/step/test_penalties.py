"""Penalties that modules add to the loss: their weight is that of the microbatch in the mean of the step."""

import pytest
import torch

from zeroshard.step.losses import Loss, StepLosses
from zeroshard.step.penalties import penalised, weighing


class Penalised(torch.nn.Module):
    """w * x, with the penalty w ** 2."""

    adds_penalty = True

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return penalised(self.w * x, self.w**2)


def test_gradient_has_penalty_once_at_the_weight_of_the_backward() -> None:
    model, x = Penalised(), torch.tensor([1.0, 2.0])
    model(x).sum().backward()
    assert model.w.grad == 3.0 + 2 * 3.0  # a plain backward: weight 1
    model.w.grad = None
    with weighing(0.25):
        model(x).sum().backward()
    assert model.w.grad == 3.0 + 0.25 * 6.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_adds_the_penalty_once(reentrant: bool) -> None:
    model, x = Penalised(), torch.tensor([1.0, 2.0], requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert model.w.grad == 3.0 + 6.0


def test_weights_of_means_and_sums() -> None:
    losses, one = StepLosses(), torch.tensor(1.0)
    assert losses.weight(Loss(one).weighted(0.5), 8.0) == 4.0
    assert losses.weight(Loss(one, 512.0).weighted(0.5), 8.0) == 8.0 * 512 / losses.divisor
