"""Savers: how tensors that autograd saves for the backward are kept, moved or compressed.

They stand in a list: the first saver that takes a tensor has it, and tensors that none takes stay on the device.
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
    """Takes in saved tensors and gives them back: keeps, moves or compresses them.

    Several stand in a list, and the first that takes a tensor has it. Tensors that are the same view of the same values
    are stored and counted once.

    Attributes:
        moves: whether it need be asked at all; one that keeps everything need not.
        how: what it does with tensors.
        varies: whether bytes on the device depend on the values of tensors.
    """

    moves: bool
    how: str
    varies: bool

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; returns the handle that `unpack` takes, or None to leave the tensor to the next saver.

        With a `Kept` one the tensor stays where it is, whatever the next savers would do. A saver enters on the ledger
        what it holds on the device, but for those, which the engine counts.
        """

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device; of a handle that this saver returned."""

    def settle(self) -> None:
        """A step ends: wait for copies under way, and drop prefetched tensors that no backward read."""


class Savers:
    """Asks savers in their order, as one saver.

    Args:
        savers: the first that takes a tensor has it; one that none takes stays where it is.

    Attributes:
        moves: whether any does more than keep.
        asked: those that are asked now.
        choices: those that may be asked together, where that is decided block by block: each alone, or all.
    """

    def __init__(self, savers: Sequence[Saver]) -> None:
        self._savers = savers
        self.asked: Sequence[Saver] = savers
        self.choices = [[saver] for saver in savers if saver.moves] + ([savers] if len(savers) > 1 else [])
        self.moves = any(saver.moves for saver in savers)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take in a tensor; returns what `unpack` takes. A `Kept` one stays where it is."""
        for saver in self.asked:
            handle = saver.pack(tensor)
            if handle is not None:
                return handle if isinstance(handle, Kept) else _Packed(saver, handle)
        return Kept(tensor)

    def ask_all(self) -> None:
        """Ask all savers from now on."""
        self.asked = self._savers

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, on its device."""
        if isinstance(saved, _Packed):
            return saved.saver.unpack(saved.handle)
        kept: Kept = saved
        return kept.tensor()

    def settle(self) -> None:
        """A step ends: wait for copies under way, and drop prefetched tensors that no backward read."""
        for saver in self._savers:
            saver.settle()


class _Packed:
    """A tensor that a saver of the list has, with its handle."""

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
    """What a plan asks of savers.

    Attributes:
        compress: names of codes.
        tier: where activations go that are offloaded, if any are.
        window: copies to the host under way at a time.
        key: of random numbers, for the step under way.
    """

    compress: tuple[str, ...]
    tier: HostTier | None
    window: int
    key: Callable[[], int]


def savers_of(plan: SavingPlan, model: nn.Module, ledger: Ledger) -> Savers:
    """The savers that a plan asks for, compression before offload; what none of them takes stays on the device.

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
