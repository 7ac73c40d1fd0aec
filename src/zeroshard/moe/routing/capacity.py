"""Capacity: how many choices an expert takes of each group of tokens, and which choices have a place in it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.token_groups import TokenGroups
from zeroshard.parts.settings import check_choice, check_whole

PRIORITIES = ("position", "probability", "gate", "random")
Formula = Callable[[int, int, int, Fraction], int]  # of tokens, experts, choices of a token, and the factor

# A fractional capacity C admits choices while fewer than C are there (Algorithm 1 of GShard): it is rounded up.
FORMULAS: dict[str, Formula] = {
    "up": lambda s, e, k, factor: math.ceil(k * s * factor / e),  # GShard, Switch (eq. 3), DeepSpeed, Megatron
    "down": lambda s, e, k, factor: math.floor(k * s * factor / e),  # megablocks; fairscale with factor 1
    "mesh": lambda s, e, k, factor: min(s, math.floor(s * factor / e)),  # Mesh TensorFlow, without k
    "lingvo": lambda s, e, k, factor: -(-math.floor(s * factor / e) // 4) * 4,
    "tutel": lambda s, e, k, factor: k * math.floor(factor * math.ceil(s / e)),
    "fastmoe": lambda s, e, k, factor: math.ceil(factor * s) * k // e,
    "constant": lambda s, e, k, factor: int(factor),  # Switch of Hugging Face
}


@dataclass(frozen=True)
class Capacity:
    """The places of an expert for each group of tokens, as a factor over their mean load.

    Raises:
        PlanError: a value out of range.
    """

    train: float = 1.0
    """The factor in training; inf for no limit."""
    evaluate: float = math.inf
    """The factor in evaluation. A limit in evaluation makes losses depend on the order of the data, so by default there
    is none."""
    formula: str = "up"
    """The rounding, a key of FORMULAS: "up" is k·S·factor/E rounded up, for S tokens in a group."""
    minimum: int = 0
    """The least capacity, 0 for none."""

    def __post_init__(self) -> None:
        check_choice("capacity.formula", self.formula, list(FORMULAS))
        check_whole("capacity.minimum", self.minimum, least=0)
        for name, factor in (("train", self.train), ("evaluate", self.evaluate)):
            if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not factor > 0:
                raise PlanError(
                    f"capacity.{name} is {factor!r}; it must be a factor above 0, such as 1.25, or math.inf."
                )

    def limit(self, tokens: int, experts: int, choices: int, training: bool) -> int | None:
        """The places of each expert for a group of so many tokens; None for no limit."""
        factor = self.train if training else self.evaluate
        if math.isinf(factor):
            return None
        exact = Fraction(str(factor))  # 1.1 as it is written, else ceil(10 * 1.1) would be 12
        return max(self.minimum, FORMULAS[self.formula](tokens, experts, choices, exact))


def with_place(experts: Tensor, limits: list[int], groups: TokenGroups, order: Tensor, takes: Tensor | None) -> Tensor:
    """Which choices find a place in their expert: [T, k], bool.

    Args:
        experts: [T, k].
        limits: places of each expert, for each group.
        order: [k·T], the sequence in which choices ask; choice c of token t has number c·T + t.
        takes: [T, k], choices that take a place if there is one; None for all.
    """
    flat = experts.t().reshape(-1)[order]
    tokens = order % max(1, groups.tokens)
    group = tokens // groups.size
    keys = flat * groups.count + group
    if takes is not None:
        keys = torch.where(takes.t().reshape(-1)[order], keys, -1)
    sequence = torch.argsort(keys, stable=True)
    queues = keys[sequence]
    position = torch.arange(len(queues), device=queues.device)
    first = torch.searchsorted(queues, queues)  # where the queue of each begins
    places = limits[0] if len(set(limits)) == 1 else torch.tensor(limits, device=queues.device)[group[sequence]]
    found = (position - first < places) & (queues >= 0)
    kept = torch.empty_like(found)
    kept[order[sequence]] = found
    return kept.view(experts.shape[1], experts.shape[0]).t()


def serving_order(priority: str, gates: Tensor, probabilities: Tensor) -> Tensor:
    """The sequence [k·T] in which choices ask for places; choice c of token t has number c·T + t.

    All first choices come before all second ones. Among those, earlier tokens come first ("position"), or tokens of
    larger first probability ("probability": batch-prioritized routing, 2106.05974), or tokens in a random order
    ("random", a draw; routers use it in training only). With "gate" each expert serves larger gates first, whichever
    choices of their tokens these are.
    """
    tokens, choices = gates.shape
    if priority == "gate":
        return torch.argsort(gates.detach().t().reshape(-1), descending=True, stable=True)
    sequence = torch.arange(tokens, device=gates.device)
    if priority == "probability":
        sequence = torch.argsort(probabilities.detach()[:, 0], descending=True, stable=True)
    elif priority == "random":
        sequence = torch.argsort(torch.rand(tokens, device=gates.device), stable=True)
    return (torch.arange(choices, device=gates.device).unsqueeze(-1) * tokens + sequence).reshape(-1)
