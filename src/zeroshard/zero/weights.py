"""Parameters of one flat that ranks share, slice, or gather late; whole ones are `parts.weights.Weights`.

`Mapped` parameters lie in memory that all ranks of a machine share. `Sliced` ones (stage 3) are gathered for use, here
by actions of a pipeline (`ByChunk`). Updated slices of `Arriving` ones come during the next forward (stages 1 and 2).
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CommError, PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import Task
from zeroshard.parts.part import LateUpdates
from zeroshard.parts.place import Axis
from zeroshard.parts.planned import Planned, Wire, Work, on_device
from zeroshard.parts.weights import Gatherer, Residence, Weights, arrived, withhold
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.units import Flat, Unit


class Mapped(Weights):
    """Parameters in memory that all ranks of a machine map.

    Each rank updates its own slice, and records it in its ledger.
    """

    copied, lost = False, "all ranks share it"
    _edited: torch.Tensor | None = None

    def _allocate(self) -> None:
        index, label, size = self.flat.index, f"parameters {self.flat.label}", self.flat.dtype.itemsize
        padding = index.padding_in(*index.interval(self.rank))
        self._ledger.take(Category.PARAMETERS, self.own_numel * size, label, padding * size)
        assert self._comm.shared is not None
        self.full = self._comm.shared.memory.common(index.padded_numel, self.flat.dtype)
        self.own = self._part(self.full)

    def load(self, values: torch.Tensor | None) -> None:
        """Set this rank's slice from `values` [N*S], of any dtype, and point the user's parameters at the whole."""
        if values is not None:
            self.own.copy_(self._part(values))
        self.flat.attach()

    @property
    def misplaced(self) -> str | None:
        """The reason why other ranks no longer read the buffer, with the way out: torch moved it."""
        assert self._comm.shared is not None
        if not self.full.numel() or self._comm.shared.memory.is_common(self.full):
            return None
        return (
            f"The parameters {self.flat.label} are no longer in the memory that all ranks share: "
            f"model.share_memory(), or torch.multiprocessing with one of their tensors, moved them. Call "
            f"share_memory() before the engine is made, give copies such as engine.state_dict() to other "
            f"processes, or set transport='network'."
        )

    def free(self, for_good: bool = False) -> None:
        """For good: strike this rank's slice out of the ledger, and give its pages back."""
        if not for_good:
            return
        index, label, size = self.flat.index, f"parameters {self.flat.label}", self.flat.dtype.itemsize
        padding = index.padding_in(*index.interval(self.rank)) * size
        self._ledger.give(Category.PARAMETERS, self.own_numel * size, label, padding)
        assert self._comm.shared is not None
        self._comm.shared.memory.give_back(self.own)

    @property
    def visible(self) -> torch.Tensor:
        """The buffer [N*S] that the parameters view."""
        return self.full if self._edited is None else self._edited

    def planned(self) -> Iterator[Planned]:
        """Bytes that the ranks share, in equal parts."""
        index = self.flat.index
        yield on_device(index, Category.PARAMETERS, self.flat.dtype.itemsize, self.rank)

    def wire(self, work: Work) -> Wire:
        """None: updates in shared memory send nothing."""
        yield Purpose.GATHER_PARAMETERS, 0

    def begin_edit(self) -> None:
        """Point the parameters at a private copy, so that N ranks do not write the shared memory N times."""
        self._ledger.take(Category.BUFFERS, self._nbytes, f"edit {self.flat.label}")
        self._edited = self.full.clone()
        self.flat.bind(self._edited)
        self.flat.attach()

    def end_edit(self, keep: bool = True) -> None:
        """Point the parameters at the shared memory again; with `keep`, copy this rank's slice into it."""
        if self._edited is not None:
            if keep:
                self.own.copy_(self._part(self._edited))
            self._edited = None
            self.flat.bind(self.full)
            self.flat.attach()
            self._ledger.give(Category.BUFFERS, self._nbytes, f"edit {self.flat.label}")


