"""The parameters of one flat, in the form that the model computes with, and the gatherer of all units.

[Note: arriving] `step` may return while updates of the parameters run on: on the host, or as gathers of updated slices
(`overlap_gather`). Until then a parameter is an absent one ([Note: absent values]) over NaN: reading it waits, and the
forward waits for each unit before its modules run. Not every reader can be made to wait: torch.tensor(p), torch.func
over parameters, traced modules and extensions in C++ never ask, and read NaN. A tensor that shares the parameters'
memory, as `p.detach()` of an earlier step does, cannot become NaN; a flat of which the user holds one is waited for at
the end of the step.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum, StrEnum, auto

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.pending import Pending
from zeroshard.errors import OffloadError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import Task
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.schedule import Schedule
from zeroshard.units import Flat


class Residence(Enum):
    """Storage state of a flat buffer's parameters."""

    SLICED = auto()  # each rank holds its slice; the parameters read NaN
    GATHERING = auto()  # the collective is under way
    ARRIVING = auto()  # whole, and an update of them is under way, here or on other ranks; each use waits for it
    GATHERED = auto()  # whole on this rank; the parameters may be used


ABSENT = frozenset({Residence.SLICED, Residence.GATHERING})  # where other ranks must take part for the values to come


class SliceUpdate:
    """The current update of a rank's slice, if any; a gather of the slice waits for it."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def begin(self, task: Task) -> None:
        """Register a running update."""
        self._task = task

    def take(self) -> Task | None:
        """Return the running update; the caller waits for it in place of `end`."""
        task, self._task = self._task, None
        return task

    def end(self, task: Task) -> None:
        """Unregister this update, which has ended."""
        if self._task is task:
            self._task = None


class Weights:
    """The buffer of a flat's parameters; in this class every rank keeps it whole.

    Where ranks update slices of it (stages 1 and 2), each rank gathers the other slices after an update.

    Args:
        publishes: whether each rank updates its slice alone.

    Attributes:
        flat: the parameters.
        rank: this rank among those that slice the buffer.
        own: this rank's slice [S].
        full: the whole buffer [N*S]; its values are valid while `residence` is GATHERED.
        residence: storage state of the values.
        sliced: whether the values are freed between uses.
        copied: whether this rank keeps a whole copy of its own.
        lost: the reason why a write into the parameters outside of `gathered()` is lost; None where it is kept.
        update: of `own`, while it runs.
        awaits: waits for the values, while `residence` is ARRIVING.
    """

    own: torch.Tensor
    full: torch.Tensor
    residence = Residence.GATHERED
    sliced: bool = False
    copied: bool = True
    lost: str | None = None
    awaits: Callable[[], None] | None = None

    def __init__(self, flat: Flat, comm: Comm, ledger: Ledger, publishes: bool) -> None:
        self.flat, self.rank, self._comm, self._ledger = flat, comm.mesh.rank, comm, ledger
        self._publishes = publishes and comm.mesh.ranks > 1 and flat.trainable
        self._pending: Pending | Task | None = None
        self.update = SliceUpdate()
        self._allocate()
        flat.bind(self.full)

    def _allocate(self) -> None:
        index, label = self.flat.index, f"parameters {self.flat.label}"
        device, category = self._comm.mesh.device, Category.PARAMETERS
        self.full = self._ledger.empty(index.padded_numel, self.flat.dtype, device, category, label, index.padding)
        self.own = self._part(self.full)

    @property
    def visible(self) -> torch.Tensor:
        """The buffer [N*S] that the parameters view."""
        return self.full

    def load(self, values: torch.Tensor | None) -> None:
        """Set the parameters from `values` [N*S], of any dtype, and point the user's parameters at them.

        Args:
            values: None where files give them later; until then they are zeros.
        """
        if values is not None:
            self.full.copy_(values)
        self.flat.attach()

    def move(self, buffer: torch.Tensor) -> None:
        """Use `buffer` [N*S] as the whole buffer from now on."""
        self.full, self.own = buffer, self._part(buffer)

    @property
    def misplaced(self) -> str | None:
        """The reason why other ranks no longer read `full`; None where they never do, or still do."""
        return None

    def begin_edit(self) -> None:
        """Nothing: writes go into the parameters themselves."""

    def end_edit(self, keep: bool = True) -> None:
        """Nothing: writes went into the parameters themselves."""

    def start_gather(self, purpose: Purpose = Purpose.GATHER_PARAMETERS) -> None:
        """Nothing: whole parameters need no gather."""

    def finish_gather(self) -> None:
        """Wait for values that arrive ([Note: arriving]); whole parameters need no gather."""
        if self.awaits is not None:
            self.awaits()

    def __del__(self) -> None:
        """Fill parameters that outlive the engine, unless other ranks hold a part of them."""
        if self.residence is Residence.ARRIVING and not (self._publishes or sys.is_finalizing()):
            with suppress(OffloadError):
                if (update := self.update.take()) is not None:
                    update.wait()
                arrived(self)

    def lend(self) -> None:
        """Nothing: the user's views follow later updates, as in PyTorch."""

    def free(self, for_good: bool = False) -> None:
        """Free the parameters until their next use, if they are sliced.

        Args:
            for_good: other weights take their place; strike them out of the ledger.
        """
        if for_good:
            index, size = self.flat.index, self.flat.dtype.itemsize
            self._ledger.give(Category.PARAMETERS, self._nbytes, f"parameters {self.flat.label}", index.padding * size)

    def publish(self, spans: int | None = None) -> None:
        """After an update of `own`, start to gather the other ranks' updated slices into `full` (stages 1 and 2).

        Args:
            spans: how many optimizer tensors view `own`; None where all values must be complete after `published`.
        """
        if self._publishes:
            index, label = self.flat.index, f"updated {self.flat.label}"
            self._pending = self._comm.gather(
                self.full, self.own, Purpose.GATHER_PARAMETERS, label, index.padding, index.bounds
            )

    def published(self) -> None:
        """Wait for the updated slices."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def planned(self) -> Iterator[Planned]:
        """Every rank holds all parameters."""
        yield on_device(self.flat.index, Category.PARAMETERS, self.flat.dtype.itemsize)

    def wire(self, work: Work) -> Wire:
        """Each update is gathered once (section 7.2.1)."""
        yield Purpose.GATHER_PARAMETERS, self.flat.index.numel * work.updates if self._publishes else 0

    def _part(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[slice(*self.flat.index.interval(self.rank))]

    @property
    def own_numel(self) -> int:
        """Elements of this rank's slice, padding included."""
        return self.flat.index.slice_numel(self.rank)

    @property
    def _nbytes(self) -> int:
        return self.flat.index.padded_numel * self.flat.dtype.itemsize


