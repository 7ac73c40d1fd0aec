"""The settings of expert parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from zeroshard.planning.foreign_names import explains_unknown
from zeroshard.planning.settings import check_flag, check_whole, shown


@explains_unknown
@dataclass(frozen=True, repr=False)
class ExpertParallel:
    """Expert parallelism: the experts of each mixture on several ranks, which send each other tokens (2006.16668).

    Raises:
        PlanError: a value out of range.
    """

    ranks: int = 1
    """Ranks that share out the experts of each mixture, neighbours by number; each works on a batch of its own."""
    two_level: bool = False
    """Send tokens first between the ranks of a machine, then between machines, in fewer and larger messages."""

    def __post_init__(self) -> None:
        check_whole("expert_parallel", self.ranks)
        check_flag("expert_parallel.two_level", self.two_level)

    @property
    def divides(self) -> bool:
        """Whether experts are on several ranks."""
        return self.ranks > 1

    def refusals(self) -> Iterator[str]:
        """Sentences about settings of the plan that do not combine with these, each with the way out."""
        if self.two_level and not self.divides:
            yield "expert_parallel.two_level=True is for experts on several ranks; set expert_parallel to 2 or more."

    def __repr__(self) -> str:
        return shown(self)


@dataclass(frozen=True)
class Mixture:
    """Mixtures of experts in the place of a model's feed-forward layers; none with 0 experts."""

    experts: int = 0
    every: int = 2
    router: str = "switch"

    def put_into(self, model: Any) -> None:
        """Replace the feed-forward layers of an `nn.Module`.

        Raises:
            ModelError: there are none, or no such router.
        """
        if self.experts:  # settings do without torch until here
            replace_ffn = import_module("zeroshard.moe.convert.replace").replace_ffn
            replace_ffn(model, every=self.every, experts=self.experts, router=self.router)