class Keeper(Protocol):
    """Storage of a slice between uses.

    Attributes:
        brings: the purposes under which the slice is moved for each use; empty if it is not moved.
    """

    brings: tuple[Purpose, ...]

    def slab(self, numel: int, dtype: torch.dtype, label: str, padding: int) -> torch.Tensor:
        """Memory for a slice [numel], whose last `padding` elements are padding."""

    def drop(self, weights: "Sliced") -> None:
        """Free a slice, which other weights replace."""

    def bring(self, weights: "Sliced", into: torch.Tensor, purpose: Purpose) -> tuple[torch.Tensor, Task | None]:
        """Start to copy the slice to the device; returns its memory [S] there, and the task to wait for.

        Args:
            into: its part of the gathered buffer.
        """

    def planned(self, weights: "Sliced") -> Planned:
        """Planned bytes of a slice."""


class OnDevice:
    """A slice that stays on the device.

    Attributes:
        brings: empty, since the slice is not moved.
    """

    brings: tuple[Purpose, ...] = ()

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device, self._ledger = device, ledger

    def slab(self, numel: int, dtype: torch.dtype, label: str, padding: int) -> torch.Tensor:
        """Memory for a slice [numel], whose last `padding` elements are padding."""
        return self._ledger.empty(numel, dtype, self._device, Category.PARAMETERS, label, padding)

    def drop(self, weights: "Sliced") -> None:
        """Strike a slice out of the ledger."""
        index, label, size = weights.flat.index, f"parameters {weights.flat.label}", weights.flat.dtype.itemsize
        padding = index.padding_in(*index.interval(weights.rank)) * size
        self._ledger.give(Category.PARAMETERS, weights.own_numel * size, label, padding)

    def bring(self, weights: "Sliced", into: torch.Tensor, purpose: Purpose) -> tuple[torch.Tensor, Task | None]:
        """The slice, which is on the device, once its update has ended."""
        if (update := weights.update.take()) is not None:
            update.wait()
        return weights.own, None

    def planned(self, weights: "Sliced") -> Planned:
        """A slice of the device's memory."""
        index = weights.flat.index
        return on_device(index, Category.PARAMETERS, weights.flat.dtype.itemsize, weights.rank)


class Sliced(Weights):
    """Sliced parameters: this rank keeps its slice, and gathers the whole for each use (stage 3).

    [Note: freed storage] The gathered buffer is one storage for life, resized to zero bytes and back. Views of it that
    autograd saved stay valid once it is refilled, and pin nothing while it is empty. What is gathered for the user is
    lent in a storage of its own, which lives for as long as the user keeps views of it.

    Args:
        keeper: where this rank's slice is kept.
    """

    sliced, copied, lost = True, False, "its values were kept by other ranks"

    def __init__(self, flat: Flat, comm: Comm, ledger: Ledger, keeper: Keeper) -> None:
        self._keeper = keeper
        # The lasting buffer and its views, while the gathers fill a storage of their own.
        self._lasting: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        super().__init__(flat, comm, ledger, publishes=False)
        self.residence = Residence.SLICED
        self.full.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        index, dtype, label = self.flat.index, self.flat.dtype, f"parameters {self.flat.label}"
        padding = index.padding_in(*index.interval(self.rank))
        self.own = self._keeper.slab(self.own_numel, dtype, label, padding)
        self.full = torch.empty(index.padded_numel, dtype=dtype, device=self._comm.mesh.device)

    def load(self, values: torch.Tensor | None) -> None:
        """Set this rank's slice from `values` [N*S], of any dtype; the user's parameters read NaN."""
        if values is not None:
            self.own.copy_(self._part(values))
        self.flat.detach()

    def end_edit(self, keep: bool = True) -> None:
        """With `keep`, copy this rank's slice out of the gathered parameters, with the user's writes."""
        if keep:
            self.own.copy_(self._part(self.full))

    def start_gather(self, purpose: Purpose = Purpose.GATHER_PARAMETERS) -> None:
        """Start to gather the other ranks' slices."""
        if self.residence is Residence.GATHERING:
            return
        if self.residence is Residence.SLICED:
            self._ledger.take(Category.BUFFERS, self._nbytes, f"gather {self.flat.label}")
            self.full.untyped_storage().resize_(self._nbytes)
        own, task = self._keeper.bring(self, self._part(self.full), purpose)
        index = self.flat.index
        if task is None or index.ranks > 1:
            if task is not None:
                task.wait()
            self._pending = self._comm.gather(self.full, own, purpose, self.flat.label, index.padding, index.bounds)
        else:
            self._pending = task
        self.residence = Residence.GATHERING

    def finish_gather(self) -> None:
        """Wait for the slices, and point the parameters at the whole buffer."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self.residence = Residence.GATHERED
            self.flat.attach()

    def lend(self) -> None:
        """Use a new storage for the next gather; `free` leaves it to views that still use it."""
        self.free()
        self._lasting = self.full, self.flat.views
        self.full = torch.empty_like(self.full)
        self.flat.bind(self.full)

    def free(self, for_good: bool = False) -> None:
        """Keep only this rank's slice; for good, not even that."""
        if for_good:
            self._keeper.drop(self)
        if self.residence is Residence.SLICED:
            return
        self.finish_gather()
        self.flat.detach()
        if self._lasting is None:
            self.full.untyped_storage().resize_(0)
        else:
            (self.full, self.flat.views), self._lasting = self._lasting, None
        self._ledger.give(Category.BUFFERS, self._nbytes, f"gather {self.flat.label}")
        self.residence = Residence.SLICED

    def published(self) -> None:
        """Nothing: other ranks gather the slice when they need it."""

    def planned(self) -> Iterator[Planned]:
        """A slice, on the keeper's tier."""
        yield self._keeper.planned(self)

    def wire(self, work: Work) -> Wire:
        """A gather for each forward and each backward (section 7.2.2), or for each run of them."""
        index, passes = self.flat.index, work.gathers
        yield Purpose.GATHER_PARAMETERS, index.numel * passes if index.ranks > 1 else 0
        own = self.own_numel - index.padding_in(*index.interval(self.rank))
        yield from ((purpose, own * passes) for purpose in self._keeper.brings)


