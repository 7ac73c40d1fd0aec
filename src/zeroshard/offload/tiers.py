"""The tiers below the device: slices on the host or a disk, the link to them, and the units kept there.

[Note: L2L] Layer-to-layer execution (Pudipeddi et al., 2002.05645): a slice of parameters stays below the device, and
`zero.weights.Sliced` copies it up for its unit's forward and backward, and the next one meanwhile; so the device holds
two units and the root, whatever the depth. `offload.updates` updates it in place.

[Note: weights first] An update that may have to be undone makes the new weights alone, beside the states, which it
reads and leaves as they are. To undo it is to forget those weights. If they are right, the same update runs again,
later, and writes the states. Nothing is computed back, so it is exact. The two move 42 bytes of memory per element of
16 bits instead of 28: as much as one update that writes copies of its states, and in a sixth of the memory.

[Note: pages on the disk] A slice on the disk has pages in memory only while it is updated, saved or loaded.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, local_ranks
from zeroshard.errors import ModelError, OptimizerError
from zeroshard.memory import Disk, Extent, HostMemory
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import Task, Transfers
from zeroshard.offload.policy import Offload
from zeroshard.optim.host.adam import adam_update
from zeroshard.optim.host.states import BLOCK, Blockwise, HostStates, Scalars, stands_for
from zeroshard.parts.planned import Planned, on_lower_tier
from zeroshard.parts.weights import Weights
from zeroshard.traffic import DISK, UPDATE, Purpose
from zeroshard.units import Flat, Unit

PROBED, SLOW = 2**28, 2.0  # bytes from which a disk's speed is measured; seconds of a step that are worth a warning
SPARED = 2  # of the host memory that states leave free, the part that speculations may take


MOMENTS = ("exp_avg", "exp_avg_sq")
Moment = torch.Tensor | Blockwise


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """Elements [start, stop) of a slice with one update rule; `block` is the first of their scales."""

    start: int
    stop: int
    block: int
    scalars: Scalars


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of a slice of `numel` elements: bytes of its master weights, moments and their scales.

    Attributes:
        moments: "fp32", "bf16" or "8bit" (2110.02861).
        blocks: at most so many blocks of 8-bit moments.
    """

    numel: int
    moments: str
    blocks: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Bytes of master, the two moments, and their scales."""
        each = {"fp32": 4, "bf16": 2, "8bit": 1}[self.moments] * self.numel
        scales = 4 * self.blocks if self.moments == "8bit" else 0
        return 4 * self.numel, each, each, scales, scales


class Pages:
    """Memory for one version of a slice: five byte buffers with the sizes of `Form.sizes`.

    Attributes:
        form: the layout of the content.
        buffers: the five.
        master: the master weights [S] in the first.
    """

    def __init__(self, form: Form, buffers: Sequence[torch.Tensor]) -> None:
        self.form, self.buffers = form, list(buffers)
        self.master = self.buffers[0].view(torch.float32)[: form.numel]

    def states(self, start: int, stop: int, block: int) -> HostStates:
        """The states of elements [start, stop), whose scales begin at `block`."""
        return HostStates(self.master[start:stop], *(self._moment(number, start, stop, block) for number in (0, 1)))

    def _moment(self, number: int, start: int, stop: int, block: int) -> Moment:
        values = self.buffers[1 + number]
        if self.form.moments != "8bit":
            dtype = torch.float32 if self.form.moments == "fp32" else torch.bfloat16
            return values.view(dtype)[start:stop]
        scales = self.buffers[3 + number].view(torch.float32)[block : block - (start - stop) // BLOCK]
        return Blockwise(values[start:stop], scales, signed=number == 0)


class HostSlice:
    """One slice [S] whose updates run on the host.

    Args:
        form: its layout.
        padding: padding elements at its end.
        disk: its tier between updates; host memory by default.

    Attributes:
        form: its layout.
        rebind: called with its pages when they are in memory, and with None when they are on the disk alone.
    """

    def __init__(
        self, link: Transfers, host: HostMemory, form: Form, label: str, padding: int = 0, disk: Disk | None = None
    ) -> None:
        self._link, self._host, self._label, self._disk = link, host, label, disk
        self.form = form
        self.rebind: Callable[[Pages | None], None] = lambda pages: None
        self._extents: list[Extent] = []
        buffers: list[torch.Tensor] = []
        self._pages: Pages | None = None
        self._last: Task | None = None
        self._layout: list[tuple[int, int, int]] = []  # start, stop and first scale of each span
        names = ("master weights", *MOMENTS, *(f"scales of {name}" for name in MOMENTS))
        tenure = (Category.MASTER_WEIGHTS, *[Category.OPTIMIZER_STATES] * 4)
        for size, category, name in zip(form.sizes, tenure, names, strict=True):
            if disk is None:
                hollow = padding * size // max(1, form.numel)  # a rank may have no expert that is trained
                buffers.append(host.slab(size, torch.uint8, category, f"{name} {label}", hollow))
            else:
                self._extents.append(disk.reserve(size, category, f"{name} {label}"))
        if disk is None:
            self._pages = Pages(form, buffers)

    @property
    def on_disk(self) -> bool:
        """Whether it is kept on the disk."""
        return self._disk is not None

    @property
    def behind(self) -> bool:
        """Whether its last update has not run yet, because the host is behind."""
        return self._last is not None and self._last.behind

    @property
    def pages(self) -> Pages:
        """Its pages in host memory; on the disk, only inside of `fetched`."""
        assert self._pages is not None
        return self._pages

    def settle(self) -> None:
        """Wait for the updates that were begun."""
        if self._last is not None:
            self._last.wait_on_host()

    @contextmanager
    def fetched(self, writes: bool = False) -> Iterator[Pages]:
        """Bring the slice into host memory inside; if `writes`, it is written back to the disk."""
        self.settle()
        if self._disk is None or self._pages is not None:
            yield self.pages
            return
        pages = self._borrow()
        self._move(pages, write=False)
        self._pages = pages
        self.rebind(pages)
        try:
            yield pages
            if writes:
                self._move(pages, write=True)
        finally:
            self._pages = None
            self.rebind(None)
            self._give_back(pages)

    def update(
        self,
        parts: Sequence[SlicePiece],
        gradient: torch.Tensor,
        factor: float,
        out: torch.Tensor | None,
        after: Sequence[Task],
        weights_alone: bool = False,
    ) -> Task:
        """Begin an update with `gradient` [S] times `factor`.

        Args:
            parts: the updated elements, and their update rules; the rest of `out` gets the weights unchanged.
            out: [S] in the dtype of computation, for the new weights too.
            weights_alone: write `out`, and no states ([Note: weights first]).
        """

        own = self._pages

        def work() -> None:
            with self._brought(own) as pages:
                _update(parts, gradient, factor, out, pages, weights_alone)

        cause, nbytes = UPDATE if self._disk is None else DISK, sum(self.form.sizes) // (2 if weights_alone else 1)
        before = [*after, *([] if self._last is None else [self._last])]
        self._last = self._link.run(work, cause, self._label, nbytes, before)
        return self._last

    @contextmanager
    def _brought(self, own: Pages | None) -> Iterator[Pages]:
        """Its pages; for a slice on the disk, read before and written after."""
        if own is not None:
            yield own
            return
        pages = self._borrow()
        try:
            self._move(pages, write=False)
            yield pages
            self._move(pages, write=True)
        finally:
            self._give_back(pages)

    def lay_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Begin each [start, stop) of the slice with a scale of its own; 8-bit moments are encoded again for it."""
        if self.form.moments != "8bit" or [span[:2] for span in self._layout] == list(spans):
            return
        with self.fetched(writes=True) as pages:
            whole = [torch.zeros(self.form.numel), torch.zeros(self.form.numel)]
            for start, stop, block in self._layout:
                states = pages.states(start, stop, block)
                for values, moment in zip(whole, (states.exp_avg, states.exp_avg_sq), strict=True):
                    values[start:stop] = expanded(moment)
            block = 0
            self._layout = []
            for start, stop in spans:
                self._layout.append((start, stop, block))
                block -= (start - stop) // BLOCK
                self.keep_moments(start, stop, *(values[start:stop] for values in whole))

    def block_of(self, start: int) -> int:
        """The first scale of the span that begins at `start`."""
        return next((block for first, _, block in self._layout if first == start), 0)

    def moments(self, start: int, stop: int) -> dict[str, Moment]:
        """The moments of a span by torch's names; NaN while they are on the disk."""
        if self._pages is None:
            return dict.fromkeys(MOMENTS, torch.full((), float("nan")).expand(stop - start))
        states = self._pages.states(start, stop, self.block_of(start))
        return dict(zip(MOMENTS, (states.exp_avg, states.exp_avg_sq), strict=True))

    def keep_moments(self, start: int, stop: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """Set the moments of a span from fp32 values [stop - start]."""
        states = self.pages.states(start, stop, self.block_of(start))
        for moment, values in ((states.exp_avg, exp_avg), (states.exp_avg_sq, exp_avg_sq)):
            if isinstance(moment, Blockwise):
                moment.write(values)
            else:
                moment.copy_(values)

    def forget_moments(self, start: int, stop: int) -> None:
        """Zero the moments of a span, as before the first step."""
        nothing = torch.zeros(stop - start)
        self.keep_moments(start, stop, nothing, nothing)

    def _borrow(self) -> Pages:
        return Pages(self.form, [self._host.borrow(size) for size in self.form.sizes])

    def _give_back(self, pages: Pages) -> None:
        for buffer in pages.buffers:
            self._host.give_back(buffer)

    def _move(self, pages: Pages, write: bool) -> None:
        assert self._disk is not None
        for extent, buffer in zip(self._extents, pages.buffers, strict=True):
            self._disk.write(extent, buffer) if write else self._disk.read(extent, buffer)


def expanded(moment: Moment) -> torch.Tensor:
    """A moment as fp32 values [n]."""
    return moment.decode() if isinstance(moment, Blockwise) else moment.float()


def _update(
    parts: Sequence[SlicePiece],
    gradient: torch.Tensor,
    factor: float,
    out: torch.Tensor | None,
    pages: Pages,
    weights_alone: bool,
) -> None:
    into = out if weights_alone or (out is not None and out.dtype.itemsize < 4) else None
    for part in parts:
        part_slice = slice(part.start, part.stop)
        states = pages.states(part.start, part.stop, part.block)
        new = None if weights_alone else states
        adam_update(gradient[part_slice], factor, part.scalars, states, new, None if into is None else into[part_slice])
    if out is not None:  # of which the gradient in its place has been read
        for start, stop in gaps([] if into is None else [(part.start, part.stop) for part in parts], out.numel()):
            out[start:stop].copy_(pages.master[start:stop])


def gaps(parts: Iterable[tuple[int, int]], numel: int) -> Iterator[tuple[int, int]]:
    """The intervals of `numel` elements that no part covers; parts [start, stop) are in order."""
    end = 0
    for start, stop in parts:
        if start > end:
            yield end, start
        end = stop
    if end < numel:
        yield end, numel


class StagingMemory:
    """Host memory for new weights on their way to the device."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._left: list[tuple[Task, torch.Tensor]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes, reused from weights that have reached the device where there are any."""
        under_way = []
        for task, staging in self._left:
            if task.ended:
                self._host.give_back(staging)
            else:
                under_way.append((task, staging))
        self._left = under_way
        return self._host.borrow(nbytes)

    def leave(self, staging: torch.Tensor, task: Task) -> None:
        """Free memory from `take` once a task has ended."""
        self._left.append((task, staging))


class HostTiers:
    """The tiers below the device of one engine; keeps slices of parameters there for `zero.weights.Sliced`.

    Attributes:
        policy: the parts on each tier.
        host: its memory.
        link: to it.
        disk: the tier of the states, if not host memory.
        spare: gives the bytes, besides those taken now, for weights made before the verdict.
        ranks: that slice among themselves.
        brings: the purposes under which slices of parameters are moved for each use.
        adam: whether the host's own Adam replaces the user's optimizer.
    """

    brings: tuple[Purpose, ...] = (Purpose.PARAMETERS_UP,)

    def __init__(
        self, policy: Offload, mesh: Mesh, ledger: Ledger, optimizer: torch.optim.Optimizer, timeout: float
    ) -> None:
        self.policy, self.ranks = policy, mesh.ranks
        platform = mesh.platform
        self.host = platform.host(ledger, mesh.device)
        self.link = Transfers(platform.executor(mesh.device, timeout), platform.now)
        self.disk: Disk | None = None
        if policy.disk is not None:
            self.disk = platform.disk(Path(policy.disk), ledger, timeout)
        reason = stands_for(optimizer)
        self.adam = reason is None
        wanted = policy.for_adam
        self._needs_adam = f"{wanted[0]} is for the host's own Adam" if wanted else None
        if reason is not None and wanted:
            name = wanted[0].partition("=")[0]
            raise OptimizerError(
                f"{self._needs_adam}, and {reason}. Use torch.optim.AdamW or Adam as they are, or leave {name} out."
            )
        spare = self.host.room(local_ranks() or mesh.ranks)
        self.spare: Callable[[], int] = lambda: max(0, spare - ledger.total("host")) // SPARED

    def slab(self, numel: int, dtype: torch.dtype, label: str, padding: int) -> torch.Tensor:
        """Memory for a slice [numel] of parameters, whose last `padding` elements are padding."""
        tier = self.disk if self.policy.disk_parameters and self.disk is not None else self.host
        return tier.slab(numel, dtype, Category.PARAMETERS, label, padding)

    def drop(self, weights: Weights) -> None:
        """Free a slice of parameters in host memory."""
        self.host.free(weights.own)

    def bring(self, weights: Weights, into: torch.Tensor, purpose: Purpose) -> tuple[torch.Tensor, Task | None]:
        """Start to copy a slice of parameters into its part of the gathered buffer, after its update."""
        after = [] if (update := weights.update.take()) is None else [update]
        index = weights.flat.index
        padding = index.padding_in(*index.interval(weights.rank))
        evaluates = purpose is Purpose.GATHER_TO_EVALUATE
        up = Purpose.PARAMETERS_UP_TO_EVALUATE if evaluates else Purpose.PARAMETERS_UP
        return into, self.link.copy(weights.own, into, up, weights.flat.label, after, padding)

    def planned(self, weights: Weights) -> Planned:
        """A slice of parameters on the host or the disk."""
        index, tier = weights.flat.index, "disk" if self.policy.disk_parameters else "host"
        return on_lower_tier(
            index, tier, Category.PARAMETERS, index.slice_numel(weights.rank) * weights.flat.dtype.itemsize
        )

    def check_room(
        self, units: Sequence[Unit], going: set[int], compute: torch.dtype | None, states: int | Fraction, adds: bool
    ) -> None:
        """Refuse states that host memory cannot hold, before any is taken.

        Args:
            going: the numbers of the units that are offloaded.
            compute: the dtype of computation; None is each parameter's own.
            states: bytes of optimizer states per element.
            adds: whether gradients of several microbatches add up.

        Raises:
            BudgetExceeded: with the bytes needed and the bytes left. ModelError: parameters that the plan's host Adam
                cannot update.
        """
        policy, ranks, nbytes, on_disk = self.policy, self.ranks, 0, 0
        gradients = 2 if policy.delayed_update else 1
        for unit in units:
            for name, parameter in unit.parameters.items() if unit.number in going else ():
                size = (compute or parameter.dtype).itemsize
                if self._needs_adam is not None and parameter.requires_grad and size > 4:
                    raise ModelError(
                        f"{self._needs_adam}, which updates parameters of 32 bits or fewer, and '{name}' is "
                        f"{parameter.dtype}. Convert the model by model.float(), or leave that setting out."
                    )
                each = (max(size, 4) if adds else size) * gradients + (
                    size if policy.parameters and not policy.disk_parameters else 0
                )
                kept = 4 + {"fp32": states, "bf16": 4, "8bit": 2}[policy.moments]
                nbytes += (each + (kept if self.disk is None else 0)) * parameter.numel() // ranks
                on_disk += kept * parameter.numel() // ranks
        self.host.check_room(nbytes, "What is offloaded", local_ranks() or ranks)
        if self.disk is not None and on_disk > PROBED:
            _warn_if_slow(self.disk, on_disk)

    def slice_of(self, flat: Flat, numel: int, padding: int) -> HostSlice:
        """The host slice [numel] of a flat."""
        most = numel // BLOCK + 1 + len(flat.index.entries)  # of spans, each may end in a block that is not full
        blocks = most if self.policy.moments == "8bit" else 0
        form = Form(numel, self.policy.moments, blocks)
        return HostSlice(self.link, self.host, form, flat.label, padding, self.disk)


def agreed_on_host(units: Sequence[Unit], share: float, comm: Comm) -> set[int]:
    """The numbers of the units kept on the host on any rank of `comm`; a collective call where some are not.

    Ranks with parts of uneven size would choose different units.
    """
    chosen = units_on_host(units, share)
    return chosen if share >= 1 else chosen.union(*comm.agree_on(sorted(chosen), "units on the host"))


def units_on_host(units: Sequence[Unit], share: float) -> set[int]:
    """The numbers of the units kept on the host: the last ones, until they hold at least `share` of all elements.

    Their gradients come first in the backward and their weights are needed last, so they have the most time. The root,
    which the forward needs at once, is chosen last.
    """
    sizes = [sum(parameter.numel() for parameter in unit.parameters.values()) for unit in units]
    root = len(units) - 1
    chosen: set[int] = set()
    for number in [*reversed(range(root)), root]:
        if sum(sizes[n] for n in chosen) >= share * sum(sizes) * (1 - 1e-9):
            break
        chosen.add(number)
    return chosen


def _warn_if_slow(disk: Disk, nbytes: int) -> None:
    """Warn if reading and writing so many bytes in every step takes long."""
    read, write = disk.bandwidth()
    seconds = nbytes / read + nbytes / write
    if seconds > SLOW:
        warnings.warn(
            f"The disk at {disk.folder} reads {read / 1e9:.2g} and writes {write / 1e9:.2g} GB/s, so the optimizer's "
            f"states ({nbytes / 2**30:.3g} GiB a rank) will take about {seconds:.0f} s of every step. Take more tokens "
            f"per step, a faster disk, or keep fewer bytes there (offload.moments, more ranks).",
            stacklevel=6,
        )
