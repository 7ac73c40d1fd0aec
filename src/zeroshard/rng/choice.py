"""Answers of random numbers to the planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.planning.questions import Choice, Description


@dataclass(frozen=True)
class Drawing(Choice):
    """The random numbers of a plan.

    Attributes:
        exact: whether they are keyed by step, row and module.
    """

    exact: bool = False

    def describe(self, ranks: int | None) -> Description:
        """A setting for exact random numbers."""
        return Description(settings=("exact random numbers",) if self.exact else ())

    def rehearsed(self, settled: int, meaningless: bool) -> Mapping[str, Any]:
        """Torch's own numbers, with tensors of equal size: a rehearsal does not use the values."""
        return {"rng": "fast"} if self.exact else {}
