"""Models whose forwards change a state of theirs, or weigh rows in ways of their own."""

import torch
from engine import models
from torch import Tensor, nn
from torch.nn import functional as F
from verification.jobs import summed

CALLS = [0]


def token_losses(model: models.Five, tokens: Tensor, step: int) -> Tensor:
    """[rows, tokens - 1]."""
    logits = model.head(model.body(model.embed(tokens[:, :-1]), step))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


class Counts(models.Five):
    """Its loss grows with the number of its calls, which an attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = {"calls": 0}

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        self.counted["calls"] += 1
        return super().forward(tokens, step) * (1 + 0.1 * self.counted["calls"])


class CountsInTensor(models.Five):
    """Likewise, in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        self.calls += 1
        return super().forward(tokens, step) * (1 + 0.1 * self.calls)


class CountsInBuffer(models.Five):
    """Likewise, in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        self.calls += 1
        return super().forward(tokens, step) * (1 + 0.1 * self.calls)


class CountsOutside(models.Five):
    """Likewise, in a global variable."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        CALLS[0] += 1
        return super().forward(tokens, step) * (1 + 0.1 * CALLS[0])


class Averages(models.Five):
    """A factor on its loss follows the moving average of its losses."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        loss = super().forward(tokens, step)
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss * (1 + self.average)


class Normalized(models.Five):
    """Subtracts a part of the mean over rows."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.body(self.embed(tokens[:, :-1]), step)
        x = x - 0.5 * x.mean(0, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Weighted(models.Five):
    """Rows have weights of their own, which the batch gives."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        weights = tokens[:, 0].float() + 0.1
        return (token_losses(self, tokens, step).mean(1) * weights).sum() / weights.sum()


class Masked(models.Five):
    """Tokens above 8 do not count."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        mask = (tokens[:, 1:] <= 8).float()
        return (token_losses(self, tokens, step) * mask).sum() / mask.sum().clamp(min=1)


class Added(models.Five):
    """Returns the sum over rows."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return super().forward(tokens, step) * len(tokens)


class Bare(nn.Module):
    """Parameters of the model itself, and a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(x @ self.weight)
        return result


def mean_of_rows(logits: Tensor, batch: tuple[Tensor, int]) -> tuple[Tensor, int]:
    """A mean over tokens with the count of rows, which it is no sum over."""
    loss, count = summed(logits, batch)
    return loss / count, len(batch[0])


def squares(output: Tensor, x: Tensor) -> Tensor:
    """The mean of squares."""
    return output.square().mean()
