"""Generators of random numbers besides torch's default ones: Python's, numpy's, and those that modules hold or reach.

Reading the state of Python's and numpy's takes some 0.1 ms, so it is done where a forward may draw from them.

[Note: reached generators] The functions of a module are followed, with those that they call: globals, enclosed
variables, defaults, attributes of classes, and of objects and containers found on the way. A generator that is reached
in another way is not found, and shows where a recomputation has other values (`replay`, [Note: other values]).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LOOKS = 3  # forwards
Source = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads a state, writes one
Step = Callable[[Any], Iterable[Any]]  # the values reached from a value in one step
KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
CODE = (*KINDS, FunctionType, MethodType, type)  # looked at before data, of which there may be much
LEAVES = (str, bytes, int, float, complex, Tensor, torch.dtype, torch.device, CodeType, type(None))
DRAWING = {"torch", "numpy", "random", "zeroshard"}  # by generators that are looked for in another way
LIBRARIES = frozenset(
    DRAWING
    | {"builtins", "typing", "collections", "functools", "dataclasses", "enum", "abc", "re", "inspect", "importlib"}
    | {"logging", "warnings", "sympy", "mpmath", "huggingface_hub"}
)
MOST = 20_000  # values that are looked at
PYTHON_AND_NUMPY: Sequence[Source] = (
    (random.getstate, random.setstate),
    (partial(np.random.get_state, legacy=False), np.random.set_state),
)


def held_by(modules: Iterable[nn.Module]) -> list[Source]:
    """Generators that are attributes of modules, each once."""
    return sources_among({id(value): value for module in modules for value in vars(module).values()}.values())


def sources_among(values: Iterable[Any]) -> list[Source]:
    """The generators among values."""
    return [source for value in values if (source := _source_of(value)) is not None]


class ReachedGenerators:
    """Generators that the code of modules reaches, besides attributes of modules.

    The search runs before each of the first forwards, which may still make generators.

    Args:
        modules: all, down to the innermost.
        roots: where the search begins: the modules, and functions that stand for their forwards.

    Attributes:
        looks: number of forwards before which the search still runs.
        found: generators from which a forward may draw.
    """

    def __init__(self, modules: Iterable[nn.Module], roots: Iterable[Any] = ()) -> None:
        self._modules = list(modules)
        self._roots = [*self._modules, *roots]
        self.looks, self.found = LOOKS, list[Source]()

    def look(self) -> None:
        """Search for the generators from which the next forward may draw."""
        self.looks -= 1
        held = {id(value) for module in self._modules for value in vars(module).values()}
        self.found = sources_among(each for each in generators_reached(self._roots) if id(each) not in held)


def generators_reached(roots: Iterable[Any]) -> list[Any]:
    """All generators reached from modules and functions, each once; if there is too much, those that code reaches."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # kept alive, so that no new value gets the id of an old one
    code, data = [(_step_from(root), root) for root in roots], list[tuple[Step | None, Any]]()
    kinds: dict[int, tuple[type, Step | None, list[Any]]] = {}  # by the id of a type, which is kept alive too
    while (code or data) and len(seen) < MOST:
        step, value = (code or data).pop()
        if step is None or (key := id(value)) in seen:
            continue
        seen[key] = value
        if step is _end:
            found[key] = value
            continue
        for each in step(value):
            kind = type(each)
            if (known := kinds.get(id(kind))) is None:
                known = kinds[id(kind)] = kind, _step_from(each), code if isinstance(each, CODE) else data
            if known[1] is not None:
                known[2].append((known[1], each))
    return list(found.values())


def _step_from(value: Any) -> Step | None:
    """The step from all values of a value's type; None from leaves."""
    if isinstance(value, LEAVES):
        return None
    return next(step for kinds, step in STEPS if isinstance(value, kinds))


def _end(generator: Any) -> Iterable[Any]:
    return ()


def _of_function(function: FunctionType) -> Iterable[Any]:
    return () if _in_library(function) else _reached_by(function)


def _of_class(kind: type) -> Iterable[Any]:
    if _in_library(kind):
        return ()
    return [member for each in kind.__mro__ if not _in_library(each) for member in vars(each).values()]


def _of_module(module: nn.Module) -> Iterable[Any]:
    return [type(module), *module.__dict__.values()]


def _of_object(value: Any) -> Iterable[Any]:
    return () if _in_library(value) else [type(value), *getattr(value, "__dict__", {}).values()]


STEPS: Sequence[tuple[Any, Step]] = (  # the first that fits holds
    (KINDS, _end),
    (FunctionType, _of_function),
    (MethodType, lambda method: (method.__func__, method.__self__)),
    (partial, lambda made: (made.func, *made.args, *made.keywords.values())),
    ((staticmethod, classmethod), lambda method: (method.__func__,)),
    (property, lambda made: (made.fget, made.fset)),
    (dict, lambda mapping: list(dict.values(mapping))),  # and not a method of its own, which may load things
    ((list, tuple, set, frozenset), list),
    (type, _of_class),
    (nn.Module, _of_module),
    (ModuleType, lambda module: ()),
    (object, _of_object),
)


def _reached_by(function: FunctionType) -> Iterator[Any]:
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
    name = getattr(value, "__module__", None) or "builtins"  # of a user's object it may be anything
    return str(name).partition(".")[0] in LIBRARIES


def _source_of(value: Any) -> Source | None:
    if isinstance(value, random.SystemRandom):  # it draws from the operating system, and has no state
        return None
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, np.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None