class Arriving(Weights):
    """Whole parameters whose updated slices arrive during the next forward ([Note: arriving]).

    Args:
        arrivals: all such weights, for which forwards wait.

    Attributes:
        residence: ARRIVING from an update until `finish_gather`.
    """

    def __init__(self, flat: Flat, comm: Comm, ledger: Ledger, publishes: bool, arrivals: "Arrivals") -> None:
        super().__init__(flat, comm, ledger, publishes)
        if self._publishes:
            arrivals.add(self)

    def publish(self, spans: int | None = None) -> None:
        """Start to gather the other ranks' slices; where they may arrive later, the parameters are absent until then.

        Args:
            spans: as in `Weights.publish`.
        """
        if self._publishes and spans is not None:
            withhold(self, super().published, spans)
        super().publish()

    def published(self) -> None:
        """Wait for gathers of parameters that are read already; `finish_gather` waits for the rest."""
        if self.residence is Residence.GATHERED:
            super().published()

    def finish_gather(self) -> None:
        """Wait for the slices of all ranks, and point the parameters at them."""
        super().finish_gather()
        arrived(self)

    def __del__(self) -> None:
        """Fill parameters that outlive the engine, unless a rank has failed."""
        if not sys.is_finalizing():
            with contextlib.suppress(CommError):
                self.finish_gather()


class Arrivals(LateUpdates):
    """The weights of all units whose updated slices arrive after the step."""

    def __init__(self) -> None:
        super().__init__()
        self._of_units: dict[int, list[Arriving]] = {}

    def add(self, weights: Arriving) -> None:
        """Wait for these weights before the forwards of their unit."""
        self._of_units.setdefault(weights.flat.unit.number, []).append(weights)

    def flush(self) -> None:
        """Wait for all new weights."""
        self.finish()

    def finish(self) -> None:
        """Wait for all new weights."""
        for unit in self._of_units:
            self.need(unit)

    def entering(self, root: int, trains: bool) -> None:
        """Begin a forward: wait for the new weights of the root unit."""
        self.need(root)

    def need(self, unit: int) -> None:
        """Wait for the new weights of a unit."""
        for weights in self._of_units.get(unit, ()):
            weights.finish_gather()

    def awaited(self, units: Iterable[int]) -> Iterable[int]:
        """The units among these whose weights arrive after the step."""
        return [unit for unit in units if unit in self._of_units]


