"""The ledger: every long-lived byte, by tier and category, with budget, current and peak.

Tables show only bytes that were taken through the ledger, so all buffers of the engine are made by
`Ledger.empty` or, where an allocation changes hands (a storage that is freed and refilled, states that
`torch.optim` makes itself), accounted for with `take` and `give`.

[Note: entered already] Inputs of a pipeline's chunks lie in scratch for messages, and masks or statistics may be
buffers of the model. Both are entered as such for as long as they live, so a graph that saves them holds nothing more.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.errors import BudgetExceeded
from zeroshard.memory.zeros import zeros


class Category(StrEnum):
    """The use of a byte."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER_WEIGHTS = "master weights"
    OPTIMIZER_STATES = "optimizer states"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"


MODEL_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.MASTER_WEIGHTS, Category.OPTIMIZER_STATES)
WAYS_OUT = {  # for a tier that is too small
    "device": "keep fewer bytes there (offload, recomputation, smaller microbatches), use more ranks, or a higher ZeRO "
    "stage",
    "host": "keep fewer bytes there (a smaller offload.fraction, offload.moments of fewer bytes, offload.disk), "
    "or use more ranks on more machines",
    "disk": "keep fewer bytes there (a smaller offload.fraction, offload.moments of fewer bytes), or use more ranks",
}


@dataclass(slots=True)
class Account:
    """Bytes of one category on one tier: current, peak, and the padding among them."""

    current: int = 0
    peak: int = 0
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One change on the device during a recorded step: seconds since the start, its label, and bytes by category."""

    t: float
    label: str
    nbytes: dict[str, int]


@dataclass(slots=True)
class Recording:
    """A running `Ledger.recorded`: its start and its events."""

    start: float
    events: list[Event]


class Ledger:
    """Accounts of one rank.

    Args:
        budgets: bytes that a tier (`"device"`, `"host"`, `"disk"`) may hold; a tier that is absent has no limit.
        now: seconds of the clock of recorded changes.

    Attributes:
        way_out: gives the way out of an error from the bytes needed on the device and its budget; None without one.
        saved: the storages of activations.
        reclaimers: each frees up to so many bytes of the device: prefetched, outgoing or recomputable tensors. They are
            called in order.
        measures: whether the device's budget may be exceeded: a first step runs to its end, to report its need.
    """

    def __init__(self, budgets: Mapping[str, int] | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self.budgets = dict(budgets or {})
        self._now = now
        self._accounts: dict[tuple[str, Category], Account] = {
            (tier, category): Account() for tier in WAYS_OUT for category in Category
        }
        self._held = dict.fromkeys(WAYS_OUT, 0)  # by tier
        self._recordings: list[Recording] = []
        self._entered: dict[int, StorageWeakRef] = {}  # which hold addresses, not memory
        self.saved = SavedStorages(self)
        self.way_out: Callable[[int, int], str] | None = None
        self.reclaimers: list[Callable[[int], None]] = []
        self.measures = False

    def empty(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        category: Category,
        label: str,
        padding: int = 0,
    ) -> torch.Tensor:
        """A new 1-D tensor of `numel` elements, zeroed, of which `padding` elements hold no data.

        Raises:
            BudgetExceeded: the tier's budget cannot hold it.
        """
        self.take(category, numel * dtype.itemsize, label, padding=padding * dtype.itemsize)
        return zeros(numel, dtype, device)

    def take(self, category: Category, nbytes: int, label: str, padding: int = 0, tier: str = "device") -> None:
        """Record `nbytes` (of which `padding` bytes hold no data) before they are allocated.

        The budget covers buffers of the engine and tensors saved by autograd. The latter are recorded only if the
        device has a budget, or while a step is recorded.

        Raises:
            BudgetExceeded: with the bytes on the tier by category.
        """
        self.check_room(category, nbytes, label, tier)
        account = self._accounts[tier, category]
        account.current += nbytes
        self._held[tier] += nbytes
        account.padding += padding
        account.peak = max(account.peak, account.current)
        if tier == "device":
            self._note(label)

    def check_room(self, category: Category, nbytes: int, label: str, tier: str = "device") -> None:
        """Refuse bytes that the tier's budget cannot hold.

        Raises:
            BudgetExceeded: with the bytes on the tier by category.
        """
        budget = self.budgets.get(tier)
        if budget is None or self.total(tier) + nbytes <= budget or (self.measures and tier == "device"):
            return
        for reclaim in self.reclaimers if tier == "device" else ():
            if (short := self.total() + nbytes - budget) > 0:
                reclaim(short)
        held_now = self.total(tier)
        if held_now + nbytes > budget:
            held = ", ".join(f"{name} {n:,}" for name, n in self.snapshot(tier).items() if n)
            way_out = f"Raise the budget, {WAYS_OUT[tier]}."
            if tier == "device" and self.way_out is not None:
                way_out = self.way_out(held_now + nbytes, budget)
            raise BudgetExceeded(
                f"{label} needs {nbytes:,} bytes of {category} on the {tier}, which holds {held_now:,} of its "
                f"budget of {budget:,} ({held or 'nothing'}).",
                way_out,
            )

    def give(self, category: Category, nbytes: int, label: str, padding: int = 0, tier: str = "device") -> None:
        """Remove `nbytes` that were recorded with `take` and are free again."""
        account = self._accounts[tier, category]
        assert nbytes <= account.current, f"{label} gives back {nbytes} bytes of {category}, {account.current} are held"
        account.current -= nbytes
        self._held[tier] -= nbytes
        account.padding -= padding
        if tier == "device":
            self._note("free " + label)

    def remember(self, tensor: torch.Tensor) -> None:
        """Register recorded scratch or a buffer of the model: an activation in it is no further byte."""
        storage = tensor.untyped_storage()
        self._entered[storage._cdata] = StorageWeakRef(storage)

    def is_entered(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory registered with `remember`."""
        found = self._entered.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def account(self, category: Category, tier: str = "device") -> Account:
        """The account of one category."""
        return self._accounts[tier, category]

    def snapshot(self, tier: str = "device") -> dict[str, int]:
        """Current bytes by category."""
        return {str(category): self._accounts[tier, category].current for category in Category}

    def total(self, tier: str = "device") -> int:
        """Current bytes of all categories."""
        return self._held[tier]

    def model_states(self, tier: str = "device") -> int:
        """Current bytes of parameters, gradients, master weights and optimizer states."""
        return sum(self._accounts[tier, category].current for category in MODEL_STATES)

    def reset_peaks(self) -> None:
        """Reset every peak to the current value."""
        for account in self._accounts.values():
            account.peak = account.current

    @property
    def limits_activations(self) -> bool:
        """Whether tensors saved by autograd must be recorded, because the device has a budget."""
        return "device" in self.budgets

    @property
    def recording(self) -> bool:
        """Whether a recording is running."""
        return bool(self._recordings)

    @contextmanager
    def recorded(self, events: list[Event]) -> Iterator[None]:
        """Add to `events` every change on the device inside, after one event called "start"."""
        recording = Recording(self._now(), events)
        events.append(Event(0.0, "start", self.snapshot()))
        self._recordings.append(recording)
        try:
            yield
        finally:
            self._recordings = [other for other in self._recordings if other is not recording]

    def _note(self, label: str) -> None:
        for recording in self._recordings:
            recording.events.append(Event(self._now() - recording.start, label, self.snapshot()))


