"""Checks that model states fit device and machine, and one error for memory that runs out later.

Torch, Python and the system raise errors of their own, some without a limit or a way out. A limit that the kernel
enforces by killing, such as that of a cgroup, raises no error: `check_machine` refuses states beyond it beforehand.
"""

import errno
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, local_ranks
from zeroshard.comm.over_budget import announce_over_budget
from zeroshard.errors import BudgetExceeded, BudgetExceededElsewhere, ZeroshardError
from zeroshard.memory import find_rooms
from zeroshard.memory.ledger import WAYS_OUT, Category, Ledger
from zeroshard.offload.tiers import HostTiers
from zeroshard.optim import StateLayout
from zeroshard.parts.part import Part
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.plan import Plan
from zeroshard.platform.accelerator import is_accelerator
from zeroshard.precision.cast import Precision
from zeroshard.units import Unit
from zeroshard.validation.fitting import Fitting
from zeroshard.zero import Residency
from zeroshard.zero.byte_formulas import BytesPerParameter, state_bytes

REFUSED = re.compile(r"can('|no)t allocate memory|bad_alloc|can't start new thread|not enough memory", re.I)
REQUESTED = re.compile(r"tried to allocate (\d+) bytes")
RAISE = "Raise that limit or free memory"

E = TypeVar("E")
P = ParamSpec("P")
R = TypeVar("R")


