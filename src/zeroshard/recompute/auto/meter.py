"""Measurements of blocks in a forward: seconds, bytes that enter, are saved and leave, and those of each operation.

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

from zeroshard.recompute.auto.remade import RemadeCosts
from zeroshard.recompute.auto.stored import StoredCosts, fastest, of_both
from zeroshard.recompute.operations import kept_operations
from zeroshard.units.hooks import place_of

CALL = 3e-6  # seconds of an operation in autograd, beside its computation
Clock = Callable[[], float]
PassKey = tuple[Any, ...]  # of a forward: the number of its first block, and the shapes of what that takes


@dataclass(frozen=True, slots=True)
class OperationCosts:
    """One operation whose results can be kept.

    Attributes:
        number: among those of its block.
        nbytes: of its results, but for the block's output.
        beside: of these, bytes that the block does not save for its backward anyway.
        seconds: of computing them.
        name: of the operation.
    """

    number: int
    nbytes: int
    beside: int
    seconds: float
    name: str


@dataclass(frozen=True, slots=True)
class SavedTail:
    """The last tensors that a block saves; where they are kept, a recomputation ends with the tensor before them.

    Attributes:
        first: the number of the first of them among all that it saves.
        nbytes: of them, but for the block's output.
        seconds: of the block's forward up to there.
        calls: operations up to there.
        operations: those of them whose results can be kept.
    """

    first: int
    nbytes: int
    seconds: float
    calls: int
    operations: int


Timed = TypeVar("Timed", OperationCosts, SavedTail, RemadeCosts)


@dataclass(frozen=True, slots=True)
class BlockMeasures:
    """One block in one forward.

    Attributes:
        name: of its module.
        seconds: of its forward.
        entering: bytes of what it takes from the block before it.
        kept: bytes of what else it takes, which are kept in any case.
        saved: bytes that it saves beside them, with its output.
        leaving: bytes of its output.
        again: seconds of its forward up to the last tensor that it saves.
        calls: operations that it calls.
        sums: bytes of what ranks summed in it, which a recomputation does not sum again.
        operations: those whose results can be kept, up to there.
        copied: bytes of buffers that it changes; computed again, it may save the copies that it meets then.
        tails: of what it saves, the shortest first.
        stored: what it takes to have the plan's savers store what it saves, by their choice; None if they do not.
        remade: storages that it need not keep.
    """

    name: str
    seconds: float
    entering: int
    kept: int
    saved: int
    leaving: int
    again: float
    calls: int
    sums: int = 0
    operations: tuple[OperationCosts, ...] = ()
    copied: int = 0
    tails: tuple[SavedTail, ...] = ()
    stored: tuple[StoredCosts | None, ...] = ()
    remade: tuple[RemadeCosts, ...] = ()

    def highest(self, other: "BlockMeasures") -> "BlockMeasures":
        """The larger bytes of two ranks; the seconds are this one's."""
        sizes = ("entering", "kept", "saved", "leaving", "sums", "copied")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in sizes}
        return replace(self, **most, stored=tuple(map(of_both, self.stored, other.stored)))


@dataclass(slots=True)
class _Call:
    """An operation as it was seen."""

    number: int | None
    name: str
    seconds: float
    places: tuple[tuple[int, int], ...]  # storages of its results, with their bytes


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor as it was saved: its number, its storage if it is new, and what had been called until then."""

    number: int
    place: int | None
    calls: int
    keepable: int


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
        self._calls: list[_Call] = []
        self._events: list[_Saved] = []
        self._keepable = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self._now()
        result = func(*args, **(kwargs or {}))
        seconds = self._now() - start
        number: int | None = None
        places: tuple[tuple[int, int], ...] = ()
        if keepable(func):
            number, self._keepable = self._keepable, self._keepable + 1
            places = tuple(self._place(each) for each in tree_leaves(result) if isinstance(each, Tensor))
        self._calls.append(_Call(number, func._schema.name.removeprefix("aten::"), seconds, places))
        return result

    def saves(self, tensor: Tensor, number: int, new: bool) -> None:
        """The block saves a tensor, the one of that number; a `new` one takes bytes that nothing else has."""
        place: int | None = None
        if new and not isinstance(tensor, nn.Parameter) and place_of(tensor) not in self._known:
            place, self._saved[place] = self._place(tensor)
        self._events.append(_Saved(number, place, len(self._calls), self._keepable))

    def ends(self, output: Any, entering: int, kept: int, sums: int) -> BlockMeasures:
        """The block has returned its output."""
        leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        out = {place: n for place, n in map(self._place, leaves) if place not in self._known}
        saved = self._saved | out
        found = []
        last = self._events[-1] if self._events else None
        for call in self._calls[: last.calls if last else 0]:
            places = {place: n for place, n in call.places if place not in out}
            beside = sum(n for place, n in places.items() if place not in saved)
            if call.number is not None:
                found.append(OperationCosts(call.number, sum(places.values()), beside, call.seconds, call.name))
        of_saved, leaving, calls = sum(saved.values()), sum(out.values()), len(self._calls)
        seconds, again = _seconds(self._calls), _seconds(self._calls[: last.calls if last else 0])
        measures = BlockMeasures(
            self._name, seconds, entering, kept, of_saved, leaving, again, calls, sums, tuple(found)
        )
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
                yield SavedTail(event.number, nbytes, seconds, before.calls, before.keepable)

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        if tensor.layout is not torch.strided:
            return id(tensor), 0
        storage = tensor.untyped_storage()
        self._refs.append(StorageWeakRef(storage))
        return storage._cdata, storage.nbytes()


def _seconds(calls: Sequence[_Call]) -> float:
    return sum(call.seconds for call in calls) + CALL * len(calls)


_KNOWN = kept_operations(())  # others may return what kernels outside of torch write into later


def keepable(operation: Any) -> bool:
    """Whether results of an operation can be given back: a product, or of a class that "selective" computes again."""
    return not operation._schema.is_mutable and _KNOWN(operation)


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
    names = tuple((each.number, each.name, each.nbytes) for each in block.operations)
    tails = tuple((each.first, each.nbytes) for each in block.tails)
    made = tuple((each.recipes, each.nbytes) for each in block.remade)
    return block.saved, block.leaving, block.calls, names, tails, tuple(each is None for each in block.stored), made


def _fastest(block: BlockMeasures, others: Sequence[BlockMeasures]) -> BlockMeasures:
    seconds, again = min(each.seconds for each in others), min(each.again for each in others)
    operations = _least_seconds(block.operations, [other.operations for other in others])
    tails = _least_seconds(block.tails, [other.tails for other in others])
    stored = tuple(map(fastest, block.stored, zip(*(other.stored for other in others), strict=True)))
    remade = _least_seconds(block.remade, [other.remade for other in others])
    changed = replace(block, seconds=seconds, again=again, operations=operations)
    return replace(changed, tails=tails, stored=stored, remade=remade)


def _least_seconds(these: Sequence[Timed], others: Sequence[Sequence[Timed]]) -> tuple[Timed, ...]:
    return tuple(
        replace(each, seconds=min(same.seconds for same in several))
        for each, *several in zip(these, *others, strict=True)
    )
