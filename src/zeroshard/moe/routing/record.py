"""The routing of one batch of tokens: the one record that router, dispatch, experts, statistics and replay share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass


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