def raises_budget_exceeded(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Make a method of an engine raise `BudgetExceeded`, on all ranks, if the system refuses memory."""

    @functools.wraps(method)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except (MemoryError, RuntimeError, OSError) as error:
            if isinstance(error, ZeroshardError) or not is_refusal(error):
                if isinstance(error, BudgetExceeded):
                    _announce(self, error)
                raise
            found = exceeded(error, method.__name__, getattr(self, "ledger", None))
            _announce(self, found)
            raise found from error

    return call


def _announce(engine: object, error: BudgetExceeded) -> None:
    mesh = getattr(engine, "mesh", None)
    if mesh is not None:
        announce_over_budget(mesh, error)


def raise_on_all_ranks(comm: Comm, check: Callable[[], None]) -> None:
    """Check this rank's memory, and raise on all ranks if one of them has too little; a collective call.

    Raises:
        BudgetExceeded: with the rank, if it is another.
    """
    own: BudgetExceeded | None = None
    try:
        check()
    except BudgetExceeded as error:
        own = error
    found = comm.agree_on(None if own is None else str(own), "room for the states")
    rank = next((rank for rank, text in enumerate(found) if text is not None), None)
    if rank is None:
        return
    own = own or BudgetExceededElsewhere(f"Rank {rank} is over its budget: {found[rank]}")
    own.shared = True
    raise own


def is_refusal(error: BaseException) -> bool:
    """Whether an error reports that host memory could not be allocated."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or REFUSED.search(str(error)) is not None


def exceeded(error: BaseException, method: str, ledger: Ledger | None) -> BudgetExceeded:
    """The error with the bytes needed, the tightest limit, and the bytes that the engine holds."""
    requested = REQUESTED.search(str(error))
    call = {"__init__": "making the engine", "__call__": "the forward"}.get(method, f"engine.{method}()")
    needed = f"{int(requested[1]):,} more bytes" if requested else "more memory"
    rooms = sorted(find_rooms(), key=lambda room: room.nbytes)
    found = f"{rooms[0].limit} leaves {max(0, rooms[0].nbytes):,}" if rooms else "the system gave no more"
    tiers = {tier: ledger.snapshot(tier) for tier in ("device", "host")} if ledger else {}
    held = [f"{name} {n:,} on the {tier}" for tier, names in tiers.items() for name, n in names.items() if n]
    return BudgetExceeded(
        f"Memory ran out in {call}, which needed {needed}; {found}. The engine holds {', '.join(held) or 'nothing'}.",
        f"{RAISE}, {WAYS_OUT['device']}.",
    )


def room_to_train(ledger: Ledger, plan: Plan, layout: StateLayout) -> Callable[[Sequence[tuple[Part, int]]], None]:
    """A check of the room for gradients, master weights and states of frozen parameters that are to be trained.

    It takes parts with so many elements each, and raises `BudgetExceeded`.
    """
    kept = int("optimizer" not in plan.offloading.kinds)  # on the device

    def check(parts: Sequence[tuple[Part, int]]) -> None:
        needed = 0
        for part, numel in parts:
            width, ranks = part.flat.dtype.itemsize, part.place.slices.comm.mesh.ranks
            each = BytesPerParameter(0, width, 4 * kept * (width < 4), kept * layout.bytes_per_element)
            needed += ceil(state_bytes(numel, ranks, plan.zero, each).total)
        if needed:
            ledger.check_room(Category.GRADIENTS, needed, "training unfrozen parameters, with their states,")

    return check


def check_machine(mesh: Mesh, nbytes: int, what: str) -> None:
    """Refuse states on a CPU that do not fit the machine, its cgroups or the limits of this process.

    Args:
        nbytes: that this rank will allocate.
        what: the states, in the plural, for the message.

    Raises:
        BudgetExceeded: with the tightest limit.
    """
    if is_accelerator(mesh.device):
        return
    ranks = local_ranks() or mesh.ranks
    for room in sorted(mesh.platform.rooms(), key=lambda room: room.nbytes):
        count = room.takers(ranks)
        if nbytes * count > room.nbytes:
            each = f" on each of {count} ranks" if count > 1 else ""
            raise BudgetExceeded(
                f"{what} need {nbytes:,} more bytes of memory{each}; {room.limit} leaves {max(0, room.nbytes):,}.",
                f"{RAISE}, {WAYS_OUT['device']}.",
            )


Groups = dict[nn.Parameter, int]  # the optimizer group of each trained parameter


@dataclass(frozen=True, slots=True)
class RoomChecks:
    """Refuses states that do not fit into memory.

    Attributes:
        mesh: the ranks that slice dense parameters.
        layout: of the optimizer's states.
    """

    plan: Plan
    mesh: Mesh
    ledger: Ledger
    stage: Stage | WholeModel
    layout: StateLayout

    def all(
        self,
        units: list[Unit],
        groups: Groups,
        itemsize: Callable[[nn.Parameter], int],
        on_host: set[int],
        tiers: HostTiers | None,
    ) -> None:
        """Run `budget` and `machine`."""
        self.budget(units, groups, itemsize)
        self.machine(units, groups, on_host, tiers)

    def budget(self, units: list[Unit], groups: Groups, itemsize: Callable[[nn.Parameter], int]) -> None:
        """Refuse a budget that the weights alone exceed; set the ledger's way out for later refusals.

        Args:
            itemsize: bytes of an element of a parameter in the dtype of computation.

        Raises:
            BudgetExceeded: with the least that they need.
        """
        budget, ranks, offloads = self.plan.device_budget, self.mesh.ranks, self.plan.offloading.parameters
        if budget is None:
            return
        sizes = [sum(p.numel() * itemsize(p) for p in unit.parameters.values()) for unit in units]
        if self.stage.pipeline is None:
            numel = sum(p.numel() for unit in units for p in unit.parameters.values())
            trained = sum(p.numel() for unit in units for p in unit.parameters.values() if p in groups)
            width = sum(sizes) // max(1, numel)
            each = BytesPerParameter(width, width, 4 if width < 4 else 0, self.layout.bytes_per_element)
            self.ledger.way_out = Fitting(self.plan, ranks, trained, numel - trained, tuple(sizes), each).way_out
        gathered, at_once = self.stage.gathered_at_once(sizes)
        needed, what = sum(sizes), "the weights"
        if Residency.of_stage(self.plan.zero).slice_parameters and (ranks > 1 or offloads):
            needed, what = (0 if offloads else sum(sizes) // ranks) + gathered, at_once
        if needed > budget:
            way_out = "Set it to more than that, with gradients and activations on top, or use more stages."
            if self.ledger.way_out is not None:
                way_out = self.ledger.way_out(needed, budget)
            raise BudgetExceeded(f"device_memory is {budget:,} bytes, and {what} take {needed:,}.", way_out)

    def machine(self, units: list[Unit], groups: Groups, on_host: set[int], tiers: HostTiers | None) -> None:
        """Refuse states that the machine cannot hold; some kernels would kill the process in the first step.

        Args:
            on_host: the numbers of the units that are updated on the host.
            tiers: the tiers there.

        Raises:
            BudgetExceeded: with the limit that is met.
        """
        stay = [unit for unit in units if unit.number not in on_host]
        numel = sum(p.numel() for unit in stay for p in unit.parameters.values() if p in groups)
        slices = self.mesh.ranks if self.plan.zero else 1
        check_machine(self.mesh, numel * self.layout.bytes_per_element // slices, "The optimizer's states")
        if tiers is not None:
            compute, adds = Precision.named(self.plan.precision).compute, self.plan.microbatches > 1
            tiers.check_room(units, on_host, compute, self.layout.bytes_per_element, adds)