def withhold(weights: Weights, finish: Callable[[], None], spans: int = 0) -> bool:
    """Call `finish` before every use of parameters whose values change until `arrived` ([Note: arriving]).

    Args:
        spans: how many optimizer tensors view `own`.

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
    """End `withhold`: the new values are complete."""
    if weights.residence is Residence.ARRIVING:
        weights.residence, weights.awaits = Residence.GATHERED, None
        weights.flat.attach()


def _seen_elsewhere(weights: Weights, spans: int) -> bool:
    """Whether a tensor of the user shares the buffer, besides parameters, their views, the optimizer's and `p.data`."""
    storage, flat = weights.full.untyped_storage(), weights.flat
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users > len(flat.parameters) + len(flat.views) + flat.aliases + spans + 3  # `full`, `own` and `storage`


class PassKind(StrEnum):
    """Kinds of passes over a model, each with its own order of units."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"


class Gatherer:
    """Gathers units on this rank and frees them; in this class, all units are always present.

    Attributes:
        gathers: whether units are gathered for use and freed after it.
        passes: whether this happens inside of passes, as modules use the units.
    """

    gathers = passes = False

    @property
    def orders(self) -> dict[str, list[str]]:
        """The recorded order of each kind of pass, as unit names."""
        return {}

    def inside(self, kind: PassKind) -> bool:
        """Whether a pass of this kind is under way."""
        return False

    def begin(self, kind: PassKind) -> None:
        """Begin a pass; all ranks must begin the same one."""

    def end(self) -> None:
        """End the innermost pass."""

    def abandon(self) -> None:
        """End all passes after an error, and free their units."""

    def need(self, number: int, enters: bool = False) -> None:
        """Gather unit `number`, and wait for it.

        Args:
            enters: the backward of a call of the unit begins.
        """

    def done(self, number: int | None = None, computed_again: bool = False) -> None:
        """Free unit `number`, which this pass does not use again; by default the units that a backward has passed.

        See [Note: numbers of nodes] for those.

        Args:
            computed_again: its recomputed forward has ended, and its backward may read it later, so that it is freed
                only where other units need the memory.
        """

    def free_all(self) -> None:
        """Free every unit, unless they are pinned."""

    @property
    def all_gathered(self) -> bool:
        """Whether all units of this rank are present."""
        return True

    def pinned(self) -> AbstractContextManager[None]:
        """Keep every unit gathered inside; a collective call."""
        return nullcontext()

    def visit(self, number: int) -> AbstractContextManager[None]:
        """Keep one unit gathered inside, outside of any pass; a collective call."""
        return nullcontext()

    def lower(self, actions: Schedule) -> Schedule:
        """A list of computations with the gathers and frees around it."""
        return actions

    def gather(self, numbers: Sequence[int], trains: bool = True) -> None:
        """Gather these units for a chunk of the model; a collective call."""

    def free(self, numbers: Sequence[int]) -> None:
        """Free these units after a chunk of the model."""
