"""Recomputation that is decided block by block within the device's budget: `recompute="auto"` (1911.13214).

The first forward of each kind keeps nothing but the input of its first block, and measures; its backward is already the
cheapest in what is left of the budget. Before the first update the ranks agree on what was measured, the largest bytes
of all, and refuse a budget that is too small for it; after it they decide what later forwards do. A forward of other
shapes is measured and decided when it first comes.

[Note: forwards that take more] Blocks may be left out at random, or take other memory than was measured, and a later
step may run several forwards before a backward. So a forward is checked against its decision at each block: one that
has too little room for its rest drops kept blocks (`waiting`), or keeps nothing from there on and is measured anew;
what it took more is counted on in later steps.

[Note: alike on all ranks] Decisions follow from the agreed measurements alone, so ranks with the same shapes decide the
same. Where units are gathered for use or layers are split over ranks, a block that is computed again is so by itself:
then all decisions gather the same units in the same order, so ranks may also differ in the shapes that they meet.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zeroshard.comm.collectives import Comm
from zeroshard.parts.technique import StepEnd
from zeroshard.platform import accelerator
from zeroshard.recompute.auto.agreement import AutoStepEnd
from zeroshard.recompute.auto.applied import Decided, rows_of
from zeroshard.recompute.auto.budget import ActivationBudget
from zeroshard.recompute.auto.decision import PassChain, Rules, one_at_a_time
from zeroshard.recompute.auto.dropping import ForwardGraph, KeptSegment, WaitingForwards
from zeroshard.recompute.auto.kept_parts import ChosenOperations, KeptPart, part_of
from zeroshard.recompute.auto.meter import BlockMeasures, BlockMeter, PassKey, PassMeasures
from zeroshard.recompute.auto.nested import NestedSegment
from zeroshard.recompute.auto.rotor import ChainItem, PassedBlocks, SavedBlock
from zeroshard.recompute.auto.saved_watch import SavedWatch
from zeroshard.recompute.auto.stored import Clocks, StoredCosts, measured
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.operations import Treatment
from zeroshard.recompute.recomputation import BlockForward, Recomputation
from zeroshard.recompute.segments import BlockSegment, Call, Region
from zeroshard.units.forwards import layer_of
from zeroshard.units.hooks import place_of

NO_BLOCKS: PassKey = (-1,)  # forwards in which no block can be computed again


@dataclass(slots=True)
class _Pass:
    """The forward of the model under way.

    Attributes:
        key: of what kind it is.
        measures: of its blocks, if it is measured.
        decision: what is done with its blocks, if it is decided.
        known: storages that are not counted again.
        graph: of the forward.
        room: bytes for activations, if it is decided.
        droppable: bytes of kept blocks that are still to be droppable.
        decided: what was done with its blocks before `first`, from which on it is measured.
        crossing: by the number of a block among the measured, the storages that go past its begin, with their bytes.
        measure: of the block under way.
        held: bytes of activations when its last block was over.
        copied: bytes of buffers that its blocks keep for a recomputation.
        region: the last block.
        references: to storages, whose addresses are not given out again.
    """

    key: PassKey
    measures: PassMeasures | None
    decision: Decided | None
    known: set[int]
    graph: ForwardGraph
    room: int = 0
    droppable: int = 0
    decided: Decided | None = None
    first: int = 0
    crossing: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    measure: BlockMeasures | None = None
    held: int = 0
    copied: int = 0
    region: Region | None = None
    references: list[StorageWeakRef] = field(default_factory=list)


class AutoRecomputation(Recomputation):
    """Decides for each block whether it is kept, computed again, or keeps the results of some operations.

    Args:
        model, blocks, context, save_sums: as for `Recomputation`.
        budget: of the device.
        rules: what may be done.

    Attributes:
        measured: what was measured, by kind of forward.
        decided: what is done, by kind of forward.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[nn.Module, int]],
        context: RecomputeContext,
        budget: ActivationBudget,
        rules: Rules,
        save_sums: bool = True,
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._names = {module: names.get(module, "") for module, _ in blocks}
        self._numbers = {module: number for number, (module, _) in enumerate(blocks)}
        super().__init__(model, blocks, lambda count: [1] * count, context, self._operations_of, save_sums)
        forwards = ((self._names[module], layer_of(module, "segment")) for module, _ in blocks)
        self._calls = {name: forward.call for name, forward in forwards if forward is not None}
        self._budget, self._rules = budget, rules
        self._treatments: dict[Any, Treatment] = {}
        self._pass: _Pass | None = None
        self._started = 0  # bytes of activations when the forward began
        self._waiting = WaitingForwards(budget.ledger, drops=not budget.together)
        self.measured: dict[PassKey, PassMeasures] = {}
        self.decided: dict[PassKey, Decided] = {}
        self._grown: dict[PassKey, PassMeasures] = {}  # of forwards that took more than their decisions count on

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        """A block's forward; what it saves is stored where that is decided, and stays else.

        So does what comes between and after blocks; the backward reads what comes last at once.
        """
        saver, apart = self._context.saver, block.left_alone and not self._inside
        before = saver.asked
        if apart:
            saver.ask_all()
        try:
            return super().run(block, args, kwargs)
        finally:
            saver.asked = before if apart or self._inside or self._pass is None else ()

    @property
    def known(self) -> dict[PassKey, PassMeasures]:
        """What decisions were made from."""
        return {key: decided.measures for key, decided in self.decided.items()}

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """What is done with each block of each kind of forward, predicted beside measured."""
        return [row for decided in self.decided.values() for row in rows_of(decided, self._calls)]

    def step_ends(self, comm: Comm, world: Comm) -> list[StepEnd]:
        """The agreement of the ranks on what was measured."""
        return [AutoStepEnd(self, self._budget, comm, world)]

    def needed(self, measured: Mapping[PassKey, PassMeasures]) -> int:
        """The fewest bytes of activations in which all kinds of forwards that were measured can run."""
        return max((self._chain(each, self._budget.forwards).least for each in measured.values()), default=0)

    def apply(self, measured: Mapping[PassKey, PassMeasures], room: int) -> None:
        """Decide on all kinds of forwards that were measured; in too little room, to take the fewest bytes.

        Args:
            measured: as all ranks agree on it.
            room: bytes for activations.
        """
        measured = {**measured, **self._grown}
        enough = (self._chain(each, self._budget.forwards).enough for each in measured.values())
        self._budget.explain(max(enough, default=0), room)
        for key, measures in measured.items():
            shared = self._chain(measures, self._budget.sharing).decide(room)
            decision = shared or self._chain(measures, self._budget.forwards).decide(room)
            decision = decision or self._chain(measures).frugal
            again = {name: (*call.again, call.made) for name, call in self._calls.items()}
            self.decided[key] = Decided(decision, measures, self._chain(measures).least, again=again)
            self.measured.pop(key, None)
        self._grown.clear()
        self._waiting.varies = self._waiting.varies or self._seem_to_vary()

    def _seem_to_vary(self) -> bool:
        """Whether blocks were left out so far, or blocks of one class saved unlike bytes in one forward."""
        whole = {name for name, call in self._calls.items() if not layer_of(call.module, "segment").left_alone}
        forwards = [decided.measures.blocks for decided in self.decided.values()]
        kinds = [{(type(self._calls[block.name].module), block.saved) for block in blocks} for blocks in forwards]
        alike = all(len(each) == len({kind for kind, _ in each}) for each in kinds)
        return not alike or whole != {block.name for blocks in forwards for block in blocks}

    def _chain(self, measures: PassMeasures, forwards: int = 1) -> PassChain:
        return PassChain(measures, self._rules, forwards)

    def _operations_of(self, region: Region) -> AbstractContextManager[Any] | None:
        chosen = region.choice is not None and region.choice.operations
        return ChosenOperations(region, self._treatments) if chosen else None

    def _begin(self, *given: Any) -> None:
        super()._begin(*given)
        if self._budget.measures and torch.is_grad_enabled():
            self._budget.first.begin()
        self._pass, self._started = None, self._budget.activations

    def _end(self, *given: Any) -> None:
        found, self._pass = self._pass, None
        self._context.saver.ask_all()
        super()._end(*given)
        if found is not None and found.measures is not None:
            self._budget.copied = max(self._budget.copied, found.copied)
            found.measures.after = max(0, self._budget.activations - found.held)
            for number in () if self._rules.alone else range(1, len(found.measures.blocks)):
                entering = sum(found.crossing[number].values())
                found.measures.blocks[number] = replace(found.measures.blocks[number], entering=entering)
            self.measured.pop(NO_BLOCKS, None)
            if found.decided is None:
                self._add(found.key, found.measures)
            else:
                self._grow(found.key, found.decided, found.first, found.measures)
        elif not (self.measured.keys() - {NO_BLOCKS}) and self._budget.measures and torch.is_grad_enabled():
            self._add(NO_BLOCKS, PassMeasures(after=self._budget.activations))

    def _add(self, key: PassKey, measures: PassMeasures) -> None:
        before = self.measured.get(key)
        self.measured[key] = measures if before is None else measures.highest(before)

    def _grow(self, key: PassKey, decided: Decided, first: int, rest: PassMeasures) -> None:
        """Have later decisions count on what blocks of a forward took, from the block `first` on."""
        before = self._grown.get(key, decided.measures)
        whole = PassMeasures(before.blocks[:first] + rest.blocks, before.before, rest.after)
        grown = before.highest(whole)
        if grown != before and not self._budget.together:
            self._grown[key] = grown

    def _next_segment(self, module: nn.Module, arguments: Any) -> BlockSegment | None:
        number, self._context.saver.asked = self._called, ()
        if number == 0 or self._pass is None:
            self._pass = self._enter(module, arguments)
        self._called += 1
        if self._pass.decision is not None:
            self._go_on(self._pass, self._pass.decision, number, module)
        if self._pass.decision is not None:
            segment = self._decided_segment(self._pass.decision, number)
        elif self._rules.alone or self._segment is None:
            segment = self._segment = self._measured_segment()
        else:
            segment = self._segment
        if segment is not None:
            segment.graph = self._pass.graph
            if self._waiting.drops:  # it may be computed again after that
                segment.waits, segment.often = self._waiting.keep, True
        return segment

    def _go_on(self, found: _Pass, decided: Decided, number: int, module: nn.Module) -> None:
        """Go on as decided, or have the rest of a forward keep nothing, and measure it."""
        now = self._budget.activations
        if number == 0:
            decided.forwards += 1
        elif (grown := decided.enter(number - 1, now - found.held)) is not None:
            self._grow(found.key, decided, number - 1, PassMeasures([grown], after=decided.measures.after))
        found.held = now
        if not self._has_room(found, decided, number, module):
            found.decision, found.decided, found.first = None, decided, number
            found.measures, self._segment = PassMeasures(), None
            self._waiting.varies = True

    def _has_room(self, found: _Pass, decided: Decided, number: int, module: nn.Module) -> bool:
        forward = layer_of(module, "segment")
        if number not in decided.by_block or not (forward is None or forward.known):
            return False
        needed = decided.decision.needs.get(number, 0) - found.room
        if needed + self._budget.activations > 0 and self._context.saver.moves:
            self._context.saver.settle()  # copies to the host give their room
        short = needed + self._budget.activations
        if short <= 0 or not self._waiting.drops:
            return True
        before = self._budget.activations
        self._waiting.drop(short)
        return short <= before - self._budget.activations or not decided.keeps_from(number)

    def _decided_segment(self, decision: Decided, number: int) -> BlockSegment | None:
        item = decision.by_block.get(number)
        if item is None or isinstance(item, SavedBlock):
            self._segment = None
            if item is not None and item.way is None:
                droppable = self._pass is not None and self._may_drop(self._pass, decision, number)
                return KeptSegment(self._context, self._weights, self._count) if droppable else None
            part = part_of(item)
            if part is not None and part.by is not None and not self._waiting.drops:
                self._ask(part)
                return None
            keeps = part is not None and part.first is not None
            return (KeptSegment if keeps else BlockSegment)(self._context, self._weights, self._count)
        if number == item.first or self._segment is None:
            self._segment = self._passed_segment(item, number)
        return self._segment

    def _may_drop(self, found: _Pass, decided: Decided, number: int) -> bool:
        """Whether a kept block is to be droppable, which takes time: those that make room for one more forward are."""
        before, found.droppable = found.droppable, found.droppable - decided.measures.blocks[number].saved
        return self._waiting.drops and (self._waiting.varies or before > 0)

    def _keep_all(self, call: Call, args: Any, kwargs: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._called > 1 or hooks is None:
            return super()._keep_all(call, args, kwargs)
        graph = None if self._pass is None else self._pass.graph
        with saved_tensors_hooks(lambda tensor: (graph, hooks[0](tensor)), lambda saved: hooks[1](saved[1])):
            return super()._keep_all(call, args, kwargs)

    def _passed_segment(self, item: PassedBlocks, number: int) -> BlockSegment:
        if item.first == item.last or number != item.first:
            return BlockSegment(self._context, self._weights, self._count)
        again = tuple(moved(each, -item.first) for each in item.again)
        assert self._pass is not None and self._pass.decision is not None
        blocks = self._pass.decision.measures.blocks[item.first : item.last + 1]

        def order(segment: NestedSegment) -> tuple[ChainItem, ...]:  # fewer blocks may have run than were measured
            return again if len(segment) == len(blocks) else self._order_of(blocks[: len(segment)])

        return NestedSegment(self._context, self._weights, self._count, order)

    def _measured_segment(self) -> BlockSegment:
        """A segment whose backward is decided when it begins."""
        if self._rules.alone:
            segment: BlockSegment = BlockSegment(self._context, self._weights, self._count)
        else:
            measures = self._pass.measures if self._pass is not None else None
            assert measures is not None
            first = len(measures.blocks)
            segment = NestedSegment(
                self._context,
                self._weights,
                self._count,
                lambda s: self._order_of(measures.blocks[first : first + len(s)]),
            )
        return segment

    def _order_of(self, blocks: list[BlockMeasures]) -> tuple[ChainItem, ...]:
        """The order in which blocks that kept nothing are computed again, in what is left of the budget now."""
        chain = PassChain(PassMeasures(blocks), self._rules)
        if not self._budget.measures:
            self._waiting.drop(chain.least_again - self._budget.left)
        room = self._budget.left
        found = chain.again(room)
        if found is None and not self._budget.measures:
            raise self._budget.too_small(chain.least_again, room)
        return found or one_at_a_time(len(blocks))

    def _enter(self, module: nn.Module, arguments: Any) -> _Pass:
        self._first = module
        self._weights = self._context.places()
        shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = (self._numbers[module], *(tuple(shapes) if self._budget.by_shape else ()))
        decision, others = self.decided.get(key), len(self._waiting)
        if decision is not None and others >= self._budget.sharing:
            decision = self._beside_others(decision, others + 1)
        measures = PassMeasures() if decision is None else None
        found = _Pass(key, measures, decision, set(self._weights), self._waiting.begin())
        if decision is not None:
            found.room = self._budget.room
            wide = found.room - self._budget.activations > 2 * decision.most
            found.droppable = 0 if wide else 2 * decision.least
            self._budget.count(others + 1)
        return found

    def _beside_others(self, decided: Decided, forwards: int) -> Decided:
        """A decision in what more forwards than decisions were made for have left of the room; later ones share it.

        If that is too little, it is the one of the fewest bytes: graphs may end meanwhile, and else the ledger refuses.
        """
        budget, measures = self._budget, decided.measures
        chain = self._chain(measures)
        budget.extend(forwards, self._chain(measures, forwards).least)
        found = None if self._rules.alone else chain.decide(budget.left)  # alike on all ranks, or of this one alone
        return Decided(found or chain.frugal, measures, chain.least)

    def _choose(self, region: Region, number: int) -> None:
        """Have a region keep what its decision says."""
        item = self._pass.decision.by_block.get(number) if self._pass and self._pass.decision else None
        part = part_of(item)
        if part is not None:
            region.choice, region.call.needed = part, None
            self._ask(part)

    def _ask(self, part: KeptPart) -> None:
        """Have savers store what the block saves that is about to run, if that is its choice."""
        if part.by is not None:
            self._context.saver.asked = self._context.saver.choices[part.by.number]

    def _compute(self, region: Region, arguments: Any, hooks: Any, watching: Any = None) -> Any:
        found = self._pass
        if found is None or found.measures is None:
            self._choose(region, self._called - 1)
            output = super()._compute(region, arguments, hooks, watching)
            by = None if region.choice is None else region.choice.by
            if found is not None and self._segment is None and (by is None or by.varies):
                self._waiting.keep(region)
            return output
        held, measures, found.region = self._budget.activations, found.measures, region
        entering, kept = self._places(found, arguments), 0 if self._rules.alone else held - found.held
        self._cross(found, len(measures.blocks), region)
        if not measures.blocks and found.decided is None:
            measures.before, kept = held - self._started, 0
        meter = BlockMeter(self._names[region.call.module], self._ready, found.known)
        watch = SavedWatch(region, meter, hooks, lambda tensor: self._is_new(tensor, found.known))
        try:
            output = super()._compute(region, arguments, watch.hooks, meter)
            measure = meter.ends(output, max(0, entering - kept), max(0, kept), region.sums)
            stored, remade = self._stored(watch.tensors, found.known), watch.remade(output, self._ready)
            found.measure = replace(measure, stored=stored, remade=remade)
        finally:
            watch.end()
        return output

    def _stored(self, tensors: list[Tensor], known: set[int]) -> tuple[StoredCosts | None, ...]:
        """What it takes to store what a block saves, by the choices of the plan's savers; None where room is short."""
        savers, budget = self._context.saver, self._budget
        by = Clocks(self._context.now, self._ready, lambda: budget.activations, known)
        largest = max((tensor.untyped_storage().nbytes() for tensor in tensors), default=0)
        room = 2 * largest <= budget.left  # what is stored of it, and what is read
        return tuple(measured(savers, n, tensors, by) if room else None for n in range(len(savers.choices)))

    def _ready(self) -> float:
        """Seconds of the clock when the device has done all."""
        accelerator.synchronize(self._context.device)
        return self._context.now()

    def _block_ended(self, left_alone: bool) -> None:
        found = self._pass
        if found is None or found.measures is None:
            return
        if not left_alone:
            assert found.measure is not None
            self._budget.count(len(self._waiting))
            copied = found.region.copied if found.region is not None else 0
            found.measures.blocks.append(replace(found.measure, copied=copied))
            found.copied += copied
            found.held = self._budget.activations
        elif not found.measures.blocks and found.decided is None:
            self._waiting.forget(found.graph)
            self._pass, self._called = None, 0  # the first other block begins the chain, as in later forwards

    def _cross(self, found: _Pass, number: int, region: Region) -> None:
        """Count what a block takes from others of its segment at the begin of each block between them."""
        for made_by, (place, nbytes) in region.taken:
            before = number - (len(self._segment or ()) - 1 - made_by)
            for later in range(before + 1, number + 1):
                found.crossing[later][place] = nbytes

    def _places(self, found: _Pass, arguments: Any) -> int:
        """Bytes of arguments that are new in this forward."""
        nbytes = 0
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor) and self._is_new(leaf, found.known):
                found.known.add(place_of(leaf))
                found.references.append(StorageWeakRef(leaf.untyped_storage()))
                nbytes += leaf.untyped_storage().nbytes()
        return nbytes

    def _is_new(self, tensor: Tensor, known: set[int]) -> bool:
        """Whether a tensor takes bytes that are neither `known` nor scratch or the model's own buffers."""
        return place_of(tensor) not in {*known, -1} and not self._context.ledger.is_entered(tensor)


def moved(item: ChainItem, by: int) -> ChainItem:
    """An item of other numbers."""
    if isinstance(item, SavedBlock):
        return SavedBlock(item.block + by, item.way)
    return PassedBlocks(item.first + by, item.last + by, tuple(moved(each, by) for each in item.again))
