"""Answers of random numbers to the planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.planning.questions import Choice, Description


@dataclass(frozen=True)
class Drawing(Choice):
    """The random numbers of a plan.

    Attributes:
        exact: whether they are keyed by what they belong to.
    """

    exact: bool = False

    def describe(self, ranks: int | None) -> Description:
        """Exact ones are named."""
        return Description(settings=("exact random numbers",) if self.exact else ())

    def rehearsed(self, settled: int, meaningless: bool) -> Mapping[str, Any]:
        """Torch's own, whose tensors are as large: a rehearsal has no use for the numbers."""
        return {"rng": "fast"} if self.exact else {}
