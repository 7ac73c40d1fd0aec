"""Initial weights keyed by name: a model on `meta` becomes real module by module, the same under every plan.

The random numbers of a module depend on the seed and on the module's path in the model alone, never on the rank,
the world size, or other modules.

[Note: values from files] Weights that are read from files need no initial values, and no memory until their slices are
made. So with `FileValues` every parameter stays an absent one: one NaN, expanded to its shape. A module is initialised
only if it has buffers, or parameters that no file gives wholly; those values are set aside, to be loaded with the rest.

[Note: whole before cut] A model has the same initial weights under every plan, so an initialiser sees its module as
one process has it: whole parameters, and attributes (`in_features`, `padding_idx`) from before the cut. The state of
each module on the meta device is kept before the cut, and put back while the module is initialised, on the host and
with the modules inside of it, to which it may give values. Then the parts are cut out of the whole values, which are
dropped.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.errors import ModelError
from zeroshard.units.adapters import initialisers_of, magnitudes_of
from zeroshard.units.hooks import in_place_of
from zeroshard.units.ignored import ignored_in, is_ignored, note_made

Initialiser = Callable[[nn.Module], object]


@runtime_checkable
class FileValues(Protocol):
    """An initialiser of a model whose other values are loaded after the engine is made ([Note: values from files])."""

    def __call__(self, module: nn.Module) -> object:
        """Initialise a module's buffers, and its parameters that are not absent."""

    def reads(self, name: str) -> bool:
        """Whether all values of a parameter or buffer are read, so that none is drawn."""

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Take the initial values of a parameter that is not read wholly."""


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one value for all of its elements, in place of values that are read later."""
    return tensor.numel() > 1 and not any(tensor.stride())


class Materialiser:
    """Materialises the parameters and buffers of a model that was built on the `meta` device.

    Args:
        model: the model; modules with real tensors are left alone.
        seed: the seed of all initial weights.
        initialise: called with each module that owns parameters or buffers, as in `nn.Module.apply`; by default the
            module's own `reset_parameters()`. Modules of adapters are filled as their configuration says.
        skip: modules that stay on the meta device, because their tensors are on other ranks.

    Attributes:
        uncut: the modules as they were before parameters were cut.
        magnitudes: names of DoRA's that get their values from the base's ([Note: adapters on meta] in `adapters`).
    """

    def __init__(
        self, model: nn.Module, seed: int, initialise: Initialiser | None = None, skip: Iterable[nn.Module] = ()
    ) -> None:
        self.uncut = Uncut()
        self._paths = {module: path for path, module in model.named_modules()}
        self._seed = seed
        self._initialise, self._of_adapters = initialise, initialisers_of(model)
        self._files = initialise if isinstance(initialise, FileValues) else None
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        magnitudes = {name: model.get_parameter(name) for name in magnitudes_of(model)}
        self.magnitudes = [name for name, p in magnitudes.items() if p.is_meta and not self._is_read(p)]
        self._drawn: list[nn.Parameter] = []  # with initial values to set aside
        self._done: set[nn.Module] = set(skip)
        self._real: dict[nn.Parameter, nn.Parameter] = {}
        self._first_owner: dict[nn.Parameter, nn.Module] = {}
        for module in model.modules():
            for parameter in _own(module).values():
                self._first_owner.setdefault(parameter, module)

    def real(self, parameter: nn.Parameter) -> nn.Parameter:
        """The materialised parameter for `parameter` (itself, if it was real)."""
        return self._real.get(parameter, parameter)

    def materialise(self, module: nn.Module) -> None:
        """Make a module's own parameters and buffers real and initialise them; a tied parameter by its first owner.

        Raises:
            ModelError: the module cannot initialise itself, or leaves a buffer without values.
        """
        self._materialise(self.uncut.before(module))
        self._set_aside()
        self.uncut.leave(self._real, absent=self._files is not None)

    def _materialise(self, module: nn.Module) -> None:
        if module in self._done:
            return
        self._done.add(module)
        self.uncut.enter(module)
        for child in module.children():  # as nn.Module.apply does: a module may give values to its children's tensors
            self._materialise(self.uncut.before(child))
        direct = _own(module)
        for parameter in direct.values():
            if self._first_owner.get(parameter, module) is not module:
                self._materialise(self._first_owner[parameter])
        cut = self.uncut.released
        fresh = {name: p for name, p in direct.items() if p.is_meta and p not in self._real and p not in cut}
        fresh = {name: p for name, p in fresh.items() if not self._is_read(p)}
        buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta} if module._buffers else {}
        for name, parameter in direct.items():
            if parameter.is_meta and (fresh or buffers or parameter not in cut):
                self._replace(module, name, parameter)
        for name, buffer in buffers.items():
            module._buffers[name] = _unset_like(buffer)
        if fresh or buffers:
            others = [p for name, p in module.named_parameters(recurse=False) if name not in fresh]
            kept = [(p, p.detach().clone()) for p in others if not is_absent(p)]
            self._run(module)
            for parameter, value in kept:
                parameter.data.copy_(value)
            self._check(module, [*fresh, *(name for name in buffers if not self._gives(module, name))])

    def _replace(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        released = parameter in self.uncut.released
        own = is_ignored(parameter)
        absent = (self._is_read(parameter) or (released and self._files is not None)) and not own
        unset = _absent_like if absent else _unset_like
        if released:  # only its shape is needed, and only now
            module._parameters[name] = nn.Parameter(unset(parameter), requires_grad=parameter.requires_grad)
            return
        if parameter not in self._real:
            self._real[parameter] = in_place_of(parameter, unset(parameter))
            if own:
                note_made(self._real[parameter])
            elif self._files is not None and not absent:
                self._drawn.append(parameter)
        module._parameters[name] = self._real[parameter]

    def _is_read(self, parameter: nn.Parameter) -> bool:
        return self._files is not None and self._files.reads(self._names.get(parameter, ""))

    def _gives(self, module: nn.Module, buffer: str) -> bool:
        path = self._paths[module]
        return self._files is not None and self._files.reads(f"{path}.{buffer}" if path else buffer)

    def _set_aside(self) -> None:
        """Keep the values of initialised parameters until all are loaded ([Note: values from files])."""
        for parameter in self._drawn:
            assert self._files is not None
            real = self._real[parameter]
            self._files.keep(self._names[parameter], real.detach())
            real.data = _absent_like(real)
        self._drawn.clear()

    def _run(self, module: nn.Module) -> None:
        path = self._paths[module]
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        own = self._of_adapters.get(module, own)
        if self._initialise is None and own is None:
            raise ModelError(
                f"{type(module).__name__} at '{path or 'the model itself'}' is on the meta device and has no "
                f"reset_parameters() to give it "
                "values. Pass Engine(..., initialise=function of a module), or build the model on the CPU."
            )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed_of(self._seed, path))
            if self._initialise is not None and module not in self._of_adapters:
                self._initialise(module)
            else:
                assert own is not None
                own()

    def _check(self, module: nn.Module, names: list[str]) -> None:
        for name in names:
            if is_unset(getattr(module, name)):
                path = self._paths[module]
                raise ModelError(
                    f"'{path + '.' if path else ''}{name}' of a model on the meta device got no values from the "
                    "module's initialisation. Set it in reset_parameters(), or build the model on the CPU."
                )


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, by name; faster than `named_parameters`, for the many modules of a model."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _absent_like(tensor: torch.Tensor) -> torch.Tensor:
    """One value, expanded to the shape of a tensor: NaN, or zero of an integer."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor that `is_unset` recognises: NaN, or integers that were never written."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"), device="cpu", requires_grad=False)
    return torch.zeros_like(tensor, device="cpu", requires_grad=False)


def is_unset(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor was made by `_unset_like` and not written since."""
    if tensor is None:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool((tensor == tensor).all())
    return tensor._version == 0 and not bool(tensor.any())


