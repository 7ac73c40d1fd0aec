"""Measurements of blocks in a forward: seconds, and bytes that enter, are saved and leave.

Bytes are those of storages, each once, without weights; the weak reference to a storage keeps its address from being
given out again while it is known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.recompute.auto.remade import NotSaved, RemadeCosts, costs_of, epsilons_of, next_number
from zeroshard.recompute.auto.stored import StoredCosts, fastest, of_both
from zeroshard.recompute.kept_inputs import Hooks
from zeroshard.recompute.segments import Region, SavedSlot, read
from zeroshard.saved.kept import Kept
from zeroshard.units.hooks import place_of

CALL = 3e-6  # seconds of an operation in autograd, beside its computation
Clock = Callable[[], float]
PassKey = tuple[Any, ...]  # of a forward: the number of its first block, and the shapes of what that takes


@dataclass(frozen=True, slots=True)
class SavedTail:
    """The last tensors that a block saves; where they are kept, a recomputation ends with the tensor before them.

    Attributes:
        first: the number of the first of them among all that it saves.
        nbytes: of them, but for the block's output.
        seconds: of the block's forward up to there.
        calls: operations up to there.
    """

    first: int
    nbytes: int
    seconds: float
    calls: int


Timed = TypeVar("Timed", SavedTail, RemadeCosts)


@dataclass(frozen=True, slots=True)
class BlockMeasures:
    """One block in one forward.

    Attributes:
        name: of its module.
        seconds: of its forward.
        entering: bytes of its input, as far as they are new.
        saved: bytes that it saves beside them, with its output.
        leaving: bytes of its output.
        again: seconds of its forward up to the last tensor that it saves.
        calls: operations that it calls.
        sums: bytes of what ranks summed in it, which a recomputation does not sum again.
        kept: bytes that stay in any case between the block before and this one, such as those of blocks left alone.
        copied: bytes of buffers that it changes; computed again, it may save the copies that it meets then.
        tails: of what it saves, the shortest first.
        stored: costs of storing its saved tensors, by the choice of savers; None where savers take none.
        remade: storages that it need not keep.
    """

    name: str
    seconds: float
    entering: int
    saved: int
    leaving: int
    again: float
    calls: int
    sums: int = 0
    kept: int = 0
    copied: int = 0
    tails: tuple[SavedTail, ...] = ()
    stored: tuple[StoredCosts | None, ...] = ()
    remade: tuple[RemadeCosts, ...] = ()

    def highest(self, other: "BlockMeasures") -> "BlockMeasures":
        """The larger bytes of two ranks; the seconds are this one's."""
        sizes = ("entering", "saved", "leaving", "sums", "kept", "copied")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in sizes}
        return replace(self, **most, stored=tuple(map(of_both, self.stored, other.stored)))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: its number, its storage if it is new, and the number of operations before it."""

    number: int
    place: int | None
    calls: int


class BlockMeter(TorchDispatchMode):
    """Watches the forward of one block.

    Args:
        name: of its module.
        now: seconds.
        known: storages that are not counted: weights, and what earlier blocks have taken.
    """

    def __init__(self, name: str, now: Clock, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._now, self._known = name, now, known
        self._refs: list[StorageWeakRef] = []
        self._saved: dict[int, int] = {}
        self._calls: list[float] = []  # seconds of each operation
        self._events: list[_Saved] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self._now()
        result = func(*args, **(kwargs or {}))
        self._calls.append(self._now() - start)
        return result

    def saves(self, tensor: Tensor, number: int, new: bool) -> None:
        """The block saves a tensor, the one of that number; a `new` one takes bytes that nothing else has."""
        place: int | None = None
        if new and not isinstance(tensor, nn.Parameter) and place_of(tensor) not in self._known:
            place, self._saved[place] = self._place(tensor)
        self._events.append(_Saved(number, place, len(self._calls)))

    def ends(self, output: Any, entering: int, sums: int) -> BlockMeasures:
        """The block has returned its output."""
        leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        out = {place: n for place, n in map(self._place, leaves) if place not in self._known}
        seconds, again = _seconds(self._calls), _seconds(self._calls[: self._events[-1].calls if self._events else 0])
        saved, leaving = sum((self._saved | out).values()), sum(out.values())
        measures = BlockMeasures(self._name, seconds, entering, saved, leaving, again, len(self._calls), sums)
        return replace(measures, tails=tuple(self._tails(out)))

    def _tails(self, out: Mapping[int, int]) -> Iterator[SavedTail]:
        kept = set[int]()
        for before, event in reversed([*pairwise(self._events)]):
            if event.place is None:  # of what it takes a rank may keep a part
                return
            kept |= {event.place} - out.keys()
            if before.calls < event.calls:
                nbytes = sum(self._saved[place] for place in kept)
                seconds = _seconds(self._calls[: before.calls])
                yield SavedTail(event.number, nbytes, seconds, before.calls)

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        if tensor.layout is not torch.strided:
            return id(tensor), 0
        storage = tensor.untyped_storage()
        self._refs.append(StorageWeakRef(storage))
        return storage._cdata, storage.nbytes()


def _seconds(calls: Sequence[float]) -> float:
    return sum(calls) + CALL * len(calls)


@dataclass(slots=True)
class PassMeasures:
    """The blocks of one forward of the model, as they come.

    Attributes:
        blocks: in their order.
        before: bytes that the model saves before its first block, the block's own input among them.
        after: bytes that it saves after its last.
    """

    blocks: list[BlockMeasures] = field(default_factory=list)
    before: int = 0
    after: int = 0

    def highest(self, other: "PassMeasures") -> "PassMeasures":
        """The larger bytes of two ranks."""
        pairs = zip(self.blocks, other.blocks, strict=False)
        longer = max(self.blocks, other.blocks, key=len)
        merged = [a.highest(b) for a, b in pairs]
        merged += longer[len(merged) :]
        return PassMeasures(merged, max(self.before, other.before), max(self.after, other.after))


def alike(blocks: Sequence[BlockMeasures]) -> list[BlockMeasures]:
    """The blocks with the least seconds that were measured for one of their kind; the rest of it is disturbance."""
    kinds: dict[Any, list[BlockMeasures]] = {}
    for block in blocks:
        kinds.setdefault(_kind(block), []).append(block)
    return [_fastest(block, kinds[_kind(block)]) for block in blocks]


def _kind(block: BlockMeasures) -> Any:
    tails = tuple((each.first, each.nbytes) for each in block.tails)
    made = tuple((each.recipes, each.nbytes) for each in block.remade)
    return block.saved, block.leaving, block.calls, tails, tuple(each is None for each in block.stored), made


def _fastest(block: BlockMeasures, others: Sequence[BlockMeasures]) -> BlockMeasures:
    seconds, again = min(each.seconds for each in others), min(each.again for each in others)
    tails = _least_seconds(block.tails, [other.tails for other in others])
    stored = tuple(map(fastest, block.stored, zip(*(other.stored for other in others), strict=True)))
    remade = _least_seconds(block.remade, [other.remade for other in others])
    return replace(block, seconds=seconds, again=again, tails=tails, stored=stored, remade=remade)


def _least_seconds(these: Sequence[Timed], others: Sequence[Sequence[Timed]]) -> tuple[Timed, ...]:
    return tuple(
        replace(each, seconds=min(same.seconds for same in several))
        for each, *several in zip(these, *others, strict=True)
    )


class SavedWatch:
    """Keeps a block's saved tensors until they are measured.

    Args:
        region: the forward.
        meter: counts each tensor that is saved.
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
        """The hooks of saved tensors."""
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
        """Free everything: the hooks live as long as the graph, which would hold itself through them."""
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
