"""Losses that balance experts, invariant to the numbers of experts and choices, without padding.

`balance_loss` is 1 where the load is even and E where one expert has all tokens and all probability (k = 1). The
squared coefficients of variation of Shazeer et al. are 0 and E - 1 there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.record import TokenGroups
from zeroshard.moe.routing.selection import largest
from zeroshard.planning.settings import check_choice

Sum = Callable[[Tensor], Tensor]  # of counts [E] of one microbatch: those of more of the batch


@dataclass(frozen=True)
class Losses:
    """The weights of a router's losses; 0 for none.

    Raises:
        PlanError: a value out of range.
    """

    balance: float = 0.0
    """Of E·Σ f_e·m_e: fractions of choices times mean probabilities (GShard, section 2.2; Switch, eq. 4)."""
    counted: str = "all"
    """Whose fractions: of "all" choices, of the "first" alone, or of the k highest "scores", whatever biases and groups
    of experts choose (2412.19437, eq. 18)."""
    scope: str = "microbatch"
    """Over which tokens fractions are taken: of each "group", of the "microbatch", or of the "global" batch."""
    z: float = 0.0
    """Of the mean of logsumexp(logits)² (ST-MoE, eq. 5)."""
    importance: float = 0.0
    """Of the squared coefficient of variation of the sums of gates (1701.06538, eq. 7)."""
    load: float = 0.0
    """Of that of the smooth estimate of counts, which needs learned noise (1701.06538, eq. 11)."""

    def __post_init__(self) -> None:
        check_choice("losses.counted", self.counted, ("first", "all", "scores"))
        check_choice("losses.scope", self.scope, ("group", "microbatch", "global"))
        for name in ("balance", "z", "importance", "load"):
            weight = getattr(self, name)
            if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 <= weight < float("inf"):
                raise PlanError(f"losses.{name} is {weight!r}; it must be a weight of 0 or more, and finite.")


def balance_loss(probabilities: Tensor, experts: Tensor, groups: TokenGroups, summed: Sum | None = None) -> Tensor:
    """E·Σ f_e·m_e, as the mean over groups by their tokens: 1 where balanced, a scalar with the graph of m.

    Args:
        probabilities: [T, E], rows that sum to 1.
        experts: [T, c], the choices that f counts, before capacity.
        summed: takes the counts [E] of these tokens and returns those of a larger batch, for which f is taken then.
    """
    bins = probabilities.shape[-1]
    counts = groups.counts(experts, bins)
    if summed is not None:
        counts = summed(counts.sum(0)).unsqueeze(0)
    fractions = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    lengths = groups.lengths(probabilities)
    sums = groups.sums(probabilities)  # means times tokens: what each group weighs
    return bins * (fractions * sums).sum() / lengths.sum().clamp(min=1)


def z_loss(logits: Tensor, groups: TokenGroups) -> Tensor:
    """The mean over tokens of logsumexp(logits)², for logits [T, E]."""
    squares = logits.logsumexp(-1, keepdim=True).square()
    whole = groups.whole()
    return whole.sums(squares).sum() / whole.lengths(logits).sum().clamp(min=1)


def squared_variation(values: Tensor) -> Tensor:
    """The squared coefficient of variation of values [E]: population variance over squared mean, 0 for all zeros."""
    mean = values.mean()
    return (values - mean).square().mean() / (mean.square() + 1e-10)


def importance(gates: Tensor, experts: Tensor, bins: int, groups: TokenGroups) -> Tensor:
    """[E]: the sum over tokens of each expert's gates [T, k] (1701.06538, eq. 6)."""
    dense = gates.new_zeros(len(gates), bins).scatter(-1, experts, gates)
    return groups.whole().sums(dense).squeeze(0)


def chances(clean: Tensor, noisy: Tensor, scale: Tensor, choices: int) -> Tensor:
    """P(x, i): that expert i is among the k chosen if its own noise alone is drawn again (1701.06538, eq. 9).

    Args:
        clean: [..., E], logits without noise.
        noisy: [..., E], logits with noise, by which experts were chosen.
        scale: [..., E], the standard deviation of the noise.
        choices: k.
    """
    if choices == clean.shape[-1]:
        return torch.ones_like(clean)  # all are chosen, whatever the noise
    best = noisy.gather(-1, largest(noisy, choices + 1))
    inside, outside = best[..., choices : choices + 1], best[..., choices - 1 : choices]
    chosen = torch.zeros_like(noisy, dtype=torch.bool).scatter_(-1, largest(noisy, choices), True)
    chance: Tensor = torch.special.ndtr((clean - torch.where(chosen, inside, outside)) / scale)
    return chance


def mean_entropy(probabilities: Tensor, groups: TokenGroups) -> Tensor:
    """The mean over tokens of the entropy of probabilities [T, E], in nats; without a graph."""
    whole = groups.whole()
    each = torch.special.entr(probabilities.detach()).sum(-1, keepdim=True)
    return whole.sums(each).sum() / whole.lengths(each).sum().clamp(min=1)
