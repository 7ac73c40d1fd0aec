"""Calls of modules outside of the model's own forward, under stage 3: a value head, an output layer on chunks of rows.

[Note: lone calls] The unit of such a module is gathered for the call by an announcement, which the other ranks answer
with their next one ([Note: unplanned units] in `gather_order`), and freed after it. So ranks may make lone calls of
other modules, or other numbers of them, before the next call that they make together. Weights that autograd saves are
gathered again in the backward, as those of the model's forward are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from zeroshard.parts.weights import Gatherer
from zeroshard.saved.kept import HooksOfForward, recomputed_by_others
from zeroshard.units.hooks import Hook, outside_transforms


class Stores(Protocol):
    """Forwards of one model."""

    @property
    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """The hooks of saved tensors."""

    def leaving(self, output: Any, unit: int | None = None) -> Any:
        """An output, with copies of the tensors that lie in a buffer about to be emptied."""


@dataclass(slots=True, eq=False)
class LoneCall:
    """One call under way.

    Attributes:
        module: that was called; None for a method.
        hooks: of saved tensors; None without gradients.
        handle: of the hook that ends the call; None where the caller ends it.
        units: that were gathered for it, its own first.
        depth: calls of the module inside of itself.
    """

    module: nn.Module | None
    hooks: saved_tensors_hooks | None = None
    handle: RemovableHandle | None = None
    units: dict[int, None] = field(default_factory=dict)
    depth: int = 0


class LoneCalls:
    """The calls of a model's modules outside of its forward ([Note: lone calls]).

    Attributes:
        open: those under way, the innermost last.
    """

    def __init__(self, stores: Stores, gatherer: Gatherer) -> None:
        self._stores, self._gatherer = stores, gatherer
        self.open: list[LoneCall] = []

    def begin(self, module: nn.Module, unit: int, ended: bool) -> None:
        """Begin the call of a module, or note that a module inside of it needs a unit.

        Args:
            unit: of the module.
            ended: whether the caller calls `end` after the module's forward; else a hook does.
        """
        if not self.open:
            call = self._begin(module)
            if not ended:
                call.handle = module.register_forward_hook(Hook(self._end), always_call=True)
        elif self.open[-1].module is module:
            self.open[-1].depth += 1
        self.open[-1].units[unit] = None

    def needs(self, unit: int) -> None:
        """Free a unit at the end of the call that reads a parameter of it."""
        self.open[-1].units[unit] = None

    def end(self, module: nn.Module, output: Any) -> Any:
        """End the call of a module, unless it was called inside of another; returns its output."""
        if not self.open or self.open[-1].module is not module:
            return output
        if self.open[-1].depth:
            self.open[-1].depth -= 1
            return output
        return self._finish(output)

    @contextmanager
    def method(self) -> Iterator[Callable[[Any], Any]]:
        """The call of a method inside; gives the function to be applied to its output."""
        self._begin(None)
        ended: list[bool] = []

        def end(output: Any) -> Any:
            ended.append(True)
            return self._finish(output)

        try:
            yield end
        finally:
            if not ended:
                self._finish(None)

    def _begin(self, module: nn.Module | None) -> LoneCall:
        call = LoneCall(module)
        # A checkpoint of torch around the call saves nothing of it, and counts the tensors when it computes again.
        if torch.is_grad_enabled() and not recomputed_by_others(in_backward=False):
            call.hooks = HooksOfForward(*self._stores.hooks)
            call.hooks.__enter__()
        self.open.append(call)
        return call

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.end(module, output)

    def _finish(self, output: Any) -> Any:
        call = self.open.pop()
        if call.handle is not None:
            call.handle.remove()
        if call.hooks is not None:
            call.hooks.__exit__(None, None, None)
        output = self._stores.leaving(output)
        with outside_transforms():
            for unit in call.units:
                self._gatherer.done(unit)
        return output
