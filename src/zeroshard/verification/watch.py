"""The inputs and outputs of each module in a forward, and the gradients of its outputs, as sketches.

The same hooks stand on the model under the plan and on that of the plain loop, so that calls can be set side by side.
Calls are counted from each entry of the whole model; a forward that is computed again (recomputation, the second run of
a pipeline's chunk) adds only the gradients, since its outputs were noted the first time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.parts.technique import ROWS_OF_OTHERS
from zeroshard.units.hooks import outside, tensors_in
from zeroshard.verification.sketch import Sketch, sketch

Place = tuple[str, int]  # the path of a module, and the number of the call in one forward


@dataclass(slots=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        inputs, outputs: sketches of the floating-point tensors in its arguments and results.
        weights: of its own parameters when it was entered, by attribute.
        gradients: of the outputs, by their number, as they came in the backward.
        ended: calls that had ended before; orders the calls of one forward.
    """

    inputs: list[Sketch]
    weights: dict[str, Sketch]
    outputs: list[Sketch] = field(default_factory=list)
    gradients: dict[int, Sketch] = field(default_factory=dict)
    ended: int = -1


class Watch:
    """Hooks on the modules of a model, which torch.compile leaves out of its graphs; not on those for rows of others.

    Args:
        part: the number of the microbatch with these arguments of the model; None for one that is not compared.

    Attributes:
        calls: by microbatch, every call in the order in which the calls ended.
        now: the microbatch of the forward under way, or of the last one.
    """

    def __init__(self, model: nn.Module, part: Callable[[Any], int | None]) -> None:
        self._part, self._inside = part, False
        self._counts: dict[str, int] = {}
        self._entered: dict[Place, ModuleCall] = {}
        self.calls: dict[int, dict[Place, ModuleCall]] = {}
        self.now: int | None = None
        model.register_forward_pre_hook(outside(self._enter_model), with_kwargs=True)
        apart: list[str] = []  # modules whose inputs differ from those in the plain loop
        for path, module in model.named_modules():
            if getattr(module, ROWS_OF_OTHERS, False):
                apart.append(f"{path}.")
            if not f"{path}.".startswith(tuple(apart)):
                module.register_forward_pre_hook(outside(partial(self._enter, path)), with_kwargs=True)
                module.register_forward_hook(outside(partial(self._leave, path)))
        model.register_forward_hook(outside(self._leave_model), always_call=True)

    @contextmanager
    def step(self) -> Iterator[dict[int, dict[Place, ModuleCall]]]:
        """Record the calls inside; they are complete when it ends."""
        self.calls = {}
        yield self.calls

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._counts.clear()
        self._entered.clear()
        self.now = self._part((args, kwargs))
        self._inside = self.now is not None

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside:
            return
        number = self._counts[path] = self._counts.get(path, -1) + 1
        if self.now in self.calls and (path, number) in self.calls[self.now]:
            return
        weights = {name: sketch(p) for name, p in module._parameters.items() if p is not None and _has_values(p)}
        self._entered[path, number] = ModuleCall([sketch(t) for t in _numbers((args, kwargs))], weights)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._inside or self.now is None:
            return
        place = (path, self._counts.get(path, 0))
        calls, tensors = self.calls.setdefault(self.now, {}), list(_numbers(output))
        call = calls.get(place)
        if call is None:
            outputs = [sketch(tensor) for tensor in tensors]
            if any(value[1] != value[1] for value in outputs):
                return  # a placeholder (NaN): a stage reads shapes before it runs its modules
            call = calls[place] = self._entered.pop(place, ModuleCall([], {}))
            call.outputs, call.ended = outputs, len(calls) - 1
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(_note, call.gradients, number))


def _note(gradients: dict[int, Sketch], number: int, gradient: Tensor) -> None:
    gradients.setdefault(number, sketch(gradient))


def _has_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta


def _numbers(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors with values in a tree."""
    return (t for t in tensors_in(tree) if _has_values(t) and t.layout is torch.strided)
