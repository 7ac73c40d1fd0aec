"""Modules as they were before a technique cut their parameters.

[Note: whole before cut] A model has the same initial weights under every plan, so an initialiser must see its module as
one process has it: whole parameters, and attributes (`in_features`, `padding_idx`) from before the cut. So the state of
each module on the meta device is kept before the cut, and put back while the module is initialised, on the host and
with the modules inside of it, to which it may give values. Then the parts are cut out of the whole values, which are
dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.units.hooks import in_place_of

PartOf = Callable[[torch.Tensor], torch.Tensor]  # a copy of this rank's part of a whole tensor
State = dict[str, Any]  # of a module, its tables of parameters, buffers and modules included
TABLES = ("_parameters", "_buffers", "_modules")
BLOCK = 2**22  # elements that go over the device at a time


class Uncut:
    """The modules on the meta device of a model whose parameters are cut; of none, until `keep`.

    Attributes:
        released: whole parameters whose values were dropped, because their parts have been cut out.
    """

    def __init__(self) -> None:
        self.released: set[nn.Parameter] = set()
        self._modules: dict[str, nn.Module] = {}
        self._names: dict[str, nn.Parameter] = {}
        self._states: dict[nn.Module, State] = {}
        self._parts: dict[nn.Parameter, tuple[nn.Parameter, PartOf]] = {}  # by whole parameter
        self._before: dict[nn.Module, nn.Module] = {}  # by the module that took its place
        self._now: dict[nn.Module, nn.Module] = {}  # the other way round
        self._entered: dict[nn.Module, tuple[State, dict[str, nn.Parameter | None]]] = {}

    def keep(self, model: nn.Module) -> None:
        """Keep the states of a model's modules before the first cut."""
        if not self._modules:
            self._modules = dict(model.named_modules(remove_duplicate=False))
            self._names = {name: p for name, p in model.named_parameters() if p.is_meta}
            self._states = {module: _state(module) for module in model.modules() if _is_meta(module)}

    def cut(self, model: nn.Module, parts: Mapping[nn.Parameter, PartOf]) -> None:
        """Take in the parts that have come in the place of parameters of the model."""
        for name, parameter in model.named_parameters():
            if parameter in parts and name in self._names:
                self._parts[self._names[name]] = parameter, parts[parameter]
        for path, module in model.named_modules(remove_duplicate=False):
            before = self._modules.get(path, module)
            if before is not module:
                self._before[module], self._now[before] = before, module

    def before(self, module: nn.Module) -> nn.Module:
        """The module that was in the place of this one before the cut."""
        return self._before.get(module, module)

    def enter(self, module: nn.Module) -> None:
        """Let a module be as it was before the cut, until `leave`."""
        if module in self._states:
            state = self._states.pop(module)
            self._entered[module] = _state(module), dict(state["_parameters"])
            _set_state(module, state)

    def leave(self, real: dict[nn.Parameter, nn.Parameter]) -> None:
        """Let all modules be as they are after the cut, with values.

        Args:
            real: by parameter on the meta device, the one that takes its place; parts take that of whole ones.
        """
        for module, (state, parameters) in self._entered.items():
            buffers = module._buffers
            _set_state(module, state)
            now = self._now.get(module, module)
            for name, whole in parameters.items():
                if whole in self._parts:
                    part, part_of = self._parts[whole]
                    if part not in real:
                        real[part] = in_place_of(part, part_of(real.pop(whole).detach()))
                        self.released.add(whole)
                    now._parameters[name] = real[part]
                elif whole in real:
                    now._parameters[name] = real[whole]
            for name, buffer in now._buffers.items():
                if buffer is not None and buffer.is_meta:
                    now._buffers[name] = buffers[name]
        self._entered.clear()


def take_from_rank_0(model: nn.Module, world: Comm) -> None:
    """Let all ranks have rank 0's values of the parameters that are not on the meta device; a collective call.

    Values that are not on this rank's device go over it one block at a time.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if parameter.device == world.mesh.device:
            world.broadcast(parameter.data, f"initial {name}")
            continue
        values = parameter.detach().reshape(-1)
        for block in values.split(BLOCK):
            over = block.to(world.mesh.device)
            world.broadcast(over, f"initial {name}")
            block.copy_(over)
        parameter.data.copy_(values.view(parameter.shape))


def _is_meta(module: nn.Module) -> bool:
    """Whether a module has tensors of its own on the meta device."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def _state(module: nn.Module) -> State:
    """A copy of a module's attributes, which stays as it is when the module changes."""
    return {name: dict(value) if name in TABLES else value for name, value in module.__dict__.items()}


def _set_state(module: nn.Module, state: State) -> None:
    module.__dict__.clear()
    module.__dict__.update(state)
