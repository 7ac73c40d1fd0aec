"""States of a forward of the model under `recompute="auto"`.

    MeasuredForward     keeps the input of each block alone, and measures its blocks
    DecidedForward      keeps of each block what was decided, as long as the rest of the forward has room
    OverflowedForward   had too little room for its rest, which keeps inputs alone and is measured anew

A decided forward overflows where blocks take other memory than was measured, blocks are left out, or more forwards run
before a backward. What it took more is counted on in later steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zeroshard.platform import accelerator
from zeroshard.recompute.auto.budget import ActivationBudget
from zeroshard.recompute.auto.decision import AppliedDecision
from zeroshard.recompute.auto.dropping import ForwardGraph, KeptSegment, WaitingForwards
from zeroshard.recompute.auto.meter import BlockMeasures, BlockMeter, PassKey, PassMeasures, SavedWatch
from zeroshard.recompute.auto.stored import Clocks, StoredCosts, measured
from zeroshard.recompute.auto.ways import INPUT, KeptPart
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.kept_inputs import Hooks
from zeroshard.recompute.segments import BlockSegment, Region
from zeroshard.units.hooks import place_of

Compute = Callable[[Hooks, Any], Any]  # a block's forward, with hooks of saved tensors and a meter


@dataclass(slots=True)
class AutoServices:
    """Services for all forwards of one model.

    Attributes:
        context: of the engine.
        budget: of the device.
        waiting: forwards whose backward is to come.
        names: of blocks.
        count: called for each block that is computed again.
    """

    context: RecomputeContext
    budget: ActivationBudget
    waiting: WaitingForwards
    names: Mapping[nn.Module, str]
    count: Callable[[], None]


class MeasuredForward:
    """A forward whose blocks are measured.

    Attributes:
        key: of its kind.
        graph: lives as long as a part of its graph.
        measures: of its blocks so far.
        held: bytes of activations when its last block was over.
        copied: bytes of buffers that its blocks keep for a recomputation.
    """

    def __init__(self, services: AutoServices, key: PassKey, weights: set[int], graph: ForwardGraph) -> None:
        self.key, self.graph, self.measures = key, graph, PassMeasures()
        self.held = self.copied = 0
        self._services, self._weights = services, weights
        self._known = set(weights)  # storages that are not counted again
        self._references: list[StorageWeakRef] = []  # so that addresses of known storages are not given out again
        self._measure: BlockMeasures | None = None  # of the block under way
        self._region: Region | None = None

    @property
    def begins(self) -> bool:
        """Whether no block of the model's forward has run yet."""
        return not self.measures.blocks

    def segment(self) -> BlockSegment:
        """The segment of the next block."""
        return BlockSegment(self._services.context, self._weights, self._services.count)

    def compute(self, region: Region, arguments: Any, hooks: Hooks, compute: Compute, started: int) -> Any:
        """A block's forward, measured.

        Args:
            started: bytes of activations when the model's forward began.
        """
        budget, self._region = self._services.budget, region
        entering, held = self._enter(arguments), budget.activations
        kept = 0 if self.begins else max(0, held - self.held - entering)
        if self.begins:
            self.measures.before = held - started
        meter = BlockMeter(self._services.names[region.call.module], self._ready, self._known)
        watch = SavedWatch(region, meter, hooks, self._is_new)
        try:
            output = compute(watch.hooks, meter)
            measure = meter.ends(output, entering, region.sums)
            stored, remade = self._stored(watch.tensors), watch.remade(output, self._ready)
            self._measure = replace(measure, kept=kept, stored=stored, remade=remade)
        finally:
            watch.end()
        return output

    def block_ended(self) -> None:
        """The block is over."""
        assert self._measure is not None
        copied = self._region.copied if self._region is not None else 0
        self.measures.blocks.append(replace(self._measure, copied=copied))
        self.copied += copied
        self.held = self._services.budget.activations

    def _stored(self, tensors: list[Tensor]) -> tuple[StoredCosts | None, ...]:
        """Costs of storing a block's saved tensors, by the savers' choices; None if room is short."""
        savers, budget = self._services.context.saver, self._services.budget
        by = Clocks(self._services.context.now, self._ready, lambda: budget.activations, self._known)
        largest = max((tensor.untyped_storage().nbytes() for tensor in tensors), default=0)
        room = 2 * largest <= budget.left  # what is stored of it, and what is read
        return tuple(measured(savers, n, tensors, by) if room else None for n in range(len(savers.choices)))

    def _ready(self) -> float:
        """Seconds of the clock when the device has done all."""
        accelerator.synchronize(self._services.context.device)
        return self._services.context.now()

    def _enter(self, arguments: Any) -> int:
        """Bytes of arguments that are new in this forward."""
        nbytes = 0
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor) and self._is_new(leaf):
                self._known.add(place_of(leaf))
                self._references.append(StorageWeakRef(leaf.untyped_storage()))
                nbytes += leaf.untyped_storage().nbytes()
        return nbytes

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor takes bytes that are neither known nor scratch or the model's own buffers."""
        return place_of(tensor) not in {*self._known, -1} and not self._services.context.ledger.is_entered(tensor)


