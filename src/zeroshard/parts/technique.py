"""The axes that a technique which splits parameters adds to the engine, before flats are made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from zeroshard.errors import PlanError
from zeroshard.parts.place import Axis, Cuts
from zeroshard.parts.zones import ActivationZones

ROWS_OF_OTHERS = "gets_rows_of_others"  # an attribute, true of modules that get rows of other data ranks
CUT = "cut_by_a_technique"  # an attribute, true of modules with parameters that are cut: other techniques pass by


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
    """Splits parameters over axes of its own. A plan without techniques has none.

    Modules stay, with their classes and the names of their parameters; in a pipeline they are those of all stages.
    """

    @property
    def zones(self) -> ActivationZones | None:
        """Zones of divided activations, for random numbers of this rank's part; None where none are divided."""

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        """The axes that it needs on a stage of so many ranks, by name.

        Raises:
            PlanError: the ranks do not divide.
        """

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Cuts:
        """Replace parameters of the model by this rank's parts, with modules that compute with them.

        Parameters are the same on all ranks before, or on the meta device; then so are their parts, in the shape
        `Split.part_shape`. Modules are initialised later, as they were before this call: their attributes may change
        here, and so may their classes' objects, but not the names of parameters. Other forwards are layers
        (`units.forwards.insert`), inside of the gates of a pipeline.

        Returns:
            each new parameter, with its place in the tensor that it is of; and parameters that stay whole, each rank of
            an axis having a part of their gradients.
        """

    def replicated_over(self, layer: str) -> str | None:
        """The axis whose ranks hold the same activation at the entrance of a pipeline's layer; None if they do not.

        Each of them then sends a part of it between stages, and of its gradient (2104.04473, section 4.1).

        Args:
            layer: the path of a block, or "suffix".
        """


class StepEnd(Protocol):
    """The work of a technique at the end of a step.

    Attributes:
        reads: whether the model has layers that are read, on any stage.
    """

    reads: bool

    def before_update(self) -> None:
        """Act once the gradients of an update are complete and nothing is changed yet; a collective call."""

    def end_step(self, skipped: bool) -> None:
        """End a step that was taken or skipped; a collective call."""

    @property
    def readings(self) -> Mapping[str, Mapping[str, Any]]:
        """Readings of layers of this rank in the last step, plain values by name, by the layer's path."""


def neighbours(ranks: int, size: int, setting: str) -> list[list[int]]:
    """The ranks of a stage in groups of `size` neighbours, for a setting of that value.

    Raises:
        PlanError: they do not divide.
    """
    if ranks % size:
        raise PlanError(
            f"{ranks} ranks of a stage do not divide into groups of {setting}={size}; start a multiple of {size} ranks "
            f"for each stage, or set {setting} to a divisor of {ranks}."
        )
    return [list(range(first, first + size)) for first in range(0, ranks, size)]


def ranks_together(techniques: Sequence[Technique], ranks: int) -> int:
    """Number of ranks in a stage that work on the same data: neighbours.

    Raises:
        PlanError: they are no neighbours.
    """
    axes = {name: axis for technique in techniques for name, axis in technique.axes(ranks).items() if not axis.data}
    together = math.prod(len(axis.groups[0]) for axis in axes.values())
    for name, axis in axes.items():
        far = [group for group in axis.groups if len({rank // together for rank in group}) > 1]
        if far:
            raise PlanError(
                f"Ranks {', '.join(map(str, far[0]))} of a stage are to work on the same data over the axis {name!r}; "
                f"ranks that do are neighbours, {together} at a time. Number its groups so."
            )
    return together
