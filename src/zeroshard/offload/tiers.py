"""The tiers below the device: host memory, a disk, the link to them, and which units are kept there.

[Note: L2L] Layer-to-layer execution (Pudipeddi et al., 2002.05645): a slice of parameters stays below the device, and
`zero.weights.Sliced` brings it for its unit's forward and backward, the next one beside them; so the device holds two
units and the root, whatever the depth. `offload.updates` updates it where it is.
"""

import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, local_ranks
from zeroshard.errors import ModelError, OptimizerError
from zeroshard.memory import Disk
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.memory.transfers import Task, Transfers
from zeroshard.offload.policy import Offload
from zeroshard.offload.slices import Form, HostSlice
from zeroshard.optim.host_adam import stands_for
from zeroshard.optim.moments import BLOCK
from zeroshard.parts.planned import Planned, on_lower_tier
from zeroshard.parts.weights import Weights
from zeroshard.traffic import Purpose
from zeroshard.units import Flat, Unit

PROBED, SLOW = 2**28, 2.0  # bytes from which a disk's speed is measured; seconds of a step that are worth a warning
SPARED = 2  # of the host memory that states leave free, the part that speculations may take


class HostTiers:
    """The tiers below the device of one engine; keeps slices of parameters there for `zero.weights.Sliced`.

    Attributes:
        policy: what is kept where.
        host: its memory.
        link: to it.
        disk: where states live, if not in host memory.
        spare: gives the bytes, beside those taken now, in which weights may be made that may be wrong.
        ranks: that slice among themselves.
        brings: the purposes under which slices of parameters are moved for each use.
        adam: whether the host's own Adam takes the place of the user's optimizer.
    """

    brings: tuple[Purpose, ...] = (Purpose.PARAMETERS_UP,)

    def __init__(
        self, policy: Offload, mesh: Mesh, ledger: Ledger, optimizer: torch.optim.Optimizer, timeout: float
    ) -> None:
        self.policy, self.ranks = policy, mesh.ranks
        platform = mesh.platform
        self.host = platform.host(ledger, mesh.device)
        self.link = Transfers(platform.executor(mesh.device, timeout), mesh.now)
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
        """A place for a slice [numel] of parameters, of which `padding` elements hold nothing."""
        tier = self.disk if self.policy.disk_parameters and self.disk is not None else self.host
        return tier.slab(numel, dtype, Category.PARAMETERS, label, padding)

    def bring(self, weights: Weights, into: torch.Tensor, purpose: Purpose) -> tuple[torch.Tensor, Task | None]:
        """Start to copy a slice of parameters into its part of the gathered buffer, after its update."""
        after, weights.update = [] if weights.update is None else [weights.update], None
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
        """Refuse states that host memory cannot hold, before any of it is taken.

        Args:
            going: the numbers of the units that are offloaded.
            compute: the dtype of computation; None is each parameter's own.
            states: bytes of optimizer states per element.
            adds: whether gradients of several microbatches add up.

        Raises:
            BudgetExceeded: with what is needed and what there is. ModelError: parameters that the plan's host Adam
                does not update.
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


def _warn_if_slow(disk: Disk, nbytes: int) -> None:
    """Say what reading and writing so many bytes in every step will take."""
    read, write = disk.bandwidth()
    seconds = nbytes / read + nbytes / write
    if seconds > SLOW:
        warnings.warn(
            f"The disk at {disk.folder} reads {read / 1e9:.2g} and writes {write / 1e9:.2g} GB/s, so the optimizer's "
            f"states ({nbytes / 2**30:.3g} GiB a rank) will take about {seconds:.0f} s of every step. Take more tokens "
            f"per step, a faster disk, or keep fewer bytes there (offload.moments, more ranks).",
            stacklevel=6,
        )


def agreed_on_host(units: Sequence[Unit], share: float, comm: Comm) -> set[int]:
    """The numbers of the units that live on the host on any rank of `comm`; a collective call where some do not.

    Ranks with parts of uneven size would choose unlike units.
    """
    chosen = units_on_host(units, share)
    return chosen if share >= 1 else chosen.union(*comm.agree_on(sorted(chosen), "units on the host"))


def units_on_host(units: Sequence[Unit], share: float) -> set[int]:
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
