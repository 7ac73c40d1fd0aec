"""Jobs to verify: a small language model under plans that reach every part of the engine."""

from functools import partial
from typing import Any

import torch
from engine import models
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.verification.job import VerificationJob

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
ROWS = 16


def data(step: int) -> tuple[Tensor, int]:
    """Tokens [16, 6] of a step, and its number."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(13, (ROWS, 6), generator=generator), step


class Words(models.Five):
    """Returns the logits; the loss is made outside."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.body(self.embed(tokens[:, :-1]), step)
        logits: Tensor = self.head(x)
        return logits


def summed(logits: Tensor, batch: tuple[Tensor, int]) -> tuple[Tensor, int]:
    """Sum and count over the tokens that are no padding, which is token 0."""
    labels = batch[0][:, 1:].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=0, reduction="sum")
    return loss, int((labels != 0).sum())


def padded(step: int) -> tuple[Tensor, int]:
    """Rows of unlike lengths: the first have few tokens."""
    tokens, number = data(step)
    for row in range(ROWS):
        tokens[row, 2 + row % 4 + (row >= ROWS // 2) :] = 0
    tokens[:2, 1:] = 0
    return tokens, number


class Padded(models.Five):
    """Returns the mean over tokens that are no padding."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = self.body(self.embed(tokens[:, :-1]), step)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def build(name: str) -> nn.Module:
    """A model of `engine.models`, or one of these; random numbers were seeded before."""
    kinds: dict[str, Any] = {**models.MODELS, **models.LONGER, "Words": Words, "Padded": Padded}
    made: nn.Module = kinds[name]()
    return made


def job(name: str, ranks: int, **plan: Any) -> VerificationJob:
    """Three steps of a model under a plan."""
    return VerificationJob(partial(build, name), zs.Plan.from_dict(plan), data, ADAMW, None, ranks)
