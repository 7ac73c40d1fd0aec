"""A small regression that other packages' trainers train, and the plain loop that says what should come out."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Losses = list[list[float]]


class Regression(nn.Module):
    """Blocks and a head, with the same weights every time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self(x).float(), y.float())


def batches() -> tuple[Tensor, Tensor]:
    """Rows [64, 4] and what the model should say of them [64, 1]."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def plain(
    steps: int,
    accumulate: int = 1,
    clip: float | None = 1.0,
    schedule: bool = True,
    ranks: int = 2,
    by_value: float | None = None,
) -> tuple[Losses, dict[str, Tensor]]:
    """Losses of each rank and the last weights of a loop by hand in which rank r takes rows r, r + ranks, ..."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    x, y = batches()
    losses: Losses = [[] for _ in range(ranks)]
    for number in range(steps * accumulate):
        here = [loss_of(model, x[rank::ranks], y[rank::ranks], number) for rank in range(ranks)]
        (sum(here) / ranks / accumulate).backward()
        for mine, loss in zip(losses, here, strict=True):
            mine.append(loss.item())
        if (number + 1) % accumulate == 0:
            if by_value is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), by_value)
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                scheduler.step()
    return losses, model.state_dict()


def loss_of(model: Regression, x: Tensor, y: Tensor, number: int, rows: int = 4) -> Tensor:
    """The loss of batch `number`, counted round and round."""
    start = number * rows % len(x)
    return model.loss(x[start : start + rows], y[start : start + rows])


def assert_follows(
    found: Sequence[float], weights: dict[str, Tensor], wanted: tuple[Losses, dict[str, Tensor]]
) -> None:
    """Rank 0's losses and the whole weights are those of the plain loop."""
    assert len(found) == len(wanted[0][0])
    torch.testing.assert_close(list(found), wanted[0][0], rtol=1e-5, atol=1e-6)
    assert set(weights) == set(wanted[1])
    for name, value in wanted[1].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
