"""Parameters of one flat buffer: whole on every rank, or a slice that is gathered for use and freed after it."""

from enum import Enum, auto
from typing import Protocol

import torch

from zeroshard.comm import Comm, Pending, Purpose
from zeroshard.ledger import Category, Ledger
from zeroshard.link import Link, Task
from zeroshard.units import Flat
from zeroshard.zero.residency import Residency


class Residence(Enum):
    """Where the values of a flat buffer's parameters are."""

    SLICED = auto()  # each rank holds its slice; the parameters read NaN
    GATHERING = auto()  # the collective is under way
    GATHERED = auto()  # whole on this rank; the parameters may be used


class Under(Protocol):
    """The tier below the device."""

    link: Link

    def parameter_slab(self, numel: int, dtype: torch.dtype, label: str, padding: int) -> torch.Tensor:
        """A place for a slice [numel], of which `padding` elements hold nothing."""


class ParameterShards:
    """The parameter buffer of a flat under a residency.

    Where ranks share memory and own slices, the whole buffer is there once for all of them, at every stage from 1 up;
    each enters its own slice in its ledger.

    [Note: freed storage] The gathered buffer is one storage for life, resized to zero bytes and back. Views of it that
    autograd saved stay valid once it is refilled, and pin nothing while it is empty. What is gathered for the user is
    lent in a storage of its own, which lives for as long as the user keeps views of it.

    Args:
        under: where this rank's slice is kept instead of on the device; then one rank, too, gathers and frees.

    Attributes:
        own: this rank's slice [S]; where parameters stay whole, a view into `full`.
        full: the whole buffer [N*S].
        residence: where the values are now.
        lives_below: whether `own` is not on the device.
        update: of `own`, under way; a gather comes after it.
    """

    def __init__(
        self, flat: Flat, residency: Residency, comm: Comm, ledger: Ledger, under: Under | None = None
    ) -> None:
        mesh, index = comm.mesh, flat.index
        self.flat = flat
        self.rank = mesh.rank
        self.common = residency.slice_states and comm.shared is not None
        self.sliced = residency.slice_parameters and (mesh.ranks > 1 or under is not None) and not self.common
        self.update: Task | None = None
        self._under, self.lives_below = under, under is not None and self.sliced
        self._spread = (self.common or residency.spread_after_update) and mesh.ranks > 1 and flat.trainable
        self._comm = comm
        self._ledger = ledger
        self._pending: Pending | Task | None = None
        self._home: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # the buffer and its views, while one is lent
        self._edited: torch.Tensor | None = None
        start, stop = index.interval(self.rank)
        category, label = Category.PARAMETERS, f"parameters {flat.label}"
        padding = index.padding_in(start, stop)
        if comm.shared is not None and self.common:
            size = flat.dtype.itemsize
            ledger.take(category, index.slice_numel * size, label, padding * size)
            self.full = comm.shared.memory.common(index.padded_numel, flat.dtype)
            self.own = self.full[start:stop]
        elif self.sliced:
            if under is None:
                self.own = ledger.empty(index.slice_numel, flat.dtype, mesh.device, category, label, padding)
            else:
                self.own = under.parameter_slab(index.slice_numel, flat.dtype, label, padding)
            self.full = torch.empty(index.padded_numel, dtype=flat.dtype, device=mesh.device)
        else:
            self.full = ledger.empty(index.padded_numel, flat.dtype, mesh.device, category, label, index.padding)
            self.own = self.full[start:stop]
        self.residence = Residence.SLICED if self.sliced else Residence.GATHERED
        flat.bind(self.full)
        if self.sliced:
            self.full.untyped_storage().resize_(0)

    def load(self, values: torch.Tensor) -> None:
        """Set the parameters from `values` [padded], of any dtype, and let the user's parameters view them."""
        start, stop = self.flat.index.interval(self.rank)
        if self.common or self.sliced:
            self.own.copy_(values[start:stop])
        else:
            self.full.copy_(values)
        if self.sliced:
            self.flat.detach()
        else:
            self.flat.attach()

    def move(self, buffer: torch.Tensor) -> None:
        """Let `buffer` [padded] be the whole buffer from now on."""
        start, stop = self.flat.index.interval(self.rank)
        self.full, self.own = buffer, buffer[start:stop]

    def begin_edit(self) -> None:
        """Let the parameters view a copy of this rank's own, so that what every rank writes is not written N times."""
        if self.common:
            self._ledger.take(Category.BUFFERS, self._nbytes, f"edit {self.flat.label}")
            self._edited = self.full.clone()
            self.flat.bind(self._edited)
            self.flat.attach()

    @property
    def visible(self) -> torch.Tensor:
        """The buffer [N*S] that the parameters view."""
        return self.full if self._edited is None else self._edited

    def end_edit(self, keep: bool = True) -> None:
        """Let the parameters view what is common again, and with `keep` take this rank's slice out of the copy."""
        if self._edited is not None:
            start, stop = self.flat.index.interval(self.rank)
            if keep:
                self.own.copy_(self._edited[start:stop])
            self._edited = None
            self.flat.bind(self.full)
            self.flat.attach()
            self._ledger.give(Category.BUFFERS, self._nbytes, f"edit {self.flat.label}")

    def start_gather(self, purpose: Purpose = Purpose.GATHER_PARAMETERS) -> None:
        """Start to fetch the other ranks' slices."""
        if not self.sliced or self.residence is Residence.GATHERING:
            return
        if self.residence is Residence.SLICED:
            self._ledger.take(Category.BUFFERS, self._nbytes, f"gather {self.flat.label}")
            self.full.untyped_storage().resize_(self._nbytes)
        self._pending = self._fetch(purpose)
        self.residence = Residence.GATHERING

    def _fetch(self, purpose: Purpose) -> Pending | Task:
        index, label, own = self.flat.index, self.flat.label, self.own
        if self._under is not None:
            start, stop = index.interval(self.rank)
            own = self.full[start:stop]
            after, self.update = [] if self.update is None else [self.update], None
            padding = index.padding_in(start, stop)
            evaluates = purpose is Purpose.GATHER_TO_EVALUATE
            up = Purpose.PARAMETERS_UP_TO_EVALUATE if evaluates else Purpose.PARAMETERS_UP
            task = self._under.link.copy(self.own, own, up, label, after, padding)
            if index.ranks == 1:
                return task
            task.wait()
        elif self.update is not None:
            self.update.wait()
            self.update = None
        return self._comm.gather(self.full, own, purpose, label, index.padding)

    def finish_gather(self) -> None:
        """Wait for the slices and let the parameters view the whole buffer."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self.residence = Residence.GATHERED
            self.flat.attach()

    def lend(self) -> None:
        """Let the next gather fill a storage of its own, which `free` leaves to those who still view it."""
        if self.sliced:
            self.free()
            self._home = self.full, self.flat.views
            self.full = torch.empty_like(self.full)
            self.flat.bind(self.full)

    def free(self) -> None:
        """Keep only this rank's slice."""
        if not self.sliced or self.residence is Residence.SLICED:
            return
        self.finish_gather()
        self.flat.detach()
        if self._home is None:
            self.full.untyped_storage().resize_(0)
        else:
            (self.full, self.flat.views), self._home = self._home, None
        self._ledger.give(Category.BUFFERS, self._nbytes, f"gather {self.flat.label}")
        self.residence = Residence.SLICED

    def start_spread(self) -> None:
        """After an update of `own`, start to bring the other ranks' updated slices into `full` (stages 1 and 2)."""
        if self._spread:
            padding = self.flat.index.padding
            self._pending = self._comm.gather(
                self.full, self.own, Purpose.GATHER_PARAMETERS, f"updated {self.flat.label}", padding
            )

    def finish_spread(self) -> None:
        """Wait for the updated slices."""
        if self._spread and self._pending is not None:
            self._pending.wait()
            self._pending = None

    @property
    def _nbytes(self) -> int:
        return self.flat.index.padded_numel * self.flat.dtype.itemsize
