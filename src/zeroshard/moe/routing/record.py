"""Tokens in groups, and the record of their routing that router, dispatch, experts and statistics share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class TokenGroups:
    """T tokens in groups of neighbours; the last group may have fewer.

    Attributes:
        tokens: T.
        size: tokens of a group.
        valid: [T], bool: False for padding; None where there is none.
    """

    tokens: int
    size: int
    valid: Tensor | None = None

    @property
    def count(self) -> int:
        """G, the groups; one where there are no tokens."""
        return max(1, -(-self.tokens // self.size))

    @property
    def sizes(self) -> list[int]:
        """The tokens of each group, padding included."""
        return [min(self.size, self.tokens - start) for start in range(0, self.count * self.size, self.size)]

    def index(self, device: torch.device) -> Tensor:
        """[T], int64: the group of each token."""
        return torch.arange(self.tokens, device=device) // self.size

    def masked(self, values: Tensor) -> Tensor:
        """[T, ...] with zeros for padding."""
        return values if self.valid is None else torch.where(self.valid.unsqueeze(-1), values, 0.0)

    def sums(self, values: Tensor) -> Tensor:
        """[G, n]: sums over the tokens of each group of values [T, n], padding left out."""
        values = self.masked(values)
        if self.count == 1:
            return values.sum(0, keepdim=True)
        missing = self.count * self.size - self.tokens
        padded = F.pad(values, (0, 0, 0, missing)) if missing else values
        return padded.view(self.count, self.size, -1).sum(1)

    def lengths(self, values: Tensor) -> Tensor:
        """[G], in the dtype and on the device of `values`: the tokens of each group, padding left out."""
        if self.valid is None:
            lengths = values.new_full((self.count,), self.size)
            lengths[-1] = self.sizes[-1]  # no copy from the host, for which a device would wait
            return lengths
        return self.sums(self.valid.to(values.dtype).unsqueeze(-1)).squeeze(-1)

    def counts(self, experts: Tensor, bins: int, chosen: Tensor | None = None) -> Tensor:
        """[G, bins], int64: how many choices [T, k] of each group fell on each expert, padding left out.

        Args:
            chosen: [T, k], bool: which choices there are; None for all.
        """
        keys = experts
        if self.count > 1:
            keys = experts + self.index(experts.device).unsqueeze(-1) * bins
        ones = torch.ones_like(keys) if chosen is None else chosen.long()
        ones = ones if self.valid is None else ones * self.valid.unsqueeze(-1)
        total = torch.zeros(self.count * bins, dtype=torch.int64, device=experts.device)
        return total.scatter_add_(0, keys.reshape(-1), ones.reshape(-1)).view(self.count, bins)

    def whole(self) -> "TokenGroups":
        """The same tokens in one group."""
        return TokenGroups(self.tokens, max(1, self.tokens), self.valid)


@dataclass(frozen=True, slots=True)
class Routing:
    """The choices of T tokens among E experts, k for each token; choice 0 is the first.

    Attributes:
        experts: [T, k], int64: the expert of each choice.
        gates: [T, k], fp32, with their graph: the weight of its output in the token's.
        kept: [T, k], bool: whether a choice has a place in its expert's capacity; None where all have. A choice that
            is not kept adds nothing to its token, whose other gates stay as they are.
        counts: [E], int64: the choices that fell on each expert before capacity, padding left out.
        losses: weighted penalties with their graphs, fp32 scalars by name ("balance", "z", "importance", "load").
        entropy: mean over tokens of the entropy of the router's probabilities, in nats; a detached fp32 scalar.
    """

    experts: Tensor
    gates: Tensor
    kept: Tensor | None
    counts: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    entropy: Tensor | None = None

    @property
    def choices(self) -> int:
        """k."""
        return self.experts.shape[-1]

    @property
    def penalty(self) -> Tensor | None:
        """The sum of the losses; None where there are none."""
        return torch.stack(list(self.losses.values())).sum() if self.losses else None


register_dataclass(Routing)  # so that its tensors are found where a module returns it, as those of tuples are
