"""Replay: the state that a forward reads besides weights and inputs, so that its recomputation gives the same values.

A recomputation reads the random numbers, the buffers and the plain attributes (`training` among them) of its forward,
and its writes into buffers and attributes are dropped: after a step, statistics and counters are as after one forward
of each microbatch, in order (Chen et al., 1604.06174, leave that to the framework). Further dependencies show in its
values ([Note: other values]).

[Note: other values] A forward that is computed again with other random numbers, or with another value of a variable
that the model has set since, gives other values in nearly every element, so a sample of a few elements shows it.
Samples of all tensors are taken in the first forwards of a block, and of every eighth later, of others each time: less
than a percent of a step.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroshard.memory.ledger import Category, Ledger
from zeroshard.platform import accelerator
from zeroshard.replay.generators import PYTHON_AND_NUMPY, ReachedGenerators, Source

POINTS = 32  # elements of a sample, about
FIRST = 3  # forwards of which all tensors are sampled
EVERY = 8  # of so many tensors one is sampled later
SELDOM = 64  # on an accelerator, where a comparison waits for the device, the forwards between two that are sampled
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest element: the last bits may differ
USUAL = 1e-3
WITHOUT_NUMPY = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
OTHER_VALUES = (
    "its values are others, so something that it reads has changed between forward and backward, such as weights by a "
    "step since, a generator of random numbers that no module or function of it names, or a variable that the model "
    "sets before each call. Call the backward before the step, make the generator an attribute of the module, and hand "
    "over the variable as an argument, or set it as a number in an attribute of the module"
)
MISSED = (
    "The model drew random numbers from Python's or numpy's generators in a forward for the first time, and not in its "
    "first one. If a block that is computed again drew them, its backward is refused this time; later forwards replay "
    "them. Draw them in the first forward too, use torch's random numbers, or set recompute='off'."
)
SIMPLE = (
    *(int, float, complex, str, bytes, NoneType, Enum, np.generic, torch.dtype, torch.device, torch.Size, type),
    *(FunctionType, BuiltinFunctionType),
)
Values = dict[str, Tensor | None]


class Replay:
    """One forward's random numbers, buffers and plain attributes. Made before it; `end` is called after it.

    Args:
        modules: those whose buffers and attributes the forward may read and change.
        ledger: records the copies.
        often: whether the forward may be recomputed several times, so that it must not write into the copies.
        sources: of random numbers besides torch's own, which are replayed too.

    Attributes:
        device: whose random numbers are replayed, with those of the CPU.
        nbytes: of the copied buffers.
        others: the states of the other sources.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        ledger: Ledger,
        often: bool = False,
        sources: Sequence[Source] = PYTHON_AND_NUMPY,
    ) -> None:
        self._modules, self._ledger, self._often = modules, ledger, often
        self.device = device
        self._random, self._device_random = torch.get_rng_state(), accelerator.random_state(device)
        self.others = GeneratorStates(sources)
        self._attributes = PlainAttributes(modules)
        copies: dict[int, Tensor] = {}  # one for a buffer that several modules share
        self._before: dict[nn.Module, Values] = {}
        self._copies: dict[nn.Module, Values] = {}
        for module in filter(_has_buffers, modules):
            self._before[module] = dict(module._buffers)
            self._copies[module] = {name: _copy(buffer, copies) for name, buffer in module._buffers.items()}
        self.nbytes = 0

    def end(self) -> None:
        """Keep the earlier values of the buffers that the forward has changed, and no others."""
        self.others.end()
        kept: dict[int, Tensor] = {}
        for module in (m for m in self._modules if m._buffers or m in self._before):
            before, copies = self._before.get(module, {}), self._copies.pop(module, {})
            changed: Values = {}
            for name in {**before, **module._buffers}:
                now, copy = module._buffers.get(name), copies.get(name)
                if now is not before.get(name) or name not in before or not _same_buffer(now, copy):
                    changed[name] = copy
            if changed:
                # Buffers that are not to be there again are left out; the rest is as it is.
                self._copies[module] = {name: changed.get(name, before[name]) for name in before}
                kept |= {id(copy): copy for copy in changed.values() if copy is not None}
        self._before.clear()
        self.nbytes = sum(copy.nbytes for copy in kept.values())
        if self.nbytes:
            self._ledger.take(Category.BUFFERS, self.nbytes, "buffers for a recomputation")

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the forward's state inside; afterwards buffers, attributes and random numbers are as they are now."""
        now = {module: dict(module._buffers) for module in self._copies}
        try:
            again: dict[int, Tensor] = {}
            for module, values in self._copies.items():
                _install(module, {n: _copy(v, again) for n, v in values.items()} if self._often else values)
            with accelerator.forked_random([self.device]), self.others.again(), self._attributes.again():
                torch.set_rng_state(self._random)
                accelerator.set_random_state(self.device, self._device_random)
                yield
        finally:
            for module, current in now.items():
                _install(module, current)

    def drop(self) -> None:
        """Free the copies after the backward."""
        self._copies.clear()
        if self.nbytes:
            self._ledger.give(Category.BUFFERS, self.nbytes, "buffers for a recomputation")
            self.nbytes = 0


