"""Shallow models: the same model with few of its repeated blocks, and the numbers of the deep one from theirs.

Memory, traffic and time grow by the same amount with every further block once there are a few, so that two depths
give all others; tests compare them with the engine at full depth.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.moe.choice import mixtures_of
from zeroshard.planner.predict.adapters import PackedLinear
from zeroshard.planner.predict.copies import zeroed_copy
from zeroshard.planner.predict.torch_internals import fakes

FEW = 4  # blocks from which on every further one costs the same
FAKES = logging.getLogger("torch._subclasses.fake_tensor")  # traces every operation that fails without values
STACKS = (nn.ModuleList, nn.Sequential)
_whole_models: WeakKeyDictionary[Callable[[], nn.Module], nn.Module] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Stack:
    """Repeated blocks at the end of a list.

    Attributes:
        path: of the list in the model.
        depth: number of the repeated blocks.
        others: number of the blocks before them.
    """

    path: str
    depth: int
    others: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of all blocks of the list in the model."""
        prefix = f"{self.path}." if self.path else ""
        return tuple(f"{prefix}{number}" for number in range(self.others + self.depth))


def stacks_of(model: nn.Module) -> list[Stack]:
    """The outermost lists that end in more than `FEW` blocks of one class, with parameters of the same shapes."""
    found: list[Stack] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{stack.path}.") or stack.path == "" for stack in found)
        if isinstance(module, STACKS) and not inside and len(module) > FEW:
            depth = _alike_at_the_end(list(module))
            found += [Stack(path, depth, len(module) - depth)] if depth > FEW else []
    return found


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model on which its rehearsal depends.

    Attributes:
        stacks: see `stacks_of`.
        parameters: number of all elements.
        used_parameters: of them, those that a token uses; None for mixtures that do not say how many experts it has.
        nbytes: of the model as it is made.
    """

    stacks: tuple[Stack, ...]
    parameters: int
    used_parameters: int | None = None
    nbytes: int = 0


def facts_of_model(model: nn.Module) -> ModelFacts:
    """The facts of a model."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters += sum(
        layer.numel - layer.weight.numel() for layer in model.modules() if isinstance(layer, PackedLinear)
    )
    mixtures, used = mixtures_of(model), None
    number = mixtures.experts
    chosen = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    if not number:
        used = parameters
    elif chosen is not None:
        used = int(parameters * (1 - mixtures.share * (1 - Fraction(chosen, number))))
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return ModelFacts(tuple(stacks_of(model)), parameters, used, nbytes)


def cut(model: nn.Module, depths: Mapping[str, int]) -> nn.Module:
    """Cut each stack to its first `depths[path]` blocks, in place."""
    for path, depth in depths.items():
        stack = model.get_submodule(path)
        assert isinstance(stack, STACKS)
        for name in list(stack._modules)[depth:]:
            del stack._modules[name]
    config = getattr(model, "config", None)
    if len(depths) == 1 and config is not None and hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = next(iter(depths.values()))
    return model


def probes(stacks: Sequence[Stack], few: int = FEW, step: int = 1) -> list[dict[str, int]]:
    """The depths to rehearse: few blocks everywhere, then `step` more in each single stack."""
    base = {stack.path: stack.others + few for stack in stacks}
    return [base, *({**base, stack.path: base[stack.path] + step} for stack in stacks)]


def deepen(
    stacks: Sequence[Stack], seen: Sequence[Mapping[str, float]], few: int = FEW, step: int = 1
) -> dict[str, float]:
    """The numbers of the whole model, from those at each of `probes`.

    Raises:
        PlanError: there are more or fewer sets of numbers than probes.
    """
    base, *more = seen
    if len(more) != len(stacks):
        raise PlanError(f"{len(seen)} depths were seen and {len(stacks) + 1} are needed.")
    whole = {}
    for name in dict.fromkeys(key for numbers in seen for key in numbers):
        start = base.get(name, 0)
        further = (numbers.get(name, 0) - start for numbers in more)
        pairs = zip(further, stacks, strict=True)
        whole[name] = start + sum(change * (stack.depth - few) / step for change, stack in pairs)
    return whole


def shallow(build: Callable[[], nn.Module], depths: Mapping[str, int]) -> Callable[[], nn.Module]:
    """A function that builds the model, with its stacks cut to `depths`."""
    return lambda: cut(build(), depths)


def shallow_copies(build: Callable[[], nn.Module], depths: Mapping[str, int]) -> Callable[[], nn.Module]:
    """The same without values: each call copies few blocks of the whole model, which is built once for all."""

    def copied() -> nn.Module:
        with _few_blocks(whole_model(build), depths) as few:
            return zeroed_copy(few)

    try:
        with fakes():
            copied()
    except PlanError:  # it cannot be copied
        return shallow(build, depths)
    return copied


def whole_model(build: Callable[[], nn.Module]) -> nn.Module:
    """The whole model without values, built once; callers leave it as it is."""
    if build not in _whole_models:
        with fakes(), quiet():
            _whole_models[build] = build()
    return _whole_models[build]


@contextmanager
def _few_blocks(model: nn.Module, depths: Mapping[str, int]) -> Iterator[nn.Module]:
    """The model, whose stacks have `depths` blocks inside."""
    stacks = [model.get_submodule(path) for path in depths]
    blocks, config = [dict(stack._modules) for stack in stacks], getattr(model, "config", None)
    depth = getattr(config, "num_hidden_layers", None)
    try:
        yield cut(model, depths)
    finally:
        for stack, held in zip(stacks, blocks, strict=True):
            stack._modules.update(held)
        if depth is not None:
            config.num_hidden_layers = depth  # type: ignore[union-attr]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings and its traces of fake tensors: a rehearsal's errors are sentences."""
    before, FAKES.disabled = FAKES.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        FAKES.disabled = before


def _alike_at_the_end(blocks: Sequence[nn.Module]) -> int:
    """The number of blocks like the last one at the end of a list; 0 where that has no parameters."""
    last = _look_of(blocks[-1])
    return len(list(takewhile(lambda block: _look_of(block) == last, reversed(blocks)))) if last[1] else 0


def _look_of(block: nn.Module) -> tuple[type, list[tuple[str, torch.Size]]]:
    return type(block), [(name, parameter.shape) for name, parameter in block.named_parameters()]
