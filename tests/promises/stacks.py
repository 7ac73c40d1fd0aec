"""Stacks of equal blocks, to see what grows with their number."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layers(nn.Module):
    """A block behind a norm, with biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers; returns the loss."""

    def __init__(self, blocks: int, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList([Layers(width, inner) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def numel_of_block(width: int = 32, inner: int = 64) -> int:
    """Parameters of a block."""
    return sum(parameter.numel() for parameter in Layers(width, inner).parameters())


def rows(count: int, width: int = 32) -> Tensor:
    """Some rows of features."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))