def seed_of(seed: int, *parts: object) -> int:
    """A 63-bit seed from `seed` and `parts` alone (BLAKE2b), equal on every machine."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


PartOf = Callable[[torch.Tensor], torch.Tensor]  # a copy of this rank's part of a whole tensor
State = dict[str, Any]  # of a module, its tables of parameters, buffers and modules included
TABLES = ("_parameters", "_buffers", "_modules")
BLOCK = 2**22  # elements that go over the device at a time


class Uncut:
    """The modules on the meta device of a model whose parameters are cut; none until `keep`.

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
        """Register the parts that replace parameters of the model."""
        for name, parameter in model.named_parameters():
            if parameter in parts and name in self._names:
                self._parts[self._names[name]] = parameter, parts[parameter]
        for path, module in model.named_modules(remove_duplicate=False):
            before = self._modules.get(path, module)
            if before is not module:
                self._before[module], self._now[before] = before, module

    def before(self, module: nn.Module) -> nn.Module:
        """The module that this one replaced in the cut."""
        return self._before.get(module, module)

    def enter(self, module: nn.Module) -> None:
        """Restore a module's state from before the cut, until `leave`."""
        if module in self._states:
            state = self._states.pop(module)
            self._entered[module] = _state(module), dict(state["_parameters"])
            _set_state(module, state)

    def leave(self, real: dict[nn.Parameter, nn.Parameter], absent: bool = False) -> None:
        """Restore the states after the cut, with values.

        Args:
            real: by parameter on the meta device, the one that takes its place; parts take that of whole ones.
            absent: whether the values are read later.
        """
        for module, (state, parameters) in self._entered.items():
            buffers = module._buffers
            _set_state(module, state)
            now = self._now.get(module, module)
            for name, whole in parameters.items():
                if whole in self._parts:
                    part, part_of = self._parts[whole]
                    if part not in real:
                        values = real.pop(whole).detach()
                        real[part] = in_place_of(part, _absent_like(part) if absent else part_of(values))
                        self.released.add(whole)
                    now._parameters[name] = real[part]
                elif whole in real:
                    now._parameters[name] = real[whole]
            for name, buffer in now._buffers.items():
                if buffer is not None and buffer.is_meta:
                    now._buffers[name] = buffers[name]
        self._entered.clear()


def take_from_rank_0(model: nn.Module, world: Comm, ignored: bool = False) -> None:
    """Broadcast rank 0's values of the parameters that are not on the meta device; a collective call.

    Args:
        ignored: those of ignored parameters alone, instead of all.

    Values that are not on this rank's device go over it one block at a time.
    """
    for name, parameter in ignored_in(model).items() if ignored else model.named_parameters():
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
    """A copy of a module's attributes, unaffected by later changes of the module."""
    return {name: dict(value) if name in TABLES else value for name, value in module.__dict__.items()}


def _set_state(module: nn.Module, state: State) -> None:
    module.__dict__.clear()
    module.__dict__.update(state)
