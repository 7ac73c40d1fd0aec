"""Answers of expert parallelism to the planner."""

from dataclasses import dataclass, replace

from zeroshard.parts.choice import Choice, Description, States


@dataclass(frozen=True)
class SharingExperts(Choice):
    """The expert parallelism of a plan.

    Attributes:
        ranks: that share out the experts of each mixture.
        two_level: whether tokens go first between the ranks of a machine.
    """

    ranks: int = 1
    two_level: bool = False

    def describe(self, ranks: int | None) -> Description:
        """How many ranks share out the experts."""
        if self.ranks == 1:
            return Description()
        return Description((f"experts {self.ranks}",), settings=("tokens in two levels",) if self.two_level else ())

    def share(self, states: States, ranks: int) -> States:
        """At least the states of a model that has nothing but experts, which fewer ranks slice."""
        trainable, frozen, largest = (n // self.ranks for n in (states.trainable, states.frozen, states.largest))
        slices = max(1, states.slices // self.ranks)
        return replace(states, trainable=trainable, frozen=frozen, largest=largest, slices=slices)

    def notes(self, host_rate: str) -> tuple[str, ...]:
        """What is assumed of tokens."""
        if self.ranks == 1:
            return ()
        return ("Tokens are taken to fall on all experts alike; a rank with more of them takes longer.",)