class ModelDraws:
    """The generators from which blocks of a model may draw.

    Args:
        reached: by the blocks' code.
    """

    def __init__(self, reached: ReachedGenerators) -> None:
        self._reached = reached
        self._more: Sequence[Source] = ()
        self._known, self._missed = False, False
        self._states = GeneratorStates(())

    def begin(self, trains: bool) -> None:
        """Begin a forward."""
        self._missed = False
        if trains and self._reached.looks:
            self._reached.look()
        self._more = self._reached.found if trains else ()
        self._states = GeneratorStates(PYTHON_AND_NUMPY if trains and not self._known else ())

    def sources(self, may_draw: bool) -> Sequence[Source]:
        """Generators that blocks reach; Python's and numpy's too for a block that `may_draw`, or if the model draws."""
        watched = may_draw or self._known
        self._missed = self._missed or not watched
        return (*PYTHON_AND_NUMPY, *self._more) if watched else self._more

    def end(self) -> None:
        """End the forward; warns if it drew numbers that may be missed."""
        self._states.end()
        if self._states.drew:
            self._known = True
            if self._missed:
                warnings.warn(MISSED, stacklevel=5)


class GeneratorStates:
    """The states of generators at construction, before a forward; `end` is called after it.

    Attributes:
        drew: after `end`, whether the forward changed any generator's state.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = [(source, source[0]()) for source in sources]
        self.drew = False

    def end(self) -> None:
        """Keep the states of the generators from which the forward drew, and no others."""
        self._before = [(source, state) for source, state in self._before if not _same_state(state, source[0]())]
        self.drew = bool(self._before)

    def put_back(self) -> None:
        """Restore the generators to their kept states."""
        for (_, write), state in self._before:
            write(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the generators' kept states inside; afterwards they are as they are now."""
        now = [(write, read()) for (read, write), _ in self._before]
        self.put_back()
        try:
            yield
        finally:
            for write, state in now:
                write(state)


class PlainAttributes:
    """The plain attributes of modules at construction, and the tensors among their attributes.

    Of a tensor with a graph only a reference is kept that does not keep it alive: it may be an earlier result.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._then = [(table := vars(module), tuple(table), _plain_of(table)) for module in modules]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the attributes inside; afterwards all are as they are now."""
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


class ForwardSamples:
    """Samples of one forward of a block: of its saved tensors and of its outputs.

    Args:
        forwards: number of the block's forwards before it.
        on_accelerator: whether it runs on one.
    """

    def __init__(self, forwards: int, on_accelerator: bool) -> None:
        self._forwards, self._spacing = forwards, spacing(forwards, on_accelerator)
        self._ends: list[bytes | None] = []

    def saved(self, tensor: Tensor, number: int) -> bytes | None:
        """A sample of the saved tensor with this number, if it is compared."""
        compared = self._spacing and (number + self._forwards) % self._spacing == 0
        return sample_of(tensor) if compared else None

    def returned(self, values: Sequence[Any]) -> None:
        """Sample the outputs at the end of the forward."""
        if self._spacing:
            self._ends = [sample_of(each) if isinstance(each, Tensor) else None for each in values]

    def agree(self, values: Sequence[Any]) -> bool:
        """Whether a recomputation's outputs have the same values; False if they were not sampled."""
        pairs = [(each, sample) for each, sample in zip(values, self._ends, strict=False) if sample is not None]
        return bool(pairs) and all(isinstance(each, Tensor) and agrees(each, sample) for each, sample in pairs)


def spacing(forwards: int, on_accelerator: bool) -> int:
    """One of so many tensors is sampled in a forward, by the number of forwards before it; 0 for none."""
    if forwards < FIRST:
        return 1
    if on_accelerator:
        return 0 if forwards % SELDOM else 1
    return EVERY


def sample_of(tensor: Tensor) -> bytes | None:
    """The values of a few elements; None for tensors whose elements cannot be read so.

    They are bytes, no tensor: small allocations between large ones would fragment memory.
    """
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        span = tensor.numel()
        if not tensor.is_contiguous():
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        step = span // POINTS | 1  # odd, so that it meets all columns
        points = tensor.detach().as_strided(((span - 1) // step + 1,), (step,), tensor.storage_offset())
        if points.dtype in WITHOUT_NUMPY:
            points = points.view(WITHOUT_NUMPY[points.dtype])
        return points.cpu().numpy().tobytes()


def agrees(tensor: Tensor, sample: bytes) -> bool:
    """Whether a tensor has the values of a sample, up to rounding."""
    found = sample_of(tensor)
    if found == sample:
        return True
    if found is None or len(found) != len(sample) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    mine, other = (torch.frombuffer(bytearray(each), dtype=tensor.dtype).to(wide) for each in (found, sample))
    tolerance = TOLERANCES.get(tensor.dtype, USUAL) * other.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(mine, other, rtol=0.0, atol=tolerance, equal_nan=True)


def _plain_of(table: dict[str, Any]) -> dict[str, Any]:
    """The kept attributes of a module; of a tensor with a graph a weak reference."""
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
    """The treatment of an attribute's value, by its class."""

    def __missing__(self, kind: type) -> int:
        found = LOOKED_INTO if kind is tuple or issubclass(kind, Tensor) else NOT_KEPT
        self[kind] = AS_IT_IS if issubclass(kind, SIMPLE) else found
        return self[kind]


_KINDS = _Kinds()


def _has_buffers(module: nn.Module) -> bool:
    return bool(module._buffers)


def _copy(buffer: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
    if buffer is None or buffer.is_meta:
        return buffer
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies[id(buffer)]


def _same_buffer(now: Tensor | None, copy: Tensor | None) -> bool:
    if now is None or copy is None:
        return now is copy
    return now is copy or (now.shape == copy.shape and torch.equal(now, copy))


def _install(module: nn.Module, values: Values) -> None:
    for name in module._buffers.keys() - values.keys():
        del module._buffers[name]
    module._buffers.update(values)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same_state(value, other[name]) for name, value in one.items())
    return bool(one == other)
