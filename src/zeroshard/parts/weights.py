"""The parameters of one flat, as the model computes with them.

[Note: arriving] `step` may return while updates of the parameters run on: on the host, or as gathers of updated slices
(`overlap_gather`). Until then a parameter is an absent one ([Note: absent values]) over NaN: reading it waits, and the
forward waits for each unit before its modules run. Not every reader can be made to wait: torch.tensor(p), torch.func
over parameters, traced modules and extensions in C++ never ask, and read NaN. A tensor that shares the parameters'
memory, as `p.detach()` of an earlier step does, cannot become NaN; a flat of which the user holds one is waited for at
the end of the step.
"""

from collections.abc import Callable, Iterator
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
    ARRIVING = auto()  # whole, and an update of them is under way, here or on other ranks; each use waits for it
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
        awaits: has the values arrive, while `residence` is ARRIVING.
    """

    flat: Flat
    rank: int
    own: torch.Tensor
    full: torch.Tensor
    residence: Residence
    sliced: bool
    copied: bool
    update: Task | None
    awaits: Callable[[], None] | None

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


def withhold(weights: Weights, finish: Callable[[], None], spans: int = 0) -> bool:
    """Have every use of parameters call `finish` before: their values are changed until `arrived` ([Note: arriving]).

    Args:
        spans: how many tensors of the optimizer view `own`.

    Returns:
        False where uses cannot be seen, so that the caller must finish at once.
    """
    if weights.sliced or type(weights.full) is not torch.Tensor:
        return True  # they are absent between uses, and gathers wait for `update`; a rehearsal has no values to read
    if weights.flat.kinds is None or _seen_elsewhere(weights, spans):
        return False
    weights.residence, weights.awaits = Residence.ARRIVING, finish
    weights.flat.detach()
    return True


def arrived(weights: Weights) -> None:
    """The values of weights are the new ones, and stay so."""
    if weights.residence is Residence.ARRIVING:
        weights.residence, weights.awaits = Residence.GATHERED, None
        weights.flat.attach()


def _seen_elsewhere(weights: Weights, spans: int) -> bool:
    """Whether anything shares the buffer but its parameters, their views, the optimizer's and those of `p.data`."""
    storage, flat = weights.full.untyped_storage(), weights.flat
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users > len(flat.parameters) + len(flat.views) + flat.aliases + spans + 3  # `full`, `own` and `storage`
