"""Forwards that wait for their backward: their number, and the dropping of kept blocks if memory runs short.

A block that a decision keeps can be computed again as well: its input and its random numbers are kept beside what it
saves. So where something else finds no room on the device, blocks are dropped, the oldest first, whose backward comes
last, and each that was dropped is computed again from its input when its backward reads it (as in Dynamic Tensor
Rematerialization, Kirisame et al., 2006.09616, with blocks for tensors and the order of backwards for its heuristic).
Decisions say what is the fastest; dropping keeps a run within its budget where forwards take more than was measured.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from zeroshard.errors import BudgetExceeded
from zeroshard.memory.ledger import Ledger
from zeroshard.recompute.auto.remade import remade
from zeroshard.recompute.segments import BlockSegment, Region, SavedSlot


class ForwardGraph:
    """Lives as long as a part of the graph of one forward."""

    __slots__ = ("__weakref__",)


class WaitingForwards:
    """Forwards whose graphs are alive.

    Args:
        ledger: asks for room.
        drops: whether kept blocks may be dropped.

    Attributes:
        drops: as given.
        varies: whether forwards were seen to take more than was measured.
    """

    def __init__(self, ledger: Ledger, drops: bool) -> None:
        self.drops, self.varies = drops, False
        self._ledger = ledger
        self._graphs: WeakSet[ForwardGraph] = WeakSet()
        self._kept: WeakKeyDictionary[Region, None] = WeakKeyDictionary()  # in the order of their forwards
        if drops:
            ledger.reclaimers.append(self.drop)

    def __len__(self) -> int:
        return len(self._graphs)

    def begin(self) -> ForwardGraph:
        """Count one more forward; its graph must hold the result."""
        graph = ForwardGraph()
        self._graphs.add(graph)
        return graph

    def forget(self, graph: ForwardGraph) -> None:
        """Drop a forward for which nothing was decided."""
        self._graphs.discard(graph)

    def keep(self, region: Region) -> None:
        """A block that may be dropped."""
        if self.drops:
            self._kept[region] = None

    def drop(self, nbytes: int) -> None:
        """Drop kept blocks, the oldest first, until so many bytes are free, as far as there are any."""
        enough = self._ledger.total() - nbytes
        for region in list(self._kept):
            if self._ledger.total() <= enough:
                return
            del self._kept[region]
            region.drop_saved()
            self.varies = True


class KeptSegment(BlockSegment):
    """A block that is kept, or the last tensors that it saves, for as long as there is room."""

    def slot(self, tensor: Tensor) -> Any:
        """The slot for a tensor in the graph, which holds the tensor."""
        slot = super().slot(tensor)
        region = self._regions[-1]
        number, part = len(region.slots) - 1, region.choice
        keeps = (part is None or number >= part.first) and not region.dropped
        if keeps and isinstance(slot, SavedSlot) and region.hooks is not None:
            recipe = part.recipe(number) if part is not None and part.remade else None
            slot.held = None if recipe is None else remade(tensor, recipe, slot, self._context, region.call)
            try:
                slot.held = slot.held or _Packed(region.hooks[0](tensor), region.hooks[1])
            except BudgetExceeded:
                if self.waits is None:  # blocks hold collectives, which all ranks repeat alike
                    raise
                region.drop_saved()
        return slot


class _Packed:
    """A tensor as packed by the hooks around a block."""

    __slots__ = ("saved", "unpack")

    def __init__(self, saved: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.saved, self.unpack = saved, unpack

    def tensor(self) -> Tensor:
        """The tensor again."""
        return self.unpack(self.saved)
