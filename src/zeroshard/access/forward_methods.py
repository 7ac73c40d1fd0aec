"""Methods of modules besides `forward` that read parameters themselves, under stage 3."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol

from torch import nn

from zeroshard.errors import PlanError

Ending = Callable[[Any], Any]


class Methods(Protocol):
    """Passes of the model."""

    @property
    def running(self) -> bool:
        """Whether a forward or a backward of the model is under way, or a call of one of its modules."""

    def method(self) -> AbstractContextManager[Ending]:
        """The call of a method inside; gives the function to be applied to its output."""


class MethodAccess:
    """The method of an engine for other methods than `forward`."""

    model: nn.Module
    _forward: Any

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a method of a module read parameters as its `forward` may, under stage 3 too (FSDP2's name for it).

        Parameters that it reads are gathered while it runs; modules that it calls gather their own in any case. A
        call of it is a collective call then, as a forward is.

        Raises:
            PlanError: the module is not of this model, or has no such method.
        """
        if not any(module is each for each in self.model.modules()):
            raise PlanError(
                f"register_forward_method takes a module of the engine's model, and was given a "
                f"{type(module).__name__} of elsewhere. Pass engine.model, or engine.model.get_submodule('its.path')."
            )
        method = getattr(type(module), name, None)
        if not callable(method):
            kind = type(module).__name__
            raise PlanError(
                f"{kind} has no method {name!r} to register. Name a function that its class defines; one that was set "
                f"on the module can be a module of its own, or run inside `with engine.gathered():`."
            )
        setattr(module, name, _ForwardMethod(module, name, self._forward))


class _ForwardMethod:
    """A method of a module, around which the parameters that it reads are gathered."""

    def __init__(self, module: nn.Module, name: str, passes: Methods) -> None:
        self._module, self._name, self._passes = module, name, passes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = MethodType(getattr(type(self._module), self._name), self._module)
        if self._passes.running:
            return method(*args, **kwargs)
        with self._passes.method() as ending:
            return ending(method(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        """A copy of the module is a plain one."""
        copied = memo[id(self._module)]
        return MethodType(getattr(type(copied), self._name), copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (type(self._module), self._name)
