"""Savers: objects that keep, move or compress autograd's saved tensors.

They form a list: the first saver that takes a tensor stores it, and other tensors stay on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.transfers import Transfers
from zeroshard.saved.codes.lossy import lossy_of
from zeroshard.saved.compression import Allowed, CompressedStore
from zeroshard.saved.gist import GistMode, enter_forwards
from zeroshard.saved.kept import Kept
from zeroshard.saved.offload import ActivationStore
from zeroshard.saved.storages import SMALLEST

LOSSLESS = ("binarize", "sparse", "inplace")  # names of `compress` that keep all bits


class Saver(Protocol):
    """Stores saved tensors and returns them: keeps, moves or compresses them.

    Equal views of the same values are stored and counted once.

    Attributes:
        moves: whether it takes any tensors.
        how: a description, for messages.
        varies: whether bytes on the device depend on the values of tensors.
    """

    moves: bool
    how: str
    varies: bool

    def pack(self, tensor: torch.Tensor) -> Any:
        """Store a tensor; returns a handle for `unpack`, or None to leave the tensor to the next saver.

        With a `Kept` handle the tensor stays on the device, without the next savers. A saver enters its bytes on the
        device into the ledger, except those, which the engine counts.
        """

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor of a handle of this saver, on its device."""

    def settle(self) -> None:
        """End a step: wait for pending copies, and drop prefetched tensors that no backward read."""


class Savers:
    """A list of savers as one saver.

    Args:
        savers: the first that takes a tensor stores it; other tensors stay on the device.

    Attributes:
        moves: whether any takes tensors.
        asked: the savers in use now.
        choices: sets of savers for a decision block by block: each alone, or all.
    """

    def __init__(self, savers: Sequence[Saver]) -> None:
        self._savers = savers
        self.asked: Sequence[Saver] = savers
        self.choices = [[saver] for saver in savers if saver.moves] + ([savers] if len(savers) > 1 else [])
        self.moves = any(saver.moves for saver in savers)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Store a tensor; returns a handle for `unpack`. A `Kept` one stays on the device."""
        for saver in self.asked:
            handle = saver.pack(tensor)
            if handle is not None:
                return handle if isinstance(handle, Kept) else _Packed(saver, handle)
        return Kept(tensor)

    def ask_all(self) -> None:
        """Use all savers from now on."""
        self.asked = self._savers

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device."""
        if isinstance(saved, _Packed):
            return saved.saver.unpack(saved.handle)
        kept: Kept = saved
        return kept.tensor()

    def settle(self) -> None:
        """End a step: wait for pending copies, and drop prefetched tensors that no backward read."""
        for saver in self._savers:
            saver.settle()


class _Packed:
    """A handle with its saver."""

    __slots__ = ("handle", "saver")

    def __init__(self, saver: Saver, handle: Any) -> None:
        self.saver, self.handle = saver, handle


class HostTier(Protocol):
    """Host memory and the link to it."""

    @property
    def host(self) -> HostMemory:
        """The memory."""

    @property
    def link(self) -> Transfers:
        """Copies between the device and it."""


@dataclass(frozen=True)
class SavingPlan:
    """A plan's settings of savers.

    Attributes:
        compress: names of codes.
        tier: host tier of offloaded activations, or None.
        window: number of concurrent copies to the host.
        key: returns the key of the current step's random numbers.
    """

    compress: tuple[str, ...]
    tier: HostTier | None
    window: int
    key: Callable[[], int]


def savers_of(plan: SavingPlan, model: nn.Module, ledger: Ledger) -> Savers:
    """The savers of a plan, compression before offload; other tensors stay on the device.

    Args:
        model: whose forwards save the tensors.
        ledger: counts what savers hold.
    """
    savers: list[Saver] = []
    if plan.compress:
        savers.append(_compression(plan.compress, plan.key, model, ledger))
    if plan.tier is not None:
        savers.append(ActivationStore(plan.tier.link, plan.tier.host, ledger, window=plan.window))
    return Savers(savers)


def _compression(names: tuple[str, ...], key: Callable[[], int], model: nn.Module, ledger: Ledger) -> CompressedStore:
    lossy = next((lossy_of(name, key) for name in names if name not in LOSSLESS), None)
    store = CompressedStore(Allowed("binarize" in names, "sparse" in names, lossy), ledger)
    if lossy is not None or "binarize" in names:
        enter_forwards(model, GistMode(store, "binarize" in names, SMALLEST), "inplace" in names)
    return store
