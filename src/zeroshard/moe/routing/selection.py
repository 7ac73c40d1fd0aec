"""Which experts a token goes to: its largest scores, those of its best groups, or the tokens that experts choose."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.token_groups import TokenGroups
from zeroshard.parts.settings import check_flag, check_number, check_whole


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
