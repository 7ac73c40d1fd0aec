"""The axes that a technique which splits parameters gives the engine before flats are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from zeroshard.parts.place import Axis, Split


@dataclass(frozen=True, slots=True)
class NewAxis:
    """An axis that a technique adds to the ranks of a stage.

    Attributes:
        groups: a partition of the ranks 0 to n - 1 of a stage into groups of one size.
        data: whether the ranks of a group work on different data (experts), and not on the same (tensor parallelism).
    """

    groups: Sequence[Sequence[int]]
    data: bool


class Technique(Protocol):
    """Splits parameters over axes of its own. A plan that asks for none has none."""

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        """The axes that it needs on a stage of so many ranks, by name."""

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Split]:
        """Put this rank's parts in the place of parameters of the model, which are the same on all ranks.

        Returns:
            each new parameter, with its place in the tensor that it is of.
        """
