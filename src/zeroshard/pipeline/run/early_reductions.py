"""Reductions that start inside of a backward: unit by unit, while the backward that completes their gradients goes on.

[Note: complete inside a backward] Autograd sums gradients in the flat buffers without a Python call, so no event marks
a unit's as complete. Therefore, in the one forward whose backward a REDUCE follows, each layer's input gets a hook.
When its gradient exists, the backward of this layer and of all later ones is over, except for weights used ahead of
their layer: so the arrivals of that backward are checked too. The input of a chunk's first layer comes last; its unit,
and all remaining ones, are left to the REDUCE.
"""

import weakref
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from zeroshard.parts.part import Parts
from zeroshard.pipeline.cut.chain import Entered
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Action, Kind, Schedule
from zeroshard.step.backward import Backward


class EarlyReductions:
    """Starts reductions of one rank's units ahead of the REDUCE of their chunk.

    Only a whole backward, in a step that ends with a flush, starts them, and only if gradients are reduced over ranks.

    Args:
        units: of each chunk.
        lent: units whose gradients are not complete before other stages have repaid theirs.
    """

    def __init__(
        self, stage: Stage, parts: Parts, backward: Backward, units: Mapping[int, Sequence[int]], lent: Collection[int]
    ) -> None:
        self._backward, self._units, self._lent = backward, units, lent
        self._layers = [stage.chain.number(unit.name) for unit in stage.units]  # of the units, rising
        self._leaving = {
            chunk
            for chunk, numbers in units.items()
            for part in (part for number in numbers for part in parts.of_units[number])
            if part.gradients is not None and part.gradients.reduction.needed and not stage.pipeline.streams
        }
        self._completing: set[tuple[int, int | None]] = set()

    def plan(self, actions: Schedule) -> None:
        """Find the backwards of a list that complete the gradients of their chunk."""
        ends = {action[1:3] for action in actions if action.kind is Kind.REDUCE and action.chunk in self._leaving}
        self._completing = ends & {action[1:3] for action in actions if action.kind is Kind.BACKWARD}

    def listener(self, action: Action) -> Entered | None:
        """Called with the activations of a forward, or of a recomputed one; None if it keeps no graph."""
        listens = torch.is_grad_enabled() and action[1:3] in self._completing
        return self._listen if listens else None

    def begin(self, action: Action) -> None:
        """Begin a backward."""
        if action[1:3] in self._completing:
            self._backward.reductions.begin(self._units[action.chunk])

    def start(self, first: int) -> None:
        """Start reductions: the backward of unit `first` and of all later ones is over."""
        self._backward.reductions.launch(self._complete, first)

    def _listen(self, layer: int, activation: Tensor) -> None:
        if activation.requires_grad:
            activation.register_hook(_Passed(self, bisect_left(self._layers, layer)))

    def _complete(self, unit: int) -> bool:
        return unit not in self._lent and self._backward.reductions.complete(unit)


class _Passed:
    """A hook on the activation that enters a layer, called with its gradient."""

    __slots__ = ("early", "first")

    def __init__(self, early: EarlyReductions, first: int) -> None:
        # weak: Python's collector cannot find a cycle through autograd
        self.early, self.first = weakref.ref(early), first

    def __call__(self, gradient: Tensor) -> None:
        early = self.early()
        if early is not None:
            early.start(self.first)
