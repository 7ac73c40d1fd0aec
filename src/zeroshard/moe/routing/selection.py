"""Selection: the experts of each token. Capacity: how many choices an expert takes, and which of them have a place."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.record import TokenGroups
from zeroshard.planning.settings import check_choice, check_flag, check_number, check_whole


def largest(scores: Tensor, k: int) -> Tensor:
    """[T, k], int64: the columns of the k largest scores [T, E] of each row, largest first, of equal ones the lowest.

    `torch.topk` leaves the order of equal scores open; argmax does not.
    """
    rest, columns = scores.detach(), []
    for choice in range(k):
        columns.append(rest.argmax(-1, keepdim=True))
        if choice + 1 < k:
            rest = rest.clone() if choice == 0 else rest
            rest.scatter_(-1, columns[-1], -math.inf)
    return torch.cat(columns, -1)


@dataclass(frozen=True)
class GroupLimited:
    """Experts of the best groups only: DeepSeek-V3's node-limited routing (2412.19437, section 2.1.2).

    A group's score is the sum of its two largest scores, and experts of `kept` groups can be chosen.

    Raises:
        PlanError: a value out of range.
    """

    groups: int
    """Groups of neighbouring experts, all of one size."""
    kept: int
    """Groups of which a token may choose experts."""

    def __post_init__(self) -> None:
        check_whole("GroupLimited.groups", self.groups)
        check_whole("GroupLimited.kept", self.kept)
        if self.kept > self.groups:
            raise PlanError(f"GroupLimited keeps {self.kept} of {self.groups} groups; keep at most {self.groups}.")

    def check(self, experts: int, choices: int) -> None:
        """Refuse experts that do not fill the groups, and more choices than the kept groups have.

        Raises:
            PlanError: naming the numbers.
        """
        size = experts // self.groups
        if experts % self.groups or size < 2:
            raise PlanError(
                f"GroupLimited has {self.groups} groups for {experts} experts; each group needs the same number of "
                f"experts, two or more. Change groups, or choose among all experts with selection=None."
            )
        if choices > self.kept * size:
            raise PlanError(
                f"{choices} experts of a token cannot come from {self.kept} groups of {size}; "
                f"keep at least {-(-choices // size)} groups, or choose fewer experts."
            )

    def allowed(self, scores: Tensor) -> Tensor:
        """The scores [T, E], with -inf for experts of other groups."""
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.gather(-1, largest(grouped, 2)).sum(-1)  # [T, groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, largest(best, self.kept), True)
        return torch.where(kept.unsqueeze(-1), grouped, -math.inf).flatten(-2)


@dataclass(frozen=True)
class ExpertChoice:
    """Experts choose tokens: each takes the T·k/E tokens of a group with its largest scores (2202.09368).

    Balanced without a loss, but a token's experts depend on later tokens of its group, which causal models must not
    see. k is the mean number of experts of a token; some have more, some none.

    Raises:
        PlanError: a value out of range.
    """

    causal: bool = True
    """Whether the model may be causal: then a warning says that routing leaks later tokens."""
    factor: float = 1.0
    """Tokens of an expert over T·k/E, in training and evaluation."""

    def __post_init__(self) -> None:
        check_flag("ExpertChoice.causal", self.causal)
        check_number("ExpertChoice.factor", self.factor)

    def choose(self, scores: Tensor, choices: int, groups: TokenGroups) -> tuple[Tensor, Tensor]:
        """The experts of each token by falling score, and which are chosen: both [T, k], k that of the token with most.

        Of equal scores the earlier token's wins.
        """
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        allowed = scores.detach()
        if groups.valid is not None:
            allowed = torch.where(groups.valid.unsqueeze(-1), allowed, -math.inf)
        start = 0
        for size in groups.sizes:
            taken = min(size, math.ceil(size * choices * self.factor / scores.shape[-1]))
            rows = slice(start, start + size)
            best = torch.sort(allowed[rows], dim=0, descending=True, stable=True).indices[:taken]
            chosen[rows].scatter_(0, best, True)
            start += size
        if groups.valid is not None:
            chosen &= groups.valid.unsqueeze(-1)
        most = max(1, int(chosen.sum(-1).max())) if len(chosen) else 1
        experts = largest(torch.where(chosen, scores.detach(), -1.0), most)
        return experts, chosen.gather(-1, experts)


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
