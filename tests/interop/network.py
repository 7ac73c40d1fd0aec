"""The model, optimizer and data of the runs whose checkpoints DeepSpeed 0.19.6 wrote beside this module."""

from pathlib import Path

import torch
from torch import Tensor, nn

REAL = Path(__file__).parent / "deepspeed-0.19.6"
STEPS = 3
TIED, SOURCE = "head.weight", "embed.weight"


class Network(nn.Module):
    """One frozen layer, one tied weight, one scalar, buffers of two dtypes and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.mid = nn.Linear(6, 6)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        self.calls += 1
        h = torch.tanh(self.mid(self.frozen(h))) + self.shift.to(h.dtype)
        return self.head(h * self.scale)


def network() -> Network:
    """The model with the weights that the runs began with."""
    torch.manual_seed(0)
    return Network()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The runs' optimizer, in two groups."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    rest = [p for p in trained if p.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def tokens(step: int, rank: int) -> Tensor:
    """The rows [4] of one rank in one step, which the model learns to repeat."""
    return torch.randint(11, (4,), generator=torch.Generator().manual_seed(step * 10 + rank))
