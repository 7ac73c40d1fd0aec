"""Plain attributes of modules: numbers, words, switches and such, which a model may set anew before each call."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIMPLE = (
    *(int, float, complex, str, bytes, NoneType, Enum, np.generic, torch.dtype, torch.device, torch.Size, type),
    *(FunctionType, BuiltinFunctionType),
)


class PlainAttributes:
    """The plain attributes of modules when this is made, and the tensors among their attributes.

    Of a tensor with a graph only a reference is kept that does not keep it alive: it may be an earlier result.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._then = [(table := vars(module), tuple(table), _plain_of(table)) for module in modules]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have them as they were inside; afterwards all attributes are as they are now."""
        now = [dict(table) for table, _, _ in self._then]
        for (table, names, then), current in zip(self._then, now, strict=True):
            for name in _plain_of(current).keys() - set(names) if len(current) != len(names) else ():
                del table[name]
            for name, value in then.items():
                found = value() if isinstance(value, weakref.ref) else value
                if current.get(name, self) is not found and (found is not None or value is None):
                    table[name] = found
        try:
            yield
        finally:
            for (table, _, _), current in zip(self._then, now, strict=True):
                for name in table.keys() - current.keys():
                    del table[name]
                for name, value in current.items():
                    if table.get(name, self) is not value:
                        table[name] = value


def _plain_of(table: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are kept; of a tensor with a graph a weak reference."""
    found = {name: value for name, value in table.items() if _KINDS[type(value)]}
    for name in [name for name, value in found.items() if _KINDS[type(value)] == LOOKED_INTO]:
        value = found[name]
        if isinstance(value, Tensor):
            found[name] = weakref.ref(value) if value.requires_grad else value
        elif not all(_KINDS[type(each)] == AS_IT_IS for each in value):
            del found[name]
    found.pop("forward", None)  # which this package replaces itself
    return found


NOT_KEPT, AS_IT_IS, LOOKED_INTO = 0, 1, 2  # a tensor or a tuple is looked into


class _Kinds(dict[type, int]):
    """What the class of an attribute's value says of it."""

    def __missing__(self, kind: type) -> int:
        found = LOOKED_INTO if kind is tuple or issubclass(kind, Tensor) else NOT_KEPT
        self[kind] = AS_IT_IS if issubclass(kind, SIMPLE) else found
        return self[kind]


_KINDS = _Kinds()
