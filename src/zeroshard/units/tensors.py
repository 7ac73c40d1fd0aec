"""Tensors inside the arguments and outputs of modules, in any containers and objects."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

NOT_WALKED = (str, bytes, int, float, type, nn.Module, FunctionType, MethodType, ModuleType)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in mappings, sequences, sets and attributes of any objects."""
    pending, seen = [tree], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and not isinstance(item, NOT_WALKED) and id(item) not in seen:
            seen.add(id(item))
            pending += [value for _, value in _children(item)]


def with_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `change` applied to each tensor: tuples and sets are made anew, all else is changed in place."""
    seen: set[int] = set()

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return change(item)
        if item is None or isinstance(item, NOT_WALKED) or id(item) in seen:
            return item
        seen.add(id(item))
        changed = [(key, value, walk(value)) for key, value in _children(item)]
        if isinstance(item, (tuple, Set)):
            values = [new for _, _, new in changed]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)  # type: ignore[call-arg]
        for key, old, new in changed:
            if new is not old:
                _put(item, key, new)
        return item

    return walk(tree)


def _children(item: Any) -> list[tuple[Any, Any]]:
    """(key, index or attribute name; value) of each member of an object."""
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple, Set)):
        return list(enumerate(item))
    slots = [name for kind in type(item).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    held = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return list((held | getattr(item, "__dict__", {})).items())


def _put(item: Any, key: Any, value: Any) -> None:
    if isinstance(item, (list, MutableMapping)):
        item[key] = value
    elif not isinstance(item, Mapping):
        object.__setattr__(item, key, value)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
