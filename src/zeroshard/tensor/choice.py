"""Answers of tensor parallelism to the planner, and its divisions of a node's ranks for a search."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroshard.planning.offers import Divided, Site, divisors
from zeroshard.planning.questions import Choice, Description, Remedy, States


@dataclass(frozen=True)
class Splitting(Choice):
    """The tensor parallelism of a plan.

    Attributes:
        ranks: ranks that split each layer.
        sequence: whether sequence parallelism is on.
        given: whether the plan names styles of layers.
    """

    ranks: int = 1
    sequence: bool = True
    given: bool = False

    @property
    def splits(self) -> bool:
        """Whether layers are split."""
        return self.ranks > 1

    def describe(self, ranks: int | None) -> Description:
        """The number of ranks that split a layer, with the settings that differ from the default."""
        if not self.splits:
            return Description()
        settings = {"no sequence parallelism": not self.sequence, "layers split as given": self.given}
        return Description((f"tensor {self.ranks}",), settings=tuple(text for text, found in settings.items() if found))

    def share(self, states: States, ranks: int) -> States:
        """At least an equal part: norms, and biases of row-parallel layers, are whole on every rank."""
        whole = (states.trainable, states.frozen, states.packed, states.largest)
        trainable, frozen, packed, largest = (n // self.ranks for n in whole)
        return replace(states, trainable=trainable, frozen=frozen, packed=packed, largest=largest)

    def remedies(self, ranks: int) -> Iterator[Remedy]:
        """More ranks in each layer with stage 3, whose largest gathered unit shrinks too."""
        for more in divisors(ranks):
            if more > self.ranks:
                sentence = f"tensor_parallel={more} with zero=3 would bring the states down to fit."
                yield Remedy(sentence, {"tensor_parallel": more, "zero": 3, "shard_group": None}, ranks)

    def row_owner(self, usual: str) -> str:
        """The ranks that split a layer take the same rows."""
        return "data rank" if self.splits else usual


def divisions(site: Site) -> Iterator[Divided]:
    """No tensor parallelism, and groups of ranks of one node: their messages are too many for links between nodes."""
    for ranks in divisors(min(site.per_node, site.ranks)):
        if site.ranks % ranks == 0:
            inside = replace(site, ranks=site.ranks // ranks, per_node=max(1, site.per_node // ranks))
            yield Divided({"tensor_parallel": ranks}, ranks, inside)
