"""Initial weights keyed by name: a model on `meta` becomes real module by module, the same under every plan.

The random numbers of a module depend on the seed and on the module's path in the model alone, never on the rank,
the world size, or other modules.
"""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.units.hooks import in_place_of
from zeroshard.units.uncut import Uncut

Initialiser = Callable[[nn.Module], object]


class Materialiser:
    """Gives real values to the parameters and buffers of a model that was built on the `meta` device.

    Args:
        model: the model; modules with real tensors are left alone.
        seed: the seed of all initial weights.
        initialise: called with each module that owns parameters or buffers, as in `nn.Module.apply`; by default the
            module's own `reset_parameters()`.
        skip: modules that stay on the meta device, because their tensors are elsewhere.

    Attributes:
        uncut: the modules as they were before parameters were cut.
    """

    def __init__(
        self, model: nn.Module, seed: int, initialise: Initialiser | None = None, skip: Iterable[nn.Module] = ()
    ) -> None:
        self.uncut = Uncut()
        self._paths = {module: path for path, module in model.named_modules()}
        self._seed = seed
        self._initialise = initialise
        self._done: set[nn.Module] = set(skip)
        self._real: dict[nn.Parameter, nn.Parameter] = {}
        self._first_owner: dict[nn.Parameter, nn.Module] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._first_owner.setdefault(parameter, module)

    def real(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that took the place of `parameter` (itself, if it was real)."""
        return self._real.get(parameter, parameter)

    def materialise(self, module: nn.Module) -> None:
        """Make a module's own parameters and buffers real and initialise them; a tied parameter by its first owner.

        Raises:
            ModelError: the module cannot initialise itself, or leaves a buffer without values.
        """
        self._materialise(self.uncut.before(module))
        self.uncut.leave(self._real)

    def _materialise(self, module: nn.Module) -> None:
        if module in self._done:
            return
        self._done.add(module)
        self.uncut.enter(module)
        for child in module.children():  # as nn.Module.apply does: a module may give values to its children's tensors
            self._materialise(self.uncut.before(child))
        direct = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for parameter in direct.values():
            if self._first_owner.get(parameter, module) is not module:
                self._materialise(self._first_owner[parameter])
        cut = self.uncut.released
        fresh = {name: p for name, p in direct.items() if p.is_meta and p not in self._real and p not in cut}
        buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, parameter in direct.items():
            if parameter.is_meta and (fresh or buffers or parameter not in cut):
                self._replace(module, name, parameter)
        for name, buffer in buffers.items():
            module._buffers[name] = _unset_like(buffer)
        if fresh or buffers:
            kept = [(p, p.detach().clone()) for name, p in module.named_parameters(recurse=False) if name not in fresh]
            self._run(module)
            for parameter, value in kept:
                parameter.data.copy_(value)
            self._check(module, [*fresh, *buffers])

    def _replace(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if parameter in self.uncut.released:  # only its shape is needed, and only now
            module._parameters[name] = nn.Parameter(_unset_like(parameter), requires_grad=parameter.requires_grad)
            return
        if parameter not in self._real:
            self._real[parameter] = in_place_of(parameter, _unset_like(parameter))
        module._parameters[name] = self._real[parameter]

    def _run(self, module: nn.Module) -> None:
        path = self._paths[module]
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if self._initialise is None and own is None:
            raise ModelError(
                f"{type(module).__name__} at '{path or 'the model itself'}' is on the meta device and has no "
                f"reset_parameters() to give it "
                "values. Pass Engine(..., initialise=function of a module), or build the model on the CPU."
            )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed_of(self._seed, path))
            if self._initialise is not None:
                self._initialise(module)
            else:
                assert own is not None
                own()

    def _check(self, module: nn.Module, names: list[str]) -> None:
        for name in names:
            if _unset(getattr(module, name)):
                path = self._paths[module]
                raise ModelError(
                    f"'{path + '.' if path else ''}{name}' of a model on the meta device got no values from the "
                    "module's initialisation. Set it in reset_parameters(), or build the model on the CPU."
                )


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor that `_unset` recognises: NaN, or integers that were never written."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"), device="cpu", requires_grad=False)
    return torch.zeros_like(tensor, device="cpu", requires_grad=False)


def _unset(tensor: torch.Tensor | None) -> bool:
    if tensor is None:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool((tensor == tensor).all())
    return tensor._version == 0 and not bool(tensor.any())


def seed_of(seed: int, *parts: object) -> int:
    """A 63-bit seed that depends on `seed` and `parts` alone (BLAKE2b), the same on every machine."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