class ByChunk(Gatherer):
    """Gathers and frees units with their chunk of a pipeline, at actions of its list.

    Args:
        units: of this rank.
        weights: of each unit.
    """

    gathers = True

    def __init__(self, units: Sequence[Unit], weights: Sequence[Sequence[Weights]]) -> None:
        self._units, self._weights = units, weights
        self._pins = 0

    @property
    def all_gathered(self) -> bool:
        """Whether all units of this rank are gathered."""
        return all(each.residence is Residence.GATHERED for weights in self._weights for each in weights)

    def need(self, number: int, enters: bool = False) -> None:
        """Check that a unit is gathered.

        Raises:
            PlanError: it belongs to a chunk that does not run now.
        """
        if any(each.residence is not Residence.GATHERED for each in self._weights[number]):
            raise PlanError(
                f"A parameter of unit '{self._units[number].label}' is read while another chunk of the model runs, and "
                f"is not gathered (zero=3). Read it in the module that holds it, or use zero=2."
            )

    def gather(self, numbers: Sequence[int], trains: bool = True) -> None:
        """Gather these units; a collective call."""
        if not self._pins:
            self._bring([each for number in numbers for each in self._weights[number]], trains)

    def free(self, numbers: Sequence[int]) -> None:
        """Keep only slices of these units."""
        if not self._pins:
            for each in (each for number in numbers for each in self._weights[number]):
                each.free()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep every unit of this rank gathered inside; a collective call."""
        every = [each for weights in self._weights for each in weights]
        with self._lent(every if not self._pins else []):
            self._pins += 1
            try:
                yield
            finally:
                self._pins -= 1

    def visit(self, number: int) -> AbstractContextManager[None]:
        """Keep one unit gathered inside; a collective call."""
        return self._lent(list(self._weights[number]))

    @contextmanager
    def _lent(self, several: Sequence[Weights]) -> Iterator[None]:
        for each in several:
            each.lend()
        self._bring(several, trains=False)
        try:
            yield
        finally:
            for each in several:
                each.free()

    def _bring(self, several: Sequence[Weights], trains: bool) -> None:
        for each in several:
            each.start_gather(Purpose.GATHER_PARAMETERS if trains else Purpose.GATHER_TO_EVALUATE)
        for each in several:
            each.finish_gather()


def share_memory(
    mesh: Mesh, slicing: Sequence[Axis], world: Comm, nbytes: Callable[[Axis], int], demanded: bool
) -> None:
    """Map memory that the ranks of each axis share, where the machine allows it on all; a collective call.

    Args:
        slicing: the axes among whose ranks flats are sliced.
        nbytes: gives the bytes that the ranks of an axis share.
        demanded: whether the plan says so.

    Raises:
        PlanError: it is demanded, and cannot be.
    """
    several = [axis for axis in slicing if max(map(len, axis.groups)) > 1]
    if not several:
        return
    reason: str | None = "the ranks do not compute on CPUs"
    if not is_accelerator(mesh.device):
        found = [axis.comm.share(nbytes(axis)) for axis in several if axis.size > 1]
        mine = next(filter(None, found), None)
        reasons = world.agree_on(mine, "shared memory")  # groups that differed would wait for ever
        reason = next(filter(None, reasons), None)
        for axis in several if reason is not None else ():
            axis.comm.shared = None  # memory that only some ranks share would be waited for in vain
    if reason is not None and demanded:
        raise PlanError(f"transport='shared' cannot be: {reason}. Or leave transport='auto'.")


def shared_bytes(stage: int, by_unit: bool, ranks: int, sizes: Sequence[int]) -> int:
    """Bytes that ranks share under a stage of ZeRO.

    Args:
        by_unit: whether the gradients of one unit at a time are there, and not of all.
        sizes: elements of each unit.
    """
    gradients = 4 * max(sizes, default=0) if by_unit else sum(sizes)
    return 4 * ((sum(sizes) if stage else 0) + ranks * gradients)
