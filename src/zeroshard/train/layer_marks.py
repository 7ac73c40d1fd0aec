"""The layers that run while the memory of a step is recorded: hooks that mark the place of each in the events."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.memory.ledger import Event
from zeroshard.units.find import find_units

Mark = tuple[int, str, str]  # first event, phase, and layer; no layer outside of all


class LayerMarks:
    """Marks of the layers of a model among the events of one step.

    Layers are the model's units. The forward of one lies between its hooks; its backward begins with the gradient of
    its output and ends with that of its input. The hooks change no value.

    Args:
        events: the list to which the ledger adds events while the marks are set.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events, self._marks = events, [(0, "", "")]

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Mark the layers of a model inside; none of a compiled layer, which hooks would compile again."""
        handles: list[RemovableHandle] = []
        for unit in find_units(model):
            if unit.name and getattr(unit.module, "_compiled_call_impl", None) is None:
                handles.append(unit.module.register_forward_pre_hook(partial(self._begin, unit.name)))
                handles.append(unit.module.register_forward_hook(partial(self._end, unit.name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def places(self) -> list[tuple[str, str]]:
        """Phase and layer of every event, in order; two empty texts outside of all layers."""
        firsts = [first for first, *_ in self._marks]
        found = (self._marks[bisect_right(firsts, i) - 1] for i in range(len(self._events)))
        return [(phase, layer) for _, phase, layer in found]

    def _mark(self, phase: str, layer: str) -> None:
        self._marks.append((len(self._events), phase, layer))

    def _leave(self, phase: str, layer: str) -> None:
        """Mark the end of a layer, unless another one has begun."""
        if self._marks[-1][1:] == (phase, layer):
            self._mark("", "")

    def _begin(self, layer: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._mark("forward", layer)
        for given in filter(_has_gradient, args):
            given.register_hook(lambda _: self._leave("backward", layer))

    def _end(self, layer: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._leave("forward", layer)
        outputs = output if isinstance(output, tuple) else (output,)
        for made in filter(_has_gradient, outputs):
            made.register_hook(lambda _: self._mark("backward", layer))


def _has_gradient(value: Any) -> bool:
    """Whether a value is the result of an operation with a gradient; hooks of leaves would outlive the step."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
