"""The two-level router of Shazeer et al. (1701.06538, appendix B): a gate over groups, and one inside each group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import PlanError
from zeroshard.moe.routing.balance import Losses, chances, importance, mean_entropy, squared_variation
from zeroshard.moe.routing.gating import Gating, Noise
from zeroshard.moe.routing.record import Routing, TokenGroups
from zeroshard.moe.routing.router import Router
from zeroshard.moe.routing.selection import largest
from zeroshard.planning.settings import check_whole

PAPER = Losses(importance=0.1, load=0.1)


class HierarchicalRouter(Router):
    """A primary gate chooses groups of experts, a secondary gate of each chosen group experts; gates multiply.

    It is the flat mixture of a·b experts with the products as gates: expert j of group i has number i·b + j. Both
    levels have learned noise in training, and weights that start at zero.

    Attributes:
        groups: a.
        primary_weight: [a, width].
        primary_noise_weight: [a, width].
        weight: [E, width], of all secondary gates.
        noise_weight: [E, width].

    Raises:
        PlanError: groups that do not divide the experts, or fewer than two choices at a level.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        groups: int,
        choices: Sequence[int] = (2, 2),
        losses: Losses = PAPER,
        **options: Any,
    ) -> None:
        """See the class.

        Args:
            choices: groups of a token, and experts of each of those groups.
            losses: weights of importance and load, which are taken over all experts.
            options: device and dtype of the weights.
        """
        check_whole("groups", groups)
        size, rest = divmod(experts, groups)
        if rest:
            raise PlanError(f"{experts} experts do not divide into {groups} groups; take a divisor of {experts}.")
        if len(choices) != 2 or not 2 <= choices[0] <= groups or not 2 <= choices[1] <= size:
            raise PlanError(
                f"choices is {tuple(choices)}; two levels need two numbers, the first from 2 to {groups} (groups) and "
                f"the second from 2 to {size} (experts of a group). One choice has the gate 1 and no gradient."
            )
        if losses != Losses(importance=losses.importance, load=losses.load):
            raise PlanError(f"losses is {losses}; two levels have only importance and load. Leave the others at 0.")
        self.groups, self.levels = groups, (choices[0], choices[1])
        gating = Gating(
            choices=choices[0] * choices[1], normalise="before", noise=Noise("learned"), init="zero", losses=losses
        )
        super().__init__(width, experts, gating, **options)
        self.primary_weight = nn.Parameter(torch.zeros(groups, width, **options))
        self.primary_noise_weight = nn.Parameter(torch.zeros(groups, width, **options))

    def reset_parameters(self) -> None:
        """Set all weights to zero: no signal and some noise."""
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                parameter.zero_()

    def forward(self, x: Tensor, valid: Tensor | None = None, group: int | None = None) -> Routing:
        """The routing of tokens x [T, width]; see `Router.forward`."""
        tokens = self._groups(x, valid, group)
        assert self.noise_weight is not None
        primary = self._level(x, self.primary_weight, self.primary_noise_weight)
        secondary = [
            None if part is None else part.unflatten(-1, (self.groups, -1))
            for part in self._level(x, self.weight, self.noise_weight)
        ]
        assert primary[1] is not None and secondary[1] is not None
        outer, chosen = _gates(primary[1], self.levels[0])  # [T, k1]
        index = chosen.unsqueeze(-1).expand(-1, -1, self.experts // self.groups)
        inner, among = _gates(secondary[1].gather(1, index), self.levels[1])  # [T, k1, k2]
        gates = (outer.unsqueeze(-1) * inner).flatten(1)
        experts = (chosen.unsqueeze(-1) * (self.experts // self.groups) + among).flatten(1)
        probabilities = primary[1].softmax(-1).unsqueeze(-1) * secondary[1].softmax(-1)
        losses: dict[str, Tensor] = {}
        if self.training:
            losses = self._variations(
                primary, secondary, chosen, importance(gates, experts, self.experts, tokens), tokens
            )
        kept = None if valid is None else valid.unsqueeze(-1).expand_as(gates)
        counts = tokens.whole().counts(experts, self.experts).squeeze(0)
        return Routing(experts, gates, kept, counts, losses, mean_entropy(probabilities.flatten(1), tokens))

    def _level(self, x: Tensor, weight: Tensor, noise_weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits without noise, logits with it, and its standard deviations; no noise in evaluation."""
        clean = self._product(x, weight)
        if not self.training or self.gating.noise is None:
            return clean, clean, None
        scale = F.softplus(self._product(x, noise_weight))
        return clean, self.gating.noise.on_logits(clean, scale), scale

    def _variations(
        self,
        primary: Sequence[Tensor | None],
        secondary: Sequence[Tensor | None],
        chosen: Tensor,
        sums: Tensor,
        tokens: TokenGroups,
    ) -> dict[str, Tensor]:
        """Both losses; Load_H[i, j] = Load_prim(X)_i · Load_i(X⁽ⁱ⁾)_j / |X⁽ⁱ⁾| for X⁽ⁱ⁾, the tokens that chose i."""
        weights, found = self.gating.losses, {}
        whole = tokens.whole()
        if weights.importance:
            found["importance"] = weights.importance * squared_variation(sums)
        if weights.load:
            outer, inner = (_chances(parts, k) for parts, k in zip((primary, secondary), self.levels, strict=True))
            inside = torch.zeros_like(outer).scatter(-1, chosen, 1.0)  # [T, a]: whether a token is in X of group i
            within = whole.sums((inner * inside.unsqueeze(-1)).flatten(1)).view(self.groups, -1)
            sizes = whole.sums(inside).clamp(min=1).view(-1, 1)
            load = whole.sums(outer).view(-1, 1) * within / sizes
            found["load"] = weights.load * squared_variation(load.flatten())
        return found


def _gates(logits: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """The softmax over the k largest logits [..., E], and their indices: both [..., k]."""
    chosen = largest(logits, choices)
    return logits.gather(-1, chosen).softmax(-1), chosen


def _chances(parts: Sequence[Tensor | None], choices: int) -> Tensor:
    clean, noisy, scale = parts
    assert clean is not None and noisy is not None and scale is not None
    return chances(clean, noisy, scale, choices)