class OverflowedForward(MeasuredForward):
    """A decided forward that had too little room from a block on.

    Attributes:
        applied: what was done with its blocks before.
        first: the block from which on it is measured.
    """

    def __init__(self, decided: "DecidedForward", number: int) -> None:
        super().__init__(decided.services, decided.key, decided.weights, decided.graph)
        self.applied, self.first, self.held = decided.applied, number, decided.held

    @property
    def begins(self) -> bool:
        """Whether no block of the model's forward has run yet: some have."""
        return False


class DecidedForward:
    """A forward whose blocks are kept as was decided.

    Attributes:
        key, graph, held: as for `MeasuredForward`.
        applied: the decision.
        services, weights: as given.
    """

    def __init__(
        self, services: AutoServices, key: PassKey, weights: set[int], graph: ForwardGraph, applied: AppliedDecision
    ) -> None:
        self.services, self.key, self.weights, self.graph, self.applied = services, key, weights, graph, applied
        self.held = 0
        self._room = services.budget.room
        wide = self._room - services.budget.activations > 2 * applied.most
        self._droppable = 0 if wide else 2 * applied.least  # bytes of kept blocks that are still to be droppable
        self._part: KeptPart = INPUT  # of the block under way

    def enter(self, number: int) -> BlockMeasures | None:
        """The block of that number begins; measures of the one before if it took more than was measured."""
        now, grown = self.services.budget.activations, None
        if number == 0:
            self.applied.forwards += 1
        else:
            grown = self.applied.enter(number - 1, now - self.held)
        self.held = now
        return grown

    def has_room(self, number: int, known: bool) -> bool:
        """Whether the forward can continue by its decision; may drop kept blocks of earlier forwards.

        Args:
            known: whether the block was seen to run before.
        """
        budget, waiting = self.services.budget, self.services.waiting
        if number >= len(self.applied.decision.ways) or not known:
            return False
        needed = self.applied.decision.needs[number] - self._room
        if needed + budget.activations > 0 and self.services.context.saver.moves:
            self.services.context.saver.settle()  # copies to the host free their bytes
        short = needed + budget.activations
        if short <= 0 or not waiting.drops:
            return True
        before = budget.activations
        waiting.drop(short)
        return short <= before - budget.activations or not self.applied.keeps_from(number)

    def segment(self, number: int) -> BlockSegment | None:
        """The segment of a block; None for one that is kept, or stored, and never dropped."""
        self._part = self.applied.decision.ways[number].part
        drops = self._may_drop(number) if self._part.whole else self.services.waiting.drops or self._part.by is None
        if not drops:
            self._ask()
            return None
        kind = BlockSegment if self._part == INPUT else KeptSegment
        return kind(self.services.context, self.weights, self.services.count)

    def compute(self, region: Region, hooks: Hooks, compute: Compute) -> Any:
        """A block's forward, of which the decided part is kept."""
        part = self._part
        if part != INPUT and not part.whole:
            region.choice, region.call.needed = part, None
            self._ask()
        output = compute(hooks, None)
        if part != INPUT and (part.by is None or part.by.varies):
            self.services.waiting.keep(region)
        return output

    def _ask(self) -> None:
        """Select the savers for the next block, if its way is to be stored."""
        if self._part.by is not None:
            saver = self.services.context.saver
            saver.asked = saver.choices[self._part.by.number]

    def _may_drop(self, number: int) -> bool:
        """Whether a kept block is to be droppable, which takes time: those that make room for one more forward are."""
        before, self._droppable = self._droppable, self._droppable - self.applied.measures.blocks[number].saved
        return self.services.waiting.drops and (self.services.waiting.varies or before > 0)
