"""Recomputation that is decided block by block within the device's budget: `recompute="auto"` (1911.13214).

The first forward of each kind keeps the inputs of its blocks alone, and measures. Before the first update the ranks
agree on what was measured, the largest bytes of all, and refuse a budget that is too small for it; after it they decide
what later forwards keep. A forward of other shapes is measured and decided when it first comes.

[Note: alike on all ranks] Decisions follow from the agreed measurements alone, so ranks with the same shapes decide the
same. All decisions gather the same units in the same order, so ranks may also differ in the shapes that they meet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from zeroshard.comm.collectives import Comm
from zeroshard.parts.technique import StepEnd
from zeroshard.recompute.auto.budget import ActivationBudget
from zeroshard.recompute.auto.decision import AppliedDecision, PassChain, Rules, rows_of
from zeroshard.recompute.auto.dropping import WaitingForwards
from zeroshard.recompute.auto.forwards import AutoServices, DecidedForward, MeasuredForward, OverflowedForward
from zeroshard.recompute.auto.meter import BlockMeasures, PassKey, PassMeasures, SavedTail
from zeroshard.recompute.auto.remade import Recipe, RemadeCosts
from zeroshard.recompute.auto.stored import StoredCosts
from zeroshard.recompute.context import RecomputeContext
from zeroshard.recompute.recomputation import BlockForward, Recomputation, no_operations, one_by_one
from zeroshard.recompute.segments import BlockSegment, Call, Region
from zeroshard.units.forwards import layer_of

NO_BLOCKS: PassKey = (-1,)  # forwards in which no block can be computed again


class AutoRecomputation(Recomputation):
    """Decides for each block whether it is kept, in which part, stored, or computed again from its input.

    Args:
        model, blocks, context, save_sums: as for `Recomputation`.
        budget: of the device.
        rules: of decisions.

    Attributes:
        measured: what was measured and is not decided yet, by kind of forward.
        decided: decisions in use, by kind of forward.
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
        names = {module: names.get(module, "") for module, _ in blocks}
        self._numbers = {module: number for number, (module, _) in enumerate(blocks)}
        super().__init__(model, blocks, one_by_one, context, no_operations, save_sums)
        forwards = ((names[module], layer_of(module, "segment")) for module, _ in blocks)
        self._calls = {name: forward.call for name, forward in forwards if forward is not None}
        self._budget, self._rules = budget, rules
        self._forward: MeasuredForward | DecidedForward | None = None  # under way
        self._started = 0  # bytes of activations when the forward began
        self._waiting = WaitingForwards(budget.ledger, drops=not budget.together)
        self._services = AutoServices(context, budget, self._waiting, names, self._count)
        self.measured: dict[PassKey, PassMeasures] = {}
        self.decided: dict[PassKey, AppliedDecision] = {}
        self._grown: dict[PassKey, PassMeasures] = {}  # of forwards that took more than their decisions count on

    def run(self, block: BlockForward, args: Any, kwargs: Any) -> Any:
        """A block's forward; savers store its saved tensors only by a decision.

        Tensors saved between and after blocks stay on the device; the backward reads the last ones at once.
        """
        saver, apart = self._context.saver, block.left_alone and not self._inside
        before = saver.asked
        if apart:
            saver.ask_all()
        try:
            return super().run(block, args, kwargs)
        finally:
            saver.asked = before if apart or self._inside or self._forward is None else ()

    @property
    def known(self) -> dict[PassKey, PassMeasures]:
        """Measures from which decisions were made."""
        return {key: applied.measures for key, applied in self.decided.items()}

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decision for each block of each kind of forward, predicted beside measured."""
        return [row for applied in self.decided.values() for row in rows_of(applied, self._calls)]

    def step_ends(self, comm: Comm, world: Comm) -> list[StepEnd]:
        """The agreement of the ranks on the measurements."""
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
            self.decided[key] = AppliedDecision(decision, measures, self._chain(measures).least, again=again)
            self.measured.pop(key, None)
        self._grown.clear()
        self._waiting.varies = self._waiting.varies or self._seem_to_vary()

    def _seem_to_vary(self) -> bool:
        """Whether blocks were left out so far, or blocks of one class saved unlike bytes in one forward."""
        whole = {name for name, call in self._calls.items() if not layer_of(call.module, "segment").left_alone}
        forwards = [applied.measures.blocks for applied in self.decided.values()]
        kinds = [{(type(self._calls[block.name].module), block.saved) for block in blocks} for blocks in forwards]
        alike = all(len(each) == len({kind for kind, _ in each}) for each in kinds)
        return not alike or whole != {block.name for blocks in forwards for block in blocks}

    def _chain(self, measures: PassMeasures, forwards: int = 1) -> PassChain:
        return PassChain(measures, self._rules, forwards)

    def _begin(self, *given: Any) -> None:
        super()._begin(*given)
        if self._budget.measures and torch.is_grad_enabled():
            self._budget.first.begin()
        self._forward, self._started = None, self._budget.activations

    def _end(self, *given: Any) -> None:
        forward, self._forward = self._forward, None
        self._context.saver.ask_all()
        super()._end(*given)
        if isinstance(forward, MeasuredForward):
            self._budget.copied = max(self._budget.copied, forward.copied)
            forward.measures.after = max(0, self._budget.activations - forward.held)
            self.measured.pop(NO_BLOCKS, None)
            if isinstance(forward, OverflowedForward):
                self._grow(forward.key, forward.applied, forward.first, forward.measures)
            else:
                self._add(forward.key, forward.measures)
        elif not (self.measured.keys() - {NO_BLOCKS}) and self._budget.measures and torch.is_grad_enabled():
            self._add(NO_BLOCKS, PassMeasures(after=self._budget.activations))

    def _add(self, key: PassKey, measures: PassMeasures) -> None:
        before = self.measured.get(key)
        self.measured[key] = measures if before is None else measures.highest(before)

    def _grow(self, key: PassKey, applied: AppliedDecision, first: int, rest: PassMeasures) -> None:
        """Update the measures for later decisions with a forward's blocks, from the block `first` on."""
        before = self._grown.get(key, applied.measures)
        whole = PassMeasures(before.blocks[:first] + rest.blocks, before.before, rest.after)
        grown = before.highest(whole)
        if grown != before and not self._budget.together:
            self._grown[key] = grown

    def _next_segment(self, module: nn.Module, arguments: Any) -> BlockSegment | None:
        number, self._context.saver.asked = self._called, ()
        if number == 0 or self._forward is None:
            self._forward = self._enter(module, arguments)
        self._called += 1
        if isinstance(self._forward, DecidedForward):
            self._forward = self._go_on(self._forward, number, module)
        forward = self._forward
        segment = forward.segment(number) if isinstance(forward, DecidedForward) else forward.segment()
        if segment is not None:
            segment.graph = forward.graph
            if self._waiting.drops:  # it may be computed again after that
                segment.waits, segment.often = self._waiting.keep, True
        return segment

    def _go_on(self, forward: DecidedForward, number: int, module: nn.Module) -> DecidedForward | OverflowedForward:
        """The forward in its next state."""
        grown = forward.enter(number)
        if grown is not None:
            rest = PassMeasures([grown], after=forward.applied.measures.after)
            self._grow(forward.key, forward.applied, number - 1, rest)
        layer = layer_of(module, "segment")
        if forward.has_room(number, known=layer is None or layer.known):
            return forward
        self._waiting.varies = True
        return OverflowedForward(forward, number)

    def _keep_all(self, call: Call, args: Any, kwargs: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._called > 1 or hooks is None:
            return super()._keep_all(call, args, kwargs)
        graph = None if self._forward is None else self._forward.graph
        with saved_tensors_hooks(lambda tensor: (graph, hooks[0](tensor)), lambda saved: hooks[1](saved[1])):
            return super()._keep_all(call, args, kwargs)

    def _enter(self, module: nn.Module, arguments: Any) -> MeasuredForward | DecidedForward:
        self._first = module
        weights = self._context.places()
        shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = (self._numbers[module], *(tuple(shapes) if self._budget.by_shape else ()))
        applied, others = self.decided.get(key), len(self._waiting)
        if applied is None:
            return MeasuredForward(self._services, key, weights, self._waiting.begin())
        if others >= self._budget.sharing:
            applied = self._beside_others(applied, others + 1)
        self._budget.count(others + 1)
        return DecidedForward(self._services, key, weights, self._waiting.begin(), applied)

    def _beside_others(self, applied: AppliedDecision, forwards: int) -> AppliedDecision:
        """Decide for one more forward than planned, within the rest of the budget.

        If that is too little, it is the decision of the fewest bytes: graphs may end meanwhile, and else the ledger
        refuses. Ranks that decide together take that at once.
        """
        budget, measures = self._budget, applied.measures
        chain = self._chain(measures)
        budget.extend(forwards, self._chain(measures, forwards).least)
        found = None if self._rules.together else chain.decide(budget.left)
        return AppliedDecision(found or chain.frugal, measures, chain.least)

    def _compute(self, region: Region, arguments: Any, hooks: Any, watching: Any = None) -> Any:
        forward, compute = self._forward, super()._compute

        def run(hooks: Any, meter: Any) -> Any:
            return compute(region, arguments, hooks, meter)

        if isinstance(forward, MeasuredForward):
            return forward.compute(region, arguments, hooks, run, self._started)
        return run(hooks, watching) if forward is None else forward.compute(region, hooks, run)

    def _block_ended(self, left_alone: bool) -> None:
        forward = self._forward
        if not isinstance(forward, MeasuredForward):
            return
        if not left_alone:
            self._budget.count(len(self._waiting))
            forward.block_ended()
        elif forward.begins:
            self._waiting.forget(forward.graph)
            self._forward, self._called = None, 0  # the first other block begins the chain, as in later forwards


class AutoStepEnd:
    """Has the ranks agree on the largest bytes of all and the seconds of one, and decide.

    Args:
        comm: of the ranks that have the same blocks.
        world: of all.
    """

    reads = False

    def __init__(self, recomputation: AutoRecomputation, budget: ActivationBudget, comm: Comm, world: Comm) -> None:
        self._recomputation, self._budget, self._comm = recomputation, budget, comm
        self._everyone = world if budget.first.waits else comm
        self._room: int | None = None
        self._sharing = 0  # forwards for which decisions were made

    @property
    def readings(self) -> Mapping[str, Mapping[str, Any]]:
        """None of layers."""
        return {}

    def before_update(self) -> None:
        """Refuse a budget that is too small before the first update, on all ranks alike, and as if nothing had run.

        Raises:
            BudgetExceeded: with the least `device_memory`.
        """
        recomputation, budget = self._recomputation, self._budget
        if self._room is not None:
            return
        budget.foresee()
        room, measured = self._agreed(budget.room, dict(recomputation.measured))
        found = [recomputation.needed(measured) - room, room]
        short, room = max(self._everyone.agree_on(found, "room for activations"))
        if short > 0:
            budget.first.undo()
            recomputation.measured.clear()
            raise budget.too_small(short + room, room)

    def end_step(self, skipped: bool) -> None:
        """Make the open decisions; the ranks agree in the first step, and always if blocks hold collectives."""
        recomputation, budget = self._recomputation, self._budget
        measured, room = dict(recomputation.measured), budget.room
        if self._room is None or budget.together:
            room, measured = self._agreed(room, measured)
        budget.end_step()
        budget.first.end()
        if self._room is None or room < self._room:  # later steps may hold more beside activations
            measured, self._room = {**recomputation.known, **measured}, room
        elif budget.sharing != self._sharing:
            measured = {**recomputation.known, **measured}
        self._sharing = budget.sharing
        recomputation.apply(measured, self._room)

    def _agreed(self, room: int, measured: Mapping[PassKey, PassMeasures]) -> tuple[int, dict[PassKey, PassMeasures]]:
        """The least room and the largest measurements of the ranks; a collective call."""
        budget = self._budget
        mine = [room, budget.forwards, budget.seen, [[key, asdict(each)] for key, each in measured.items()]]
        answers = self._comm.agree_on(mine, "activations of the step")
        budget.forwards, budget.seen = (max(each[n] for each in answers) for n in (1, 2))
        return min(each[0] for each in answers), _merged(pair for answer in answers for pair in answer[3])


def _merged(pairs: Iterable[tuple[Any, Any]]) -> dict[PassKey, PassMeasures]:
    """Measurements of all ranks, as JSON values, in one mapping."""
    found: dict[PassKey, PassMeasures] = {}
    for key, values in pairs:
        blocks = []
        for block in values["blocks"]:
            tails = tuple(SavedTail(**each) for each in block["tails"])
            stored = tuple(None if each is None else StoredCosts(**each) for each in block["stored"])
            remade = tuple(_remade(each) for each in block["remade"])
            blocks.append(BlockMeasures(**{**block, "tails": tails, "stored": stored, "remade": remade}))
        measures, kind = PassMeasures(blocks, values["before"], values["after"]), _frozen(key)
        found[kind] = found[kind].highest(measures) if kind in found else measures
    return found


def _remade(values: Mapping[str, Any]) -> RemadeCosts:
    return RemadeCosts(**{**values, "recipes": tuple(Recipe(**each) for each in values["recipes"])})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
