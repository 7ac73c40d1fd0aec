"""Formulas of mixtures on several ranks, written from the papers and not from the engine.

Each mixture sends its rows to the ranks of their experts and back, in the forward and in the backward (GShard,
2006.16668, section 3.2; Switch, 2101.03961, section 5.5): four times R rows of D elements for each rank.
"""

from dataclasses import dataclass
from fractions import Fraction

from zeroshard.zero.byte_formulas import BytesPerParameter, StateBytes, state_bytes


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Rows of one mixture and one microbatch, on one rank.

    Attributes:
        out: choices of its tokens that fall on experts of other ranks.
        back: choices of other ranks' tokens that fall on its experts.
        width: D.
    """

    out: int
    back: int
    width: int

    @property
    def forward(self) -> int:
        """Elements that the rank sends: rows with their gates, and outputs to the ranks of the tokens."""
        return self.out * (self.width + 1) + self.back * self.width

    @property
    def backward(self) -> int:
        """Elements that it sends: gradients of outputs, and of rows and gates."""
        return self.out * self.width + self.back * (self.width + 1)


def balanced(tokens: int, choices: int, width: int, ranks: int) -> Exchanged:
    """T tokens of each rank with k choices, which fall on all ranks alike: k·T·(n-1)/n rows out and as many back."""
    rows = choices * tokens * (ranks - 1) // ranks
    return Exchanged(rows, rows, width)


def states_of(
    dense: int,
    experts: int,
    expert_ranks: int,
    ranks: int,
    zero: int,
    each: BytesPerParameter = BytesPerParameter(),
) -> StateBytes:
    """Model states of one rank: dense ones among all N, those of its experts among the N/e that have the same.

    Args:
        dense: parameters of everything else.
        experts: parameters of all experts, which the ranks divide.
        expert_ranks: e.
        ranks: N, of the data.
    """
    own = Fraction(experts, expert_ranks)
    return state_bytes(dense, ranks, zero, each) + state_bytes(own, ranks // expert_ranks, zero, each)
