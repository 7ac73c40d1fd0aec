"""Updaters: they update this rank's weights and keep their optimizer states."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zeroshard.memory.ledger import Arena
from zeroshard.parts.gradients import Gradients
from zeroshard.parts.planned import Planned, Wire, Work
from zeroshard.parts.weights import Weights


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of a matrix that is cut by rows over several ranks.

    Attributes:
        first: the number of the first.
        total: of the matrix.
        states: the names of the optimizer's states with an entry for each row; others are the same on all ranks.
    """

    first: int
    total: int
    states: tuple[str, ...]


class Span(Protocol):
    """Elements [start, stop) of a flat, of one parameter group; one tensor for the optimizer.

    Attributes:
        rows: of a matrix that is cut by rows; None otherwise.
    """

    start: int
    stop: int
    group: int
    tensor: torch.nn.Parameter
    rows: OwnRows | None


class Updater(Protocol):
    """Updates this rank's part of one flat.

    Attributes:
        weights: that the model computes with.
        values: the updated ones [S], or [N*S] at stage 0: the parameters themselves, or their fp32 masters.
        start: the place of `values` in the flat.
        separate: whether `values` lie apart from the parameters.
    """

    weights: Weights
    values: torch.Tensor
    start: int
    separate: bool

    @property
    def spans(self) -> Sequence[Span]:
        """The tensors of the optimizer; none where nothing is trained."""

    @property
    def matrices(self) -> Mapping[str, Span] | None:
        """By name, the whole matrices with which this rank steps for all ranks that hold parts; they have the states.

        None where the optimizer steps over `spans`, which else are the parts of matrices in `values`.
        """

    @property
    def leaves(self) -> tuple[Arena | None, int]:
        """Tensors that the first `update` leaves on the device, besides states.

        Returns:
            the arena in which gradients get the dtype of the values, and bytes of scalars of each span.
        """

    @property
    def as_saved(self) -> bool:
        """Whether values and states lie in memory in the form of a checkpoint."""

    @property
    def lost(self) -> str | None:
        """The reason why the next update would undo a write into the parameters; None if it would not."""

    def update(self, gradients: Gradients, written: bytes, factor: float) -> None:
        """Begin one step with the gradients times `factor`.

        Args:
            written: by parameter, whether it got a gradient; the others stay as they are.
        """

    def split(self, cuts: Sequence[int]) -> None:
        """Cut the spans at these elements of the flat, with their states, and make the scratch of an update."""

    def follow(self) -> None:
        """Follow the parameters, values included, into another buffer."""

    def at_hand(self, writes: bool = False) -> AbstractContextManager[Any]:
        """Values and states in memory inside; writes are kept if `writes`."""

    def take_over(self) -> None:
        """Copy the user's writes into the parameters to the values."""

    def restore(self) -> None:
        """Copy the values to the parameters."""

    def elements(self, span: Span) -> dict[str, torch.Tensor]:
        """The optimizer's states of each element of a span [stop - start], by name, in the form of a checkpoint."""

    def scalars(self, span: Span) -> dict[str, Any] | None:
        """The optimizer's scalars of a span, such as a step count; None before its first update."""

    def load_state(self, span: Span, state: dict[str, Any] | None) -> None:
        """Set the states of a span, in fp32; None if it has none yet."""

    def planned(self) -> Iterator[Planned]:
        """Planned bytes of master weights and states."""

    def wire(self, work: Work) -> Wire:
        """Planned elements moved between tiers in a step."""

    def exact(self, values: torch.Tensor) -> torch.Tensor:
        """A part of `values` that outlives `at_hand`."""
