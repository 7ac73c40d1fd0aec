"""Random number generators beside torch's default ones: Python's, numpy's, and those that modules hold or reach.

Reading the state of Python's and numpy's takes some 0.1 ms, so it is done where a forward may draw from them.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from zeroshard.replay.reachable import generators_reached

LOOKS = 3  # forwards
Source = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads a state, writes one

MISSED = (
    "The model drew random numbers from Python's or numpy's generators in a forward for the first time, and not in its "
    "first one. If a block that is computed again drew them, its backward is refused this time; later forwards replay "
    "them. Draw them in the first forward too, use torch's random numbers, or set recompute='off'."
)
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
    """Generators that the code of modules reaches, beside those that are attributes of modules.

    They are looked for in the first forwards, by which they have been made.

    Args:
        modules: all, down to the innermost.
        roots: where the search begins: the modules, and functions that stand for their forwards.
    """

    def __init__(self, modules: Iterable[nn.Module], roots: Iterable[Any] = ()) -> None:
        self._modules = list(modules)
        self._roots = [*self._modules, *roots]
        self._looked = 0
        self._found: list[Source] = []

    def look(self) -> Sequence[Source]:
        """Those that a forward, which is about to begin, may draw from."""
        if self._looked < LOOKS:
            self._looked += 1
            held = {id(value) for module in self._modules for value in vars(module).values()}
            self._found = sources_among(each for each in generators_reached(self._roots) if id(each) not in held)
        return self._found


class GeneratorStates:
    """The states of generators when this is made, before a forward; `end` is called after it.

    Attributes:
        drew: after `end`, whether any generator has another state then.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = [(source, source[0]()) for source in sources]
        self.drew = False

    def end(self) -> None:
        """Keep the states of those that the forward drew from, and no others."""
        self._before = [(source, state) for source, state in self._before if not _same(state, source[0]())]
        self.drew = bool(self._before)

    def put_back(self) -> None:
        """Have the generators draw what they drew since."""
        for (_, write), state in self._before:
            write(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have the generators draw the same inside; afterwards they are as they are now."""
        now = [(write, read()) for (read, write), _ in self._before]
        self.put_back()
        try:
            yield
        finally:
            for write, state in now:
                write(state)


class ModelDraws:
    """Which generators blocks of a model may draw from, as far as that is known.

    Args:
        reached: by the blocks' code.
    """

    def __init__(self, reached: ReachedGenerators) -> None:
        self._reached = reached
        self._more: Sequence[Source] = ()
        self._known, self._missed = False, False
        self._states = GeneratorStates(())

    def begin(self, trains: bool) -> None:
        """A forward begins."""
        self._missed = False
        self._more = self._reached.look() if trains else ()
        self._states = GeneratorStates(PYTHON_AND_NUMPY if trains and not self._known else ())

    def sources(self, may_draw: bool) -> Sequence[Source]:
        """Those that the blocks reach; with Python's and numpy's for one that `may_draw`, or if the model draws."""
        watched = may_draw or self._known
        self._missed = self._missed or not watched
        return (*PYTHON_AND_NUMPY, *self._more) if watched else self._more

    def end(self) -> None:
        """It ends; warns if it drew numbers that may be missed."""
        self._states.end()
        if self._states.drew:
            self._known = True
            if self._missed:
                warnings.warn(MISSED, stacklevel=5)


def _source_of(value: Any) -> Source | None:
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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same(value, other[name]) for name, value in one.items())
    return bool(one == other)
