"""What a block saves in a measured forward: kept until the block has been measured, whatever the plan does with it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.recompute.auto.meter import BlockMeter
from zeroshard.recompute.auto.remade import NotSaved, RemadeCosts, costs_of, epsilons_of, next_number
from zeroshard.recompute.segments import Hooks, Region, SavedSlot, read
from zeroshard.saved.kept import Kept
from zeroshard.units.hooks import place_of


class SavedWatch:
    """Stands around the hooks of a forward.

    Args:
        region: the forward.
        meter: told of each tensor that is saved.
        hooks: what takes them.
        is_new: whether a tensor takes bytes that nothing else has.
    """

    def __init__(self, region: Region, meter: BlockMeter, hooks: Hooks, is_new: Callable[[Tensor], bool]) -> None:
        self._region, self._meter, self._inner, self._is_new = region, meter, hooks, is_new
        self._saved: list[tuple[int, Tensor, bool]] = []  # its number, and whether it is new
        self._slots: list[SavedSlot] = []  # that hold their tensors for the measurement alone
        self._since, self._reads = next_number(), False

    @property
    def hooks(self) -> Hooks:
        """What takes saved tensors now."""
        return self._pack, self._unpack

    @property
    def tensors(self) -> list[Tensor]:
        """The saved tensors, but for weights."""
        return [tensor for _, tensor, _ in self._saved if place_of(tensor) != -1]

    def remade(self, output: Any, now: Callable[[], float]) -> tuple[RemadeCosts, ...]:
        """The storages that the block, which has returned its output, need not keep."""
        out = {place_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
        within = [(number, tensor) for number, tensor, new in self._saved if new and place_of(tensor) not in out]
        block: nn.Module = self._region.call.module
        self._reads = True
        try:
            return costs_of(within, self._since, epsilons_of(block), now)
        finally:
            self._reads = False

    def end(self) -> None:
        """Let go everything: the hooks live as long as the graph, which would hold itself through them."""
        for slot in self._slots:
            slot.held = None
        self._slots.clear()
        self._saved.clear()

    def _pack(self, tensor: Tensor) -> Any:
        new, slot = self._is_new(tensor), self._inner[0](tensor)
        if isinstance(slot, SavedSlot):
            number = len(self._region.slots) - 1
            self._meter.saves(tensor, number, new)
            self._saved.append((number, tensor, new))
            if slot.held is None:
                slot.held = Kept(tensor)
                self._slots.append(slot)
        return slot

    def _unpack(self, slot: Any) -> Tensor:
        if not self._reads:
            return self._inner[1](slot)
        if not isinstance(slot, SavedSlot):  # a weight, which may have to be gathered
            raise NotSaved
        return read(slot)
