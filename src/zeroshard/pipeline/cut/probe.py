"""The probe: one forward of the whole model before its cut, with the order of modules, the graph, and buffer uses.

[Note: probing without weights] In a model on the meta device the frames run on the example itself, as on every stage,
since they may read values of the batch (is the mask full, how long is the longest row). Modules with parameters run on
the meta device and return placeholders, which autograd connects with their parameters. A module that reads a value
inside runs once on random weights, which are freed before the next. Nothing is saved for a backward.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.carried import LearnedValues
from zeroshard.pipeline.cut.gates import Gate, activation_at, open_up, place_of_activation, with_activation
from zeroshard.pipeline.cut.origins import Origins, tensors_among
from zeroshard.pipeline.cut.placeholders import Placeholders, shapes_of, stand_in_for, without_hooks
from zeroshard.platform import accelerator
from zeroshard.units.hooks import transforming

STD = 0.02  # of random weights
Site = tuple[nn.Module, str]


class RunsTwice(Exception):
    """A block runs twice, so the number of calls of blocks is not that of blocks."""


class Probe:
    """The events of one forward of the whole model.

    Args:
        blocks: the modules between which the model can be cut.
        calls: calls of blocks in a forward; infinite if they are only counted.
        placeholders: records every output's shape.
        device: device for the frames of a model on meta; None if the model runs as it is.

    Attributes:
        order: the blocks in the order in which they ran.
        phases: for every other gated module, the numbers of blocks before its calls.
        entered: the inputs of each block and of the suffix.
        marks: their nodes in the graph; None without a gradient.
        returned: by id, returned tensors with their gates, and their latest versions left by modules.
        stands_for: the original of each parameter that was replaced for the forward.
        uses: of buffers by phase.
        origins: origins of values that layers read beside the activation.
        learned: values with a gradient around the blocks.
        recomputed: whether a block runs under torch.utils.checkpoint.
    """

    def __init__(
        self,
        blocks: set[nn.Module],
        calls: float,
        placeholders: Placeholders,
        device: torch.device | None = None,
    ) -> None:
        self._blocks, self._calls_of_blocks = blocks, calls
        self._placeholders, self._device = placeholders, device
        self.order: list[nn.Module] = []
        self.phases: dict[nn.Module, set[int]] = {}
        self.entered: list[Tensor] = []
        self.marks: list[Any] = []
        self.returned: dict[int, tuple[Gate, Tensor, int]] = {}
        self.stands_for: dict[Any, nn.Parameter] = {}
        self.uses = BufferUses(())
        self.origins, self.learned = Origins(), LearnedValues(device)
        self.recomputed = False
        self._calls: Counter[str] = Counter()
        self._apart = False

    def enter(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module and record it.

        Raises:
            ModelError: a stage could not hand on the tensors of a transform.
        """
        if transforming() and self.origins.running is None:
            raise ModelError(
                f"{gate.path!r} runs inside of torch.vmap, torch.func.jvp or another transform of the code around the "
                f"blocks, whose tensors a stage cannot hand on. Use the transform inside of the block, or use "
                f"pipeline_parallel=1."
            )
        with self.learned.inside():
            return self._enter(gate, args, kwargs)

    def _enter(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if gate.module not in self._blocks:
            self.phases.setdefault(gate.module, set()).add(self._phase)
            return self._call(gate, args, kwargs)
        self.recomputed |= _recomputed()
        if not torch.is_grad_enabled():
            raise ModelError(
                f"The block {gate.path!r} runs under torch.no_grad, or under torch.utils.checkpoint with "
                f"use_reentrant=True, which hide from a stage what its backward needs; switch that off in the model "
                f"(recompute='blocks' recomputes whole chunks instead), name other blocks with units=(...), or use "
                f"pipeline_parallel=1."
            )
        if gate.module in self.order and self._calls_of_blocks == len(self._blocks):
            raise RunsTwice
        self._end_phase()
        open_up((args, kwargs), gate, (args, kwargs))
        self.order.append(gate.module)
        self._begin_phase(len(self.order))
        gate.takes = place_of_activation((args, kwargs))
        args, kwargs = self._mark((args, kwargs), gate.takes, gate)
        output = self._call(gate, args, kwargs)
        if len(self.order) == self._calls_of_blocks:
            self._end_phase()
            self._begin_phase(len(self.order) + 1)
            gate.returns = place_of_activation(output)
            output = self._mark(output, gate.returns, gate)
        return output

    def _begin_phase(self, phase: int) -> None:
        self.origins.phase = phase
        self.learned.begin_phase(phase)

    @property
    def _phase(self) -> int:
        return self.origins.phase

    def _end_phase(self) -> None:
        with self.origins.paused():
            self.uses.look(self._phase)

    @contextmanager
    def listening(self, model: nn.Module, paths: Mapping[nn.Module, str]) -> Iterator[None]:
        """Note the model's output inside, and the results of modules inside of gated ones."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.origins.leave(tree_leaves(output))
            self.learned.takes(output)

        def inner(module: nn.Module, args: Any, output: Any) -> None:
            path, outer = paths.get(module), self.origins.running
            if path is None or outer is None or path == outer:
                return
            self._placeholders.seen.append((path, shapes_of(output)))
            self.learned.came_out(path, self._calls[path], output, outer)
            self.origins.inner(path, self._calls[path], tree_leaves(output))
            self._calls[path] += 1

        handles = model.register_forward_hook(leave), register_module_forward_hook(inner)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _call(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, and enter its output as its sources."""
        has_parameters = next(gate.module.parameters(), None) is not None
        with self.origins.call(gate.path, self._phase, (args, kwargs), has_parameters) as call:
            if call is not None:
                self.learned.takes((args, kwargs))
            output = self._run(gate, args, kwargs)
        leaves = tree_leaves(output)
        if gate.module not in self._blocks:
            gate.learned |= any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if call is not None:
            self.origins.returned(call, self._calls[gate.path], leaves, gate.learned)
            self.learned.returned(gate.path, self._calls[gate.path], output)
            self._calls[gate.path] += 1
        return output

    def _run(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.returned:
                maker, _, version = self.returned[id(leaf)]
                maker.overwritten |= leaf._version > version
        began = len(self._placeholders.seen)
        if self._device is None or self._apart or next(gate.module.parameters(), None) is None:
            output = gate.inner(*args, **kwargs)
            open_up(output, gate, (args, kwargs))
        else:
            output = self._run_apart(gate, args, kwargs)
        self._placeholders.record(gate.module, args, kwargs, output, began)
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.returned:
                self.returned[id(leaf)] = (*self.returned[id(leaf)][:2], leaf._version)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.returned[id(leaf)] = gate, leaf, leaf._version
        return output

    def _run_apart(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module without weights; returns placeholders for its output ([Note: probing without weights])."""
        assert self._device is not None
        is_block = gate.module in self._blocks
        taken = tree_map(_to_meta, (args, kwargs))
        self._apart = True
        try:
            with _own_parameters(gate.module, self.stands_for):
                try:
                    self._try(gate, taken)
                    output = gate.inner(*taken[0], **taken[1])
                except Exception:  # of whatever kind: it asks for a value, or has a tensor that is not on meta
                    taken = args, kwargs
                    with _random_weights(gate.module, self._device, self.stands_for):
                        output = gate.inner(*args, **kwargs)
        finally:
            self._apart = False
        open_up(output, gate, (args, kwargs))
        if is_block:
            self.entered[-1] = activation_at(taken, gate.takes, gate)  # which the block may have written into
        return tree_map(partial(stand_in_for, device=self._device), output)

    def _try(self, gate: Gate, taken: Any) -> None:
        """Run a module on meta without the hooks that take results out of it, if there are some: they get them once."""
        if not any(module._forward_hooks for module in gate.module.modules()):
            return
        with without_hooks(gate.module.modules()), torch.no_grad(), self.origins.paused():
            gate.inner(*taken[0], **taken[1])

    def _mark(self, tree: Any, place: int, gate: Gate) -> Any:
        with self.origins.paused():
            activation = activation_at(tree, place, gate)
            marked = activation.clone()  # a view would lose its mark when a block writes into it
        self.learned.enter(self._phase, activation, marked, block=self._phase == len(self.order))
        self.entered.append(marked)
        self.marks.append(marked.grad_fn)
        return with_activation(tree, place, marked)


class BufferUses(TorchFunctionMode):
    """A mode that records the phases of a forward in which buffers are written and read.

    Attributes:
        phases: by buffer, the phases that write it; buffers without writes are left out.
        read: by buffer, the phases that read it.
        changed: as given: buffers that the whole forward changed, once the model is restored.
    """

    def __init__(self, modules: Iterable[nn.Module], changed: set[Site] | None = None) -> None:
        super().__init__()
        self._modules = [module for module in modules if module._buffers]
        self.phases: dict[Site, set[int]] = {}
        self.read: dict[Site, set[int]] = {}
        self.changed = set() if changed is None else changed
        self._values = self._now()
        self._reads: set[Site] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the buffers among a function's arguments."""
        if self._modules:
            taken = set(map(id, tensors_among((args, kwargs))))
            buffers = ((m, name, buffer) for m in self._modules for name, buffer in m._buffers.items())
            self._reads |= {(m, name) for m, name, buffer in buffers if id(buffer) in taken}
        return func(*args, **(kwargs or {}))

    def look(self, phase: int) -> None:
        """Record the buffer uses of a phase that has ended."""
        for site in self._reads:
            self.read.setdefault(site, set()).add(phase)
        before, self._values = self._values, self._now()
        for site, value in self._values.items():
            known = before.get(site)
            same = value is known or (value is not None and known is not None and _equal(value, known))
            if not same:
                self.phases.setdefault(site, set()).add(phase)
        self._reads = set()  # with those that the comparison made

    def _now(self) -> dict[Site, Tensor | None]:
        return {
            (module, name): None if buffer is None else buffer.detach().clone()
            for module in self._modules
            for name, buffer in module._buffers.items()
        }


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta and one.shape == other.shape
    return one.shape == other.shape and torch.equal(one, other)


@contextmanager
def without_weights(model: nn.Module, probe: Probe, whole: set[nn.Module], device: torch.device) -> Iterator[None]:
    """Replace parameters of a model on meta by placeholders on `device`, and its frames' buffers by ones.

    Args:
        whole: modules that run on meta, with their buffers.
    """
    with ExitStack() as undo:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                values = torch.full((), math.nan, device=device).to(parameter.dtype).expand(parameter.shape)
                absent = nn.Parameter(values, requires_grad=parameter.requires_grad)
                probe.stands_for[absent] = parameter
                _swap(undo, module._parameters, name, absent)
            for name, buffer in module.named_buffers(recurse=False) if module not in whole else ():
                if buffer.is_meta:
                    _swap(undo, module._buffers, name, torch.ones_like(buffer, device=device))
        undo.enter_context(saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
        yield


@contextmanager
def all_trainable(model: nn.Module) -> Iterator[None]:
    """Make every parameter require a gradient inside."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[set[Site]]:
    """Restore buffers and random numbers after a forward; yields a set, which gets the buffers that it changed."""
    owned = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    sites = {(module, name) for module, name, _ in owned}
    before = [(buffer, buffer.clone()) if buffer is not None and not buffer.is_meta else None for *_, buffer in owned]
    changed: set[Site] = set()
    try:
        with accelerator.forked_random(p.device for p in model.parameters()):
            yield changed
    finally:
        with torch.no_grad():
            for (module, name, buffer), kept in zip(owned, before, strict=True):
                now = module._buffers.get(name)
                module._buffers[name] = buffer
                if kept is None:
                    changed |= {(module, name)} if now is not buffer else set()
                    continue
                written, values = kept
                if now is None or not _equal(now, values):
                    changed.add((module, name))
                if written.shape != values.shape:
                    written.data = values
                elif not torch.equal(written, values):
                    written.copy_(values)
            for module in model.modules():
                for name, buffer in [*module._buffers.items()]:
                    if (module, name) not in sites and buffer is not None and buffer.is_meta:
                        del module._buffers[name]  # registered in the forward, and without values


def _recomputed() -> bool:
    """Whether torch.utils.checkpoint runs this code again in the backward, with the arguments that it gave."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


@contextmanager
def _own_parameters(module: nn.Module, stands_for: dict[Any, nn.Parameter]) -> Iterator[None]:
    """Restore the own parameters of a module on meta inside."""
    with ExitStack() as undo:
        for part in module.modules():
            for name, absent in list(part._parameters.items()):
                if absent in stands_for:
                    _swap(undo, part._parameters, name, stands_for[absent])
        yield


@contextmanager
def _random_weights(module: nn.Module, device: torch.device, stands_for: dict[Any, nn.Parameter]) -> Iterator[None]:
    """Give a module on meta random weights on `device`, and ones in its buffers, inside."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    with ExitStack() as undo:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.is_meta and parameter not in made:
                    values = (torch.randn(parameter.shape, device=device) * STD).to(parameter.dtype)
                    made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    stands_for[made[parameter]] = parameter
                _swap(undo, part._parameters, name, made.get(parameter, parameter))
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.is_meta:
                    _swap(undo, part._buffers, name, torch.ones_like(buffer, device=device))
        yield
    for weight in made.values():  # which the graph holds
        weight.data = torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape)


def _swap(undo: ExitStack, table: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into a table until `undo` ends."""
    undo.callback(table.__setitem__, name, table[name])
    table[name] = value
