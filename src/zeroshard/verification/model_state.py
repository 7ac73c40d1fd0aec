"""The state that forwards of a model change: its buffers, and plain attributes of its modules, such as counters."""

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CONSTANT = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, tuple, set, frozenset, deque)
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
DEEPEST = 4  # containers within each other that are looked into


@dataclass(frozen=True, slots=True)
class ModelState:
    """Copies of what forwards may change.

    Attributes:
        buffers: by name.
        attributes: numbers, texts, tensors without a graph, and containers of them, by module and attribute.
    """

    buffers: Mapping[str, Tensor]
    attributes: Mapping[tuple[str, str], Any]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """The present state of a model."""
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        found = {
            (path, name): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in OF_MODULES and _is_plain(value)
        }
        return cls(buffers, copy.deepcopy(found))  # in one go, for values that modules share

    def restore(self, model: nn.Module) -> None:
        """Give a model this state."""
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(self.buffers[name])
        modules = dict(model.named_modules())
        for (path, name), value in copy.deepcopy(dict(self.attributes)).items():
            modules[path].__dict__[name] = value


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in CONSTANT:
        return True
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.grad_fn is None and not value.is_meta
    if depth == DEEPEST:
        return False
    if isinstance(value, dict):
        return all(_is_plain(each, depth + 1) for pair in value.items() for each in pair)
    return isinstance(value, CONTAINERS) and all(_is_plain(each, depth + 1) for each in value)
