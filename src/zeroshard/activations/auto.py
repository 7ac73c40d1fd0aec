"""Recomputation that is decided block by block within the device's budget: `recompute="auto"` (1911.13214).

The first forward of each kind keeps nothing but the input of its first block, and measures; its backward is already the
cheapest in what is left of the budget. Before the first update the ranks agree on what was measured, the largest bytes
of all, and refuse a budget that is too small for it; after it they decide what later forwards do. A forward of other
shapes is measured and decided when it first comes.

[Note: alike on all ranks] Decisions follow from the agreed measurements alone, so ranks with the same shapes decide the
same. Where units are gathered for use or layers are split over ranks, a block that is computed again is so by itself:
then all decisions gather the same units in the same order, so ranks may also differ in the shapes that they meet.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zeroshard.activations.auto_agreement import AutoStepEnd
from zeroshard.activations.block_meter import BlockMeasures, BlockMeter, ChosenOperations, PassKey, PassMeasures
from zeroshard.activations.budget import ActivationBudget
from zeroshard.activations.chain_decision import PassChain, Rules, one_at_a_time
from zeroshard.activations.decided import Decided, rows_of
from zeroshard.activations.nested import NestedSegment
from zeroshard.activations.operations import Treatment
from zeroshard.activations.recomputation import BlockForward, Recomputation
from zeroshard.activations.rotor import ChainItem, PassedBlocks, SavedBlock
from zeroshard.activations.segments import BlockSegment, Call, Region, Surroundings
from zeroshard.comm.collectives import Comm
from zeroshard.parts.steps import StepEnd
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
        held: bytes of activations when its last block was over.
        copied: bytes of buffers that its blocks keep for a recomputation.
        region: the last block.
        references: to storages, whose addresses are not given out again.
    """

    key: PassKey
    measures: PassMeasures | None
    decision: Decided | None
    known: set[int]
    held: int = 0
    copied: int = 0
    region: Region | None = None
    references: list[StorageWeakRef] = field(default_factory=list)


class _Graph:
    """Lives as long as the graph of a forward whose first block keeps everything."""

    __slots__ = ("__weakref__",)


