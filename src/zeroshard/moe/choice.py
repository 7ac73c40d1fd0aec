"""Answers of expert parallelism to the planner, among them the numbers of ranks that it offers to a search."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from zeroshard.moe.experts.families import find_experts
from zeroshard.planning.offers import divisors
from zeroshard.planning.questions import Choice, Description, Mixtures, Remedy, States


@dataclass(frozen=True)
class SharingExperts(Choice):
    """The expert parallelism of a plan.

    Attributes:
        ranks: ranks that divide the experts of each mixture.
        two_level: whether tokens go first between the ranks of a machine.
        stages: of the plan, within each of which ranks share out experts.
        tensor_ranks: ranks that split layers.
    """

    ranks: int = 1
    two_level: bool = False
    stages: int = 1
    tensor_ranks: int = 1

    @property
    def reach(self) -> tuple[float, ...]:
        """The number of ranks."""
        return (self.ranks,)

    def describe(self, ranks: int | None) -> Description:
        """The number of ranks that divide the experts."""
        if self.ranks == 1:
            return Description()
        return Description(
            (f"experts over {self.ranks} ranks",), settings=("tokens in two levels",) if self.two_level else ()
        )

    def share(self, states: States, ranks: int) -> States:
        """At least an equal part of the experts, whose parameters fewer ranks slice; the rest is whole."""
        mixtures = states.mixtures
        if not 1 < self.ranks <= mixtures.experts:
            return states
        each = Fraction(self.ranks, self.tensor_ranks)  # shared-out experts are not split besides
        kept = 1 - mixtures.share + mixtures.share / each
        sliced = (1 - mixtures.share) / states.slices + mixtures.share / max(each, states.slices)
        trainable, frozen = (int(kept * n) for n in (states.trainable, states.frozen))
        largest = states.largest if each < 1 else states.largest // each  # it may be all experts
        return replace(states, trainable=trainable, frozen=frozen, largest=largest, slices=kept / sliced)

    def remedies(self, ranks: int) -> Iterator[Remedy]:
        """More ranks; where there are no experts to share out, the states stay as large."""
        for more in self._larger_degrees(ranks):
            sentence = f"expert_parallel={more} would bring the states down to fit."
            yield Remedy(sentence, {"expert_parallel.ranks": more}, ranks)

    def variants(self, states: States, ranks: int) -> Iterator[Mapping[str, Any]]:
        """Every number of ranks up to the number of experts, for plans without expert parallelism.

        Args:
            states: of one rank under the plan.
            ranks: of the whole job.
        """
        for more in self._larger_degrees(ranks) if self.ranks == 1 else ():
            if more <= states.mixtures.experts:
                yield {"expert_parallel.ranks": more}

    def _larger_degrees(self, ranks: int) -> list[int]:
        """Larger numbers of ranks that divide those of a stage."""
        return [more for more in divisors(ranks // self.stages) if more > self.ranks]

    def notes(self, host_rate: str) -> tuple[str, ...]:
        """The assumption about tokens."""
        if self.ranks == 1:
            return ()
        return ("Tokens are taken to fall on all experts alike; a rank with more of them takes longer.",)


def mixtures_of(model: nn.Module) -> Mixtures:
    """The mixtures of a model, as far as plans depend on them."""
    found = find_experts(model)
    inside = {parameter for each in found for parameter in each.parameters}
    shares = [Fraction(0)]
    for trained in (True, False):
        alike = [parameter for parameter in model.parameters() if parameter.requires_grad is trained]
        if alike:
            shares.append(Fraction(sum(p.numel() for p in alike if p in inside), sum(p.numel() for p in alike)))
    return Mixtures(min((each.experts for each in found), default=0), max(shares))
