"""Generators of random numbers that the code of modules can reach: global, enclosed, or attributes of any objects.

What a module's own functions name is followed, with the functions that these call: globals, enclosed variables,
defaults, attributes of classes, and of objects and containers found on the way. A generator that is reached in another
way is not found, and shows where a recomputation has other values ([Note: other values]).
"""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
LEAVES = (str, bytes, int, float, complex, Tensor, torch.dtype, torch.device, CodeType, type(None))
LIBRARIES = frozenset({"torch", "numpy", "random", "zeroshard", "builtins", "typing", "collections", "functools"})
MOST = 20_000  # values that are looked at


def generators_reached(roots: Iterable[Any]) -> list[Any]:
    """All that are reached from modules and functions, each once."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # kept alive, so that no new value gets the id of an old one
    pending: list[Any] = list(roots)
    while pending and len(seen) < MOST:
        value = pending.pop()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, KINDS):
            found[id(value)] = value
        else:
            pending += _followed(value)
    return list(found.values())


def _followed(value: Any) -> Iterator[Any]:
    """What can be reached from a value in one step."""
    if isinstance(value, FunctionType):
        if not _in_library(value):
            yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, dict):
        yield from list(dict.values(value))  # and not a method of its own, which may load things
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)
    elif isinstance(value, type):
        if not _in_library(value):
            yield from (member for kind in value.__mro__ if not _in_library(kind) for member in vars(kind).values())
    elif isinstance(value, nn.Module) or not (isinstance(value, ModuleType) or _in_library(value)):
        yield type(value)
        yield from list(getattr(value, "__dict__", {}).values())


def _of_function(function: FunctionType) -> Iterator[Any]:
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] not in LIBRARIES:
                yield from (vars(value)[each] for each in names if each in vars(value))
        else:
            yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _in_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0] in LIBRARIES
