"""Noise of routers, in training only: each token explores experts near its best ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.moe.routing.selection import largest
from zeroshard.parts.settings import check_choice

KINDS = ("learned", "normal", "uniform", "jitter", "gumbel")


@dataclass(frozen=True)
class Noise:
    """What is drawn in training: one number for each token and expert, or for each feature.

    Raises:
        PlanError: a value out of range.
    """

    kind: str
    """"learned": N(0, 1) times softplus(x·Wnoise) on logits (1701.06538, eq. 4). "normal": N(0, size²) on logits.
    "uniform": U[1 - size, 1 + size] added to logits (figure 15 of Switch). "jitter": U[1 - size, 1 + size] times the
    router's input (section 2.4 of Switch); experts get the input without it. "gumbel": the second expert is drawn from
    the probabilities of those that are not first."""
    size: float = 0.0
    """The width of the noise; for "learned" the least standard deviation; unused by "gumbel"."""

    def __post_init__(self) -> None:
        check_choice("noise.kind", self.kind, KINDS)

    def on_input(self, x: Tensor) -> Tensor:
        """The router's input [T, width], a copy where it is changed."""
        return x * self._factors(x) if self.kind == "jitter" else x

    def on_logits(self, logits: Tensor, scale: Tensor | None) -> Tensor:
        """The logits [T, E] with noise, of standard deviations `scale` [T, E] where those are learned."""
        if scale is not None:
            return logits + _unset(logits).normal_().view_as(logits) * scale
        if self.kind == "normal":
            return logits + _unset(logits).normal_().view_as(logits) * self.size
        return logits + self._factors(logits) if self.kind == "uniform" else logits

    def sampled_second(self, logits: Tensor) -> Tensor:
        """[T, 2]: the largest logit's expert, and one drawn from the softmax of the others' logits."""
        first = largest(logits, 1)
        gumbel = -_unset(logits).exponential_().view_as(logits).log()
        others = (logits.detach() + gumbel).scatter(-1, first, -torch.inf)
        return torch.cat((first, largest(others, 1)), -1)

    def _factors(self, like: Tensor) -> Tensor:
        return _unset(like).uniform_(1 - self.size, 1 + self.size).view_as(like)


def _unset(like: Tensor) -> Tensor:
    """Unset values in one dimension, token after token.

    Exact random numbers find the rows of a batch in it, where they could take the experts of [T, E] for rows.
    """
    return torch.empty(like.numel(), dtype=like.dtype, device=like.device)