class AutoRecomputation(Recomputation):
    """Decides for each block whether it is kept, computed again, or keeps the results of some operations.

    Args:
        model, blocks, around, save_sums: as for `Recomputation`.
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
        around: Surroundings,
        budget: ActivationBudget,
        rules: Rules,
        save_sums: bool = True,
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._names = {module: names.get(module, "") for module, _ in blocks}
        self._numbers = {module: number for number, (module, _) in enumerate(blocks)}
        super().__init__(model, blocks, lambda count: [1] * count, around, self._operations_of, save_sums)
        forwards = ((self._names[module], module.forward) for module, _ in blocks)
        self._calls = {name: forward.call for name, forward in forwards if isinstance(forward, BlockForward)}
        self._budget, self._rules = budget, rules
        self._treatments: dict[Any, Treatment] = {}
        self._pass: _Pass | None = None
        self._started = 0  # bytes of activations when the forward began
        self._measure: BlockMeasures
        self._forwards: list[Callable[[], Any]] = []  # weak references to what graphs hold of forwards, one of each
        self.measured: dict[PassKey, PassMeasures] = {}
        self.decided: dict[PassKey, Decided] = {}

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
        """Decide on all kinds of forwards that were measured.

        Args:
            measured: as all ranks agree on it.
            room: bytes for activations.

        Raises:
            BudgetExceeded: it is too small, with the least.
        """
        if (needed := self.needed(measured)) > room:
            raise self._budget.too_small(needed, room)
        for key, measures in measured.items():
            shared = self._chain(measures, self._budget.sharing).decide(room)
            decision = shared or self._chain(measures, self._budget.forwards).decide(room)
            assert decision is not None
            again = {name: call.again for name, call in self._calls.items()}
            self.decided[key] = Decided(decision, measures, again=again)
            self.measured.pop(key, None)

    def _chain(self, measures: PassMeasures, forwards: int = 1) -> PassChain:
        return PassChain(measures, self._rules, forwards)

    def _operations_of(self, region: Region) -> AbstractContextManager[Any] | None:
        return None if region.choice is None else ChosenOperations(region, self._treatments)

    def _begin(self, *given: Any) -> None:
        super()._begin(*given)
        if self._budget.measures and torch.is_grad_enabled():
            self._budget.first.begin()
        self._pass, self._started = None, self._budget.activations

    def _end(self, *given: Any) -> None:
        found, self._pass = self._pass, None
        super()._end(*given)
        if found is not None and found.measures is not None:
            self._budget.copied = max(self._budget.copied, found.copied)
            found.measures.after = max(0, self._budget.activations - found.held)
            self.measured.pop(NO_BLOCKS, None)
            self._add(found.key, found.measures)
        elif not (self.measured.keys() - {NO_BLOCKS}) and self._budget.measures and torch.is_grad_enabled():
            self._add(NO_BLOCKS, PassMeasures(after=self._budget.activations))

    def _add(self, key: PassKey, measures: PassMeasures) -> None:
        before = self.measured.get(key)
        self.measured[key] = measures if before is None else measures.highest(before)

    def _next_segment(self, module: nn.Module, arguments: Any) -> BlockSegment | None:
        number = self._called
        if number == 0 or self._pass is None:
            self._pass = self._enter(module, arguments)
        self._called += 1
        decision, now = self._pass.decision, self._budget.activations
        if decision is not None:
            if number:
                decision.held[number - 1] = now - self._pass.held
            else:
                decision.forwards += 1
            self._pass.held = now
        if decision is None:
            if self._rules.alone or self._segment is None:
                self._segment = self._measured_segment()
            return self._segment
        segment = self._decided_segment(decision, number)
        if number == 0 and segment is not None:
            self._forwards.append(ref(segment))
        return segment

    def _decided_segment(self, decision: Decided, number: int) -> BlockSegment | None:
        item = decision.by_block.get(number)
        if item is None or isinstance(item, SavedBlock):
            self._segment = None
            if item is not None and item.way is None:
                return None
            return BlockSegment(self._around, self._weights, self._count)
        if number == item.first or self._segment is None:
            self._segment = self._passed_segment(item, number)
        return self._segment

    def _keep_all(self, call: Call, args: Any, kwargs: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._called > 1 or hooks is None:
            return super()._keep_all(call, args, kwargs)
        graph = _Graph()
        self._forwards.append(ref(graph))
        with saved_tensors_hooks(lambda tensor: (graph, hooks[0](tensor)), lambda saved: hooks[1](saved[1])):
            return super()._keep_all(call, args, kwargs)

    def _passed_segment(self, item: PassedBlocks, number: int) -> BlockSegment:
        if item.first == item.last or number != item.first:
            return BlockSegment(self._around, self._weights, self._count)
        again = tuple(moved(each, -item.first) for each in item.again)
        return NestedSegment(self._around, self._weights, self._count, lambda segment: again)

    def _measured_segment(self) -> BlockSegment:
        """A segment whose backward is decided when it begins."""
        if self._rules.alone:
            segment: BlockSegment = BlockSegment(self._around, self._weights, self._count)
        else:
            measures = self._pass.measures if self._pass is not None else None
            assert measures is not None
            first = len(measures.blocks)
            segment = NestedSegment(
                self._around, self._weights, self._count, lambda s: self._first_order(s, measures, first)
            )
        return segment

    def _first_order(self, segment: NestedSegment, measures: PassMeasures, first: int) -> tuple[ChainItem, ...]:
        """The order of a measured segment, in what is left of the budget now."""
        chain = PassChain(PassMeasures(measures.blocks[first : first + len(segment)]), self._rules)
        room = self._budget.left
        found = chain.again(room)
        if found is None and not self._budget.measures:
            raise self._budget.too_small(chain.least_again, room)
        return found or one_at_a_time(len(segment))

    def _enter(self, module: nn.Module, arguments: Any) -> _Pass:
        self._first = module
        self._weights = self._around.places()
        shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = (self._numbers[module], *(tuple(shapes) if self._budget.by_shape else ()))
        self._forwards = [each for each in self._forwards if each() is not None]
        decision = self.decided.get(key)
        if decision is not None and len(self._forwards) >= self._budget.sharing:
            decision = self._beside_others(decision, len(self._forwards) + 1)
        return _Pass(key, PassMeasures() if decision is None else None, decision, set(self._weights))

    def _beside_others(self, decided: Decided, forwards: int) -> Decided:
        """A decision in what more forwards than decisions were made for have left of the room; later ones share it.

        If that is too little, it is the one of the fewest bytes: graphs may end meanwhile, and else the ledger refuses.
        """
        budget, measures = self._budget, decided.measures
        chain = self._chain(measures)
        budget.extend(forwards, self._chain(measures, forwards).least)
        found = None if self._rules.alone else chain.decide(budget.left)  # alike on all ranks, or of this one alone
        return Decided(found or chain.frugal, measures)

    def _choose(self, region: Region, number: int) -> None:
        """Have a region keep what its decision says."""
        item = self._pass.decision.by_block.get(number) if self._pass and self._pass.decision else None
        if isinstance(item, SavedBlock) and item.way is not None:
            region.choice = item.way.choice
            region.call.needed = None

    def _compute(self, region: Region, arguments: Any, hooks: Any, watching: Any = None) -> Any:
        found = self._pass
        if found is None or found.measures is None:
            self._choose(region, self._called - 1)
            return super()._compute(region, arguments, hooks, watching)
        held, measures, found.region = self._budget.activations, found.measures, region
        entering, kept = self._places(found, arguments), 0 if self._rules.alone else held - found.held
        if not measures.blocks:
            measures.before, kept = held - self._started, 0
        meter = BlockMeter(self._names[region.call.module], self._around.now, found.known, self._rules.selects)
        pack, unpack = hooks

        def watched(tensor: Tensor) -> Any:
            if self._is_new(tensor, found.known):
                meter.saves(tensor)
            return pack(tensor)

        output = super()._compute(region, arguments, (watched, unpack), meter.mode())
        self._measure = meter.ends(output, max(0, entering - kept), max(0, kept), region.sums)
        return output

    def _block_ended(self, left_alone: bool) -> None:
        found = self._pass
        if found is None or found.measures is None:
            return
        if not left_alone:
            if not found.measures.blocks and self._segment is not None:
                self._forwards.append(ref(self._segment))
                self._budget.count(len(self._forwards))
            found.measures.blocks.append(self._measure)
            found.copied += found.region.copied if found.region is not None else 0
            found.held = self._budget.activations
        elif not found.measures.blocks:
            self._pass, self._called = None, 0  # the first other block begins the chain, as in later forwards

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
        return place_of(tensor) not in {*known, -1} and not self._around.ledger.is_entered(tensor)


def moved(item: ChainItem, by: int) -> ChainItem:
    """An item of other numbers."""
    if isinstance(item, SavedBlock):
        return SavedBlock(item.block + by, item.way)
    return PassedBlocks(item.first + by, item.last + by, tuple(moved(each, by) for each in item.again))
