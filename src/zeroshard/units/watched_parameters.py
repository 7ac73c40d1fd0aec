"""Parameters that report writes through `.data`, and placeholders whose values cannot be read.

[Note: watched parameters] torch's `p.data` is a second name for the values: a write through it moves no version
counter, and `p.data = values` puts other memory under the parameter. Either would be undone in silence by an update
whose truth lies elsewhere (fp32 masters, slices, host memory). The parameters that an engine holds are therefore of a
subclass of `nn.Parameter` whose `.data` asks the engine. Operations see no difference.

[Note: absent values] While a parameter's values are on other ranks, or its gradient is in a flat buffer, a function
that would read the values is an error, or fetches them first; a function that only asks for shape, dtype or device
runs as always.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

VALUES: Any = torch.Tensor.data  # torch's own property
_READING = frozenset({VALUES, *(getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag"))})
_PLACES = frozenset(  # where values are: of those that arrive, one may be asked for only once they are here
    getattr(Tensor, name)
    for name in (
        *("stride", "storage_offset", "is_contiguous", "is_pinned", "is_shared", "is_set_to", "dim_order"),
        *("untyped_storage", "data_ptr"),
    )
)
_HARMLESS = frozenset(
    getattr(Tensor, name)
    for name in (
        *("size", "dim", "numel", "nelement", "ndimension", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "register_hook", "register_post_accumulate_grad_hook"),
        *("requires_grad_", "__hash__", "__len__", "is_same_size", "is_inference"),
    )
) | {
    *_PLACES,
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size),
    torch._has_compatible_shallow_copy_type,
}

_CONVERTING = frozenset(getattr(Tensor, name) for name in ("to", "cpu", "cuda", "float", "half", "bfloat16", "double"))
_SETTING = VALUES.__set__


class Watcher(Protocol):
    """Decides about reads and writes of the parameters of one engine."""

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """What `parameter.data` returns."""

    def replace(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Carry out `parameter.data = values`, or raise."""

    def fetch(self, parameters: list[nn.Parameter], reads: bool = True) -> None:
        """Fetch the values of absent parameters, or raise; without `reads`, only values that arrive by themselves.

        Args:
            reads: whether values are asked for, or only where they are.
        """


class WatchedParameter(nn.Parameter):
    """A parameter whose `.data` belongs to a watcher ([Note: watched parameters]); its copies are plain parameters."""

    @classmethod
    def watcher(cls) -> Watcher | None:
        """The watcher, for as long as its engine lives."""
        return None

    @property
    def data(self) -> Tensor:
        """The values, detached, sharing memory."""
        watcher = self.watcher()
        return values_of(self) if watcher is None else watcher.alias(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        """Put other memory under the parameter."""
        watcher = self.watcher()
        if watcher is None:
            set_values(self, values)
        else:
            watcher.replace(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._plain()
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def _plain(self) -> nn.Parameter:
        """An ordinary parameter over the same memory."""
        return nn.Parameter(self.detach(), self.requires_grad)


class Absent(WatchedParameter):
    """A watched parameter whose values are not on this rank ([Note: absent values])."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        reads = _reads(func)
        if reads or func in _PLACES:
            absent = [item for item in _leaves((args, kwargs)) if isinstance(item, Absent)]
            watcher = cls.watcher()
            if func is Tensor.to and watcher is not None and any(args[0] is each for each in absent):
                return _converted(watcher, args[0], args[1:], kwargs or {})
            if watcher is not None and absent:
                watcher.fetch(absent, reads)  # type: ignore[arg-type]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        watcher = self.watcher()
        if watcher is not None:
            watcher.fetch([self], reads=False)
        if not isinstance(self, Absent):
            return repr(self)
        return f"Parameter containing:\n{tuple(self.shape)} of {self.dtype}, sliced: its values are on several ranks"


def kinds_for(watcher: Watcher) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """The classes of one engine's parameters while their values are present, and while they are absent."""
    owner = weakref.ref(watcher)

    class Parameter(WatchedParameter):
        @classmethod
        def watcher(cls) -> Watcher | None:
            return owner()

    class AbsentParameter(Absent):
        @classmethod
        def watcher(cls) -> Watcher | None:
            return owner()

    return Parameter, AbsentParameter


def values_of(parameter: Tensor) -> Tensor:
    """Torch's own `parameter.data`."""
    if isinstance(parameter, Absent):
        with torch._C.DisableTorchFunctionSubclass():
            absent: Tensor = VALUES.__get__(parameter)
        return absent
    values: Tensor = VALUES.__get__(parameter)
    return values


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Torch's own `parameter.data = values`."""
    VALUES.__set__(parameter, values)


class Unreadable(Tensor):
    """A tensor with a shape and no values: reading or writing them is an error.

    Attributes:
        parameter: the name of the parameter whose values or gradient it stands for.
        refuse: makes the error, from that name.
    """

    parameter: str
    refuse: Callable[[str], Exception]

    @classmethod
    def of(cls, parameter: Tensor, name: str, refuse: Callable[[str], Exception]) -> Self:
        """One of the dtype and shape of `parameter`."""
        with _disable_current_modes():
            return cls.over(_nothing(parameter.dtype, parameter.device).expand(parameter.shape), name, refuse)

    @classmethod
    def over(cls, values: Tensor, name: str, refuse: Callable[[str], Exception]) -> Self:
        """One over the memory of `values`, which those who have another name for it read and write."""
        made = values.as_subclass(cls)
        made.parameter, made.refuse = name, refuse
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _CONVERTING:
            return args[0]  # as unreadable there
        if isinstance(func, OpOverload) or CompileContext.try_get() is not None:
            # autograd's own adding up, where a mode of the user watches operators; or a look of torch.compile
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _SETTING and isinstance(args[0], Unreadable):
            if args[1] is args[0]:
                return None  # what `Module.to` does with what `Tensor.to` returned
            raise args[0].refuse(args[0].parameter)
        with torch._C.DisableTorchFunctionSubclass():
            if _reads(func):
                for item in _leaves((args, kwargs)):
                    if isinstance(item, Unreadable):
                        raise item.refuse(item.parameter)
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{type(self).__name__} of '{self.parameter}', {tuple(self.shape)}>"


class HeldGradient(Unreadable):
    """What `p.grad` shows while the gradient is in a flat buffer.

    Attributes:
        zeroed: gets the name when it is zeroed, as by `zero_grad(set_to_none=False)`.
    """

    zeroed: set[str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.zero_, torch._foreach_zero_):
            return super().__torch_function__(func, types, args, kwargs)
        for item in _leaves(args):
            if isinstance(item, HeldGradient):
                item.zeroed.add(item.parameter)
            else:
                item.zero_()
        return args[0]


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one element that all placeholders of a dtype and device share."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


def _reads(func: Any) -> bool:
    """Whether a function of torch looks at values, as far as is known."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return getattr(func, "__self__", None) in _READING and func.__name__ == "__get__"
    return func not in _HARMLESS


def _converted(watcher: Watcher, parameter: nn.Parameter, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """`parameter.to(...)` of an absent parameter: itself where that has nothing to do, as `model.to(device)` asks."""
    values = watcher.alias(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        if not isinstance(values, Unreadable):
            return parameter.to(*args, **kwargs)  # it has been fetched
        probe = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        there = probe.to(*args, **kwargs)
        if there is probe:
            return parameter
        return Unreadable.of(there.expand(parameter.shape), values.parameter, values.refuse)


def _leaves(tree: Any) -> Iterator[Tensor]:
    """All tensors in the arguments of a function of torch."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _leaves(tuple(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
