"""The parameters of one flat, as the model computes with them."""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Protocol

import torch

from zeroshard.comm.collectives import Purpose
from zeroshard.memory.transfers import Task
from zeroshard.parts.planned import Planned, Wire, Work
from zeroshard.units import Flat


class Residence(Enum):
    """Where the values of a flat buffer's parameters are."""

    SLICED = auto()  # each rank holds its slice; the parameters read NaN
    GATHERING = auto()  # the collective is under way
    ARRIVING = auto()  # whole, and other ranks' updates arrive; each use waits for them
    GATHERED = auto()  # whole on this rank; the parameters may be used


ABSENT = frozenset({Residence.SLICED, Residence.GATHERING})  # where other ranks must take part for the values to come


class Weights(Protocol):
    """The buffer of a flat's parameters: whole, shared, sliced, on a tier below.

    Attributes:
        flat: the parameters.
        rank: this rank among those that slice the buffer.
        own: this rank's slice [S].
        full: the whole buffer [N*S], whose values are here while `residence` is GATHERED.
        residence: where the values are now.
        sliced: whether the values go between uses.
        copied: whether this rank keeps a whole copy of its own.
        update: of `own`, under way; a gather comes after it.
    """

    flat: Flat
    rank: int
    own: torch.Tensor
    full: torch.Tensor
    residence: Residence
    sliced: bool
    copied: bool
    update: Task | None

    @property
    def lost(self) -> str | None:
        """Why a write into the parameters outside of `gathered()` would be lost, in words; None if it would not."""

    @property
    def visible(self) -> torch.Tensor:
        """The buffer [N*S] that the parameters view."""

    def load(self, values: torch.Tensor) -> None:
        """Set the parameters from `values` [N*S], of any dtype, and let the user's parameters view them."""

    def move(self, buffer: torch.Tensor) -> None:
        """Let `buffer` [N*S] be the whole buffer from now on."""

    def begin_edit(self) -> None:
        """The user is about to write into the parameters, which are gathered."""

    def end_edit(self, keep: bool = True) -> None:
        """The user is done; with `keep`, take over this rank's slice of the writes."""

    def start_gather(self, purpose: Purpose = Purpose.GATHER_PARAMETERS) -> None:
        """Start to fetch the other ranks' slices."""

    def finish_gather(self) -> None:
        """Wait for the whole buffer, and let the parameters view it."""

    def lend(self) -> None:
        """Let the next gather fill memory of its own, which `free` leaves to the views that still use it."""

    def free(self) -> None:
        """Keep only this rank's slice."""

    def publish(self, spans: int | None = None) -> None:
        """`own` was updated: start to let the other ranks have it, where they keep it too.

        Args:
            spans: how many tensors of the optimizer view `own`; None where all must be here after `published`.
        """

    def published(self) -> None:
        """Wait for the slices that the other ranks published, unless that may arrive later."""

    def planned(self) -> Iterator[Planned]:
        """Planned bytes."""

    def wire(self, work: Work) -> Wire:
        """Planned elements that are sent and received in a step."""
