"""The settings of a router, which combine freely: noisy top-k gating (1701.06538), second choices, capacity, losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.balance import Losses
from zeroshard.moe.routing.selection import PRIORITIES, Capacity, ExpertChoice, GroupLimited, largest
from zeroshard.planning.settings import check_choice, check_number, check_whole

KINDS = ("learned", "normal", "uniform", "jitter", "gumbel")


@dataclass(frozen=True)
class Noise:
    """Random numbers in training: one for each token and expert, or for each feature.

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


@dataclass(frozen=True)
class SecondChoice:
    """When a second choice is used at all, by its gate g2: every choice is where there is no such setting.

    Raises:
        PlanError: a value out of range.
    """

    threshold: float = 0.5
    """g2 / threshold, the probability of its use; or the least g2, where not random."""
    random: bool = True
    """Whether a coin is tossed, in training only: g2 / threshold > U[0, 1) (GShard, Algorithm 1: 2·g2 > rnd)."""
    holds_place: bool = True
    """Whether a choice that is not used takes a place in its expert's capacity (so in Algorithm 1)."""

    def __post_init__(self) -> None:
        check_number("second.threshold", self.threshold)

    def used(self, gates: Tensor, training: bool) -> Tensor | None:
        """[T, 2], bool: which choices of gates [T, 2] are used; None for all."""
        if self.random and not training:
            return None
        ratio = gates.detach()[:, 1] / self.threshold
        second = ratio > (torch.rand(len(gates), dtype=gates.dtype, device=gates.device) if self.random else 1.0)
        return torch.stack((torch.ones_like(second), second), -1)


@dataclass(frozen=True)
class Gating:
    """The choice of experts for tokens, and the weights of the experts' outputs.

    Raises:
        PlanError: a value out of range, or settings that do not combine.
    """

    choices: int = 1
    """k, the experts of a token."""
    score: str = "softmax"
    """Scores from logits: their "softmax" over experts, or the "sigmoid" of each."""
    selection: GroupLimited | ExpertChoice | None = None
    """Who can be chosen; None for the k largest scores of all, of equal ones those of the lowest experts."""
    noise: Noise | None = None
    """Exploration in training."""
    second: SecondChoice | None = None
    """When second choices are used; None for always."""
    normalise: str = "none"
    """Gates divided by their sum over a token's choices: "none", "before" or "after" choices lose their places."""
    scale: float = 1.0
    """What gates are multiplied by in the end."""
    capacity: Capacity | None = None
    """The places of experts; None for no limit."""
    priority: str = "position"
    """Who finds a place first: "position", "probability", "gate" or "random"; see `serving_order`."""
    group: int | str | None = None
    """The tokens that share a capacity: so many neighbours, those of a "sequence", or None for all of a microbatch."""
    losses: Losses = Losses()
    """The weights of losses."""
    bias_step: float = 0.0
    """The step u of the loss-free balance of 2408.15664: experts are chosen by scores plus a bias; 0 for no bias."""
    init: str = "truncated"
    """Initial weights: "truncated" normal of standard deviation sqrt(init_scale / width), cut off at two of them
    (Switch, section 2.4); "normal" of standard deviation init_scale; "zero"."""
    init_scale: float = 0.1
    """See `init`."""
    dtype: torch.dtype | None = torch.float32
    """The least dtype of the product of tokens and weights; None for the model's. Scores are fp32 at least."""

    def __post_init__(self) -> None:
        check_whole("choices", self.choices)
        check_choice("score", self.score, ("softmax", "sigmoid"))
        check_choice("normalise", self.normalise, ("none", "before", "after"))
        check_choice("priority", self.priority, PRIORITIES)
        check_choice("init", self.init, ("truncated", "normal", "zero"))
        check_number("scale", self.scale)
        check_number("init_scale", self.init_scale)
        if self.group != "sequence" and self.group is not None:
            check_whole("group", self.group)
        if not isinstance(self.bias_step, (int, float)) or not 0 <= self.bias_step < float("inf"):
            raise PlanError(f"bias_step is {self.bias_step!r}; it must be a number of 0 or more, such as 1e-3.")
        for wrong, message in self._clashes():
            if wrong:
                raise PlanError(message)

    @property
    def learned_noise(self) -> bool:
        """Whether the noise has weights of its own."""
        return self.noise is not None and self.noise.kind == "learned"

    def _clashes(self) -> list[tuple[bool, str]]:
        kind = self.noise.kind if self.noise is not None else None
        chosen_by_experts = isinstance(self.selection, ExpertChoice)
        return [
            (
                self.choices == 1 and self.normalise != "none",
                f"One choice with normalise={self.normalise!r} makes every gate 1, and the router gets no gradient of "
                "the loss. Use normalise='none', or two choices.",
            ),
            (
                self.init == "zero" and kind not in ("learned", "normal"),
                "Zero weights make all logits equal, so all tokens choose the lowest experts. Add noise to the logits "
                "by noise=Noise('learned'), or use init='truncated'.",
            ),
            (
                self.losses.load > 0 and kind != "learned",
                f"losses.load is {self.losses.load}, and the noise is {kind!r}; the estimate of the load needs "
                "noise=Noise('learned'). Add it, or use losses.balance.",
            ),
            (
                self.choices != 2 and (self.second is not None or kind == "gumbel"),
                f"{'second' if self.second else 'Gumbel noise'} is about the second of two choices, and there are "
                f"{self.choices}. Use choices=2, or leave it out.",
            ),
            (
                chosen_by_experts and (self.capacity is not None or self.second is not None or self.bias_step > 0),
                "ExpertChoice gives each expert its number of tokens, so capacity, second and bias_step have no use. "
                "Leave them out; ExpertChoice(factor=) sets the number.",
            ),
            (
                chosen_by_experts and (self.losses.balance > 0 or self.losses.load > 0),
                "ExpertChoice is balanced by itself, so losses.balance and losses.load have no use. Leave them at 0.",
            ),
            (
                chosen_by_experts and (self.normalise != "none" or kind == "gumbel"),
                "ExpertChoice takes scores as gates, so normalise and Gumbel noise have no use. Leave them out.",
            ),
        ]
