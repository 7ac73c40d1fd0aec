"""What an engine has below its device: host memory, a disk, the link to them, and which units live there."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from zeroshard.errors import ModelError, OptimizerError, PlanError
from zeroshard.ledger import Category, Ledger
from zeroshard.link import Link, Span
from zeroshard.mesh import Mesh, local_ranks
from zeroshard.offload.host_adam import stands_for
from zeroshard.offload.moments import BLOCK
from zeroshard.offload.slices import Form, HostSlice, Shadows
from zeroshard.plan import Plan
from zeroshard.tiers import Disk, HostMemory, Room
from zeroshard.units import Flat, Unit

PROBED, SLOW = 2**28, 2.0  # bytes from which a disk's speed is measured; seconds of a step that are worth a warning
SPARED = 4  # of the host memory that is free at the start, the part that shadow pages may take


class Below:
    """The tiers below the device of one engine.

    Attributes:
        host: its memory.
        link: to it.
        disk: where states live, if not in host memory.
        shadows: pages for updates that may have to be undone.
        adam: whether the host's own Adam takes the place of the user's optimizer.
    """

    def __init__(self, plan: Plan, mesh: Mesh, ledger: Ledger, optimizer: torch.optim.Optimizer) -> None:
        self._plan, self._mesh = plan, mesh
        platform = mesh.platform
        self.host = platform.host(ledger, mesh.device)
        self.link = Link(platform.executor(mesh.device, plan.timeout), mesh.now)
        self.disk: Disk | None = None
        if plan.offload_disk is not None:
            self.disk = platform.disk(Path(plan.offload_disk), ledger, plan.timeout)
        reason = stands_for(optimizer)
        self.adam = reason is None
        wanted = [name for name, off in (("offload_disk", None), ("delayed_update", False), ("offload_moments", "fp32"))
                  if getattr(plan, name) != off]  # fmt: skip
        self._needs_adam = f"{wanted[0]}={getattr(plan, wanted[0])!r} is for the host's own Adam" if wanted else None
        if reason is not None and wanted:
            raise OptimizerError(
                f"{self._needs_adam}, and {reason}. Use torch.optim.AdamW or Adam as they are, or leave {wanted[0]} "
                f"out."
            )
        spare = _spare(platform.rooms(), local_ranks() or mesh.ranks)
        self.shadows = Shadows(self.host, spare // SPARED if plan.speculate else 0)

    def parameter_slab(self, numel: int, dtype: torch.dtype, label: str, padding: int) -> torch.Tensor:
        """A place for a slice [numel] of parameters, of which `padding` elements hold nothing."""
        tier = self.disk if self._plan.offload_disk_parameters and self.disk is not None else self.host
        return tier.slab(numel, dtype, Category.PARAMETERS, label, padding)

    @property
    def parts(self) -> tuple[Link, HostMemory]:
        """The link and the host's memory."""
        return self.link, self.host

    def check_room(self, units: Sequence[Unit], going: set[int], compute: torch.dtype | None, states: int) -> None:
        """Refuse what host memory cannot hold, before any of it is taken.

        Args:
            going: the numbers of the units that are kept below.
            compute: the dtype of computation; None is each parameter's own.
            states: bytes of optimizer states per element.

        Raises:
            BudgetExceeded: with what is needed and what there is. ModelError: parameters that the plan's host Adam
                does not update.
        """
        plan, ranks, nbytes, on_disk = self._plan, self._mesh.ranks, 0, 0
        gradients = 2 if plan.delayed_update else 1
        sums = plan.microbatches > 1
        for unit in units:
            for name, parameter in unit.parameters.items() if unit.number in going else ():
                size = (compute or parameter.dtype).itemsize
                if self._needs_adam is not None and parameter.requires_grad and size > 4:
                    raise ModelError(
                        f"{self._needs_adam}, which updates parameters of 32 bits or fewer, and '{name}' is "
                        f"{parameter.dtype}. Convert the model by model.float(), or leave that setting out."
                    )
                each = (max(size, 4) if sums else size) * gradients + (
                    size if "parameters" in plan.offloads and not plan.offload_disk_parameters else 0
                )
                kept = 4 + {"fp32": states, "bf16": 4, "8bit": 2}[plan.offload_moments]
                nbytes += (each + (kept if self.disk is None else 0)) * parameter.numel() // ranks
                on_disk += kept * parameter.numel() // ranks
        self.host.check_room(nbytes, "What is offloaded", local_ranks() or ranks)
        if self.disk is not None and on_disk > PROBED:
            _warn_if_slow(self.disk, on_disk)

    def slice_of(self, flat: Flat, numel: int, padding: int) -> HostSlice:
        """The home of a slice [numel] of a flat."""
        most = numel // BLOCK + 1 + len(flat.index.entries)  # of spans, each may end in a block that is not full
        blocks = most if self._plan.offload_moments == "8bit" else 0
        form = Form(numel, self._plan.offload_moments, blocks, as_on_cpus=self._mesh.device.type == "cpu")
        return HostSlice(self.link, self.host, form, flat.label, padding, self.disk)


def _warn_if_slow(disk: Disk, nbytes: int) -> None:
    """Say what reading and writing so many bytes in every step will take."""
    read, write = disk.bandwidth()
    seconds = nbytes / read + nbytes / write
    if seconds > SLOW:
        warnings.warn(
            f"The disk at {disk.folder} reads {read / 1e9:.2g} and writes {write / 1e9:.2g} GB/s, so the optimizer's "
            f"states ({nbytes / 2**30:.3g} GiB a rank) will take about {seconds:.0f} s of every step. Take more tokens "
            f"per step, a faster disk, or keep fewer bytes there (offload_moments, more ranks).",
            stacklevel=6,
        )


def _spare(rooms: Sequence[Room], ranks: int) -> int:
    """Bytes of host memory that each of the machine's ranks may still take."""
    return min((room.nbytes // (ranks if room.shared else 1) for room in rooms), default=0)


def units_below(units: Sequence[Unit], share: float) -> set[int]:
    """The numbers of the units that live on the host: the last ones, until they hold at least `share` of all elements.

    Their gradients come first in the backward and their weights are needed last, so they have the most time. The root,
    which the forward needs at once, is the last to go.
    """
    sizes = [sum(parameter.numel() for parameter in unit.parameters.values()) for unit in units]
    root = len(units) - 1
    chosen: set[int] = set()
    for number in [*reversed(range(root)), root]:
        if sum(sizes[n] for n in chosen) >= share * sum(sizes) * (1 - 1e-9):
            break
        chosen.add(number)
    return chosen


def traced(below: Below | None) -> AbstractContextManager[list[Span]]:
    """As `Link.traced`.

    Raises:
        PlanError: nothing is offloaded.
    """
    if below is None:
        raise PlanError("engine.tracing() is for offloaded plans; set offload, or use torch.profiler.")
    return below.link.traced()


def limit_device(device: torch.device, budget: int | None) -> None:
    """Let torch's allocator refuse what is beyond a GPU's budget; elsewhere the ledger alone does."""
    if device.type == "cuda" and budget is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