class SavedStorages:
    """Counts the holders of each storage among a ledger's activations: it counts once ([Note: entered already])."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tensors: dict[int, int] = {}

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor adds to the activations ([Note: entered already])."""
        return tensor.layout is torch.strided and not self._ledger.is_entered(tensor)

    def change(self, storage: torch.UntypedStorage, by: int) -> None:
        """Record a storage with its first tensor; remove it with its last."""
        key = storage._cdata
        before = self._tensors.get(key, 0)
        if before == 0:
            self._ledger.take(Category.ACTIVATIONS, storage.nbytes(), "save for backward")
        self._tensors[key] = before + by
        if before + by == 0:
            del self._tensors[key]
            self._ledger.give(Category.ACTIVATIONS, storage.nbytes(), "saved activation")


class Arena:
    """Scratch buffers that are made once and reused, such as for gradients in flight and for collectives.

    `take` gives the smallest free buffer that is large enough, or a new one, so that nothing is allocated after the
    first steps.

    [Note: C_B] Constant buffers of ZeRO-R (1910.02054, section 6.2): the arena is as large as the largest unit needs,
    whatever the number of units, since a unit returns its buffers before the next but one takes them.

    Args:
        ledger: records the buffers.
        allocate: makes a buffer of a number of elements.
    """

    def __init__(self, ledger: Ledger, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self.ledger = ledger
        self._allocate = allocate
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """An uninitialised 1-D tensor of `numel` elements; return it with `give`."""
        nbytes = numel * dtype.itemsize
        fitting = [block for block in self._free if block.numel() >= nbytes]
        if fitting:
            block = min(fitting, key=torch.Tensor.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            self.ledger.take(Category.BUFFERS, nbytes, f"scratch for {label}")
            block = self._allocate(nbytes, torch.uint8)
            self.ledger.remember(block)
        tensor = block[:nbytes].view(dtype)
        self._lent[id(tensor)] = block
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor from `take`."""
        self._free.append(self._lent.pop(id(tensor)))
