"""Parameters that report writes through `.data`, and placeholders whose values cannot be read.

[Note: watched parameters] torch's `p.data` is an alias of the values: a write through it changes no version counter,
and `p.data = values` replaces the memory of the parameter. The next update from other memory (fp32 masters, slices,
host memory) would silently undo either. The parameters of an engine are therefore of a subclass of `nn.Parameter` whose
`.data` asks the engine. Operations see no difference.

[Note: absent values] While a parameter's values are on other ranks, or its gradient is in a flat buffer, a function
that reads the values raises, or fetches them first; a function that only reads shape, dtype or device runs as always.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

VALUES: Any = torch.Tensor.data  # torch's own property
_READING = frozenset({VALUES, *(getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag"))})
_PLACES = frozenset(  # functions about the memory of values, which wait for values that arrive
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

# Written by functions of each element alone, whose second call changes nothing.
LIMITS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "clip_", "relu_", "abs_", "nan_to_num_", "round_"})
_CONVERTING = frozenset(getattr(Tensor, name) for name in ("to", "cpu", "cuda", "float", "half", "bfloat16", "double"))
_SETTING = VALUES.__set__


class Watcher(Protocol):
    """Decides about reads and writes of the parameters of one engine."""

    def alias(self, parameter: nn.Parameter) -> Tensor:
        """The value of `parameter.data`."""

    def replace(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Carry out `parameter.data = values`, or raise."""

    def fetch(self, parameters: list[nn.Parameter], reads: bool = True) -> None:
        """Fetch the values of absent parameters, or raise; without `reads`, only wait for arriving values.

        Args:
            reads: whether values are read, or only their memory.
        """


class WatchedParameter(nn.Parameter):
    """A parameter whose `.data` belongs to a watcher ([Note: watched parameters]); its copies are plain parameters."""

    @classmethod
    def watcher(cls) -> Watcher | None:
        """The watcher, for as long as its engine lives."""
        return None

    @property
    def data(self) -> Tensor:
        """The values, detached, over the same memory."""
        watcher = self.watcher()
        return values_of(self) if watcher is None else watcher.alias(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        """Replace the memory of the parameter."""
        watcher = self.watcher()
        if watcher is None:
            set_values(self, values)
        else:
            watcher.replace(self, values)

    def set_(self, source: Any = None, *geometry: Any, **named: Any) -> Tensor:
        """`Tensor.set_`; `nn.utils.parametrize` sets a parameter to itself, which is no write."""
        return self if source is self else super().set_(source, *geometry, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach().clone(), self.requires_grad)  # torch.multiprocessing moves what it pickles
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
            for kind in dict.fromkeys(type(item) for item in absent):  # of each engine
                own = kind.watcher()
                if own is not None:
                    own.fetch([item for item in absent if type(item) is kind], reads)
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
    """The two classes of one engine's parameters: for present and for absent values."""
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


def in_dispatch_handler() -> bool:
    """Whether a dispatch mode's handler is running, such as torch.compile's, which expects plain tensors."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality))


class ForwardAlias(Tensor):
    """The tensor of `p.data` inside of a forward where a write would be lost: limits on its elements go to the engine.

    Attributes:
        limit: carries out a function of `LIMITS`, given as its name and arguments, on the parameter.
    """

    limit: Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            alone = isinstance(args[0], ForwardAlias) if args else False
            if name in LIMITS and alone and not any(_leaves((args[1:], kwargs or {}))):
                args[0].limit(name, args[1:], kwargs or {})
                return args[0]
            return func(*args, **(kwargs or {}))


class Unreadable(Tensor):
    """A tensor with a shape and no values: reading or writing it raises.

    Attributes:
        parameter: the name of the parameter whose values or gradient are absent.
        refuse: makes the error, from that name.
    """

    parameter: str
    refuse: Callable[[str], Exception]

    @classmethod
    def of(cls, parameter: Tensor, name: str, refuse: Callable[[str], Exception]) -> Self:
        """A placeholder with the dtype and shape of `parameter`."""
        with _without_modes():
            return cls.over(_nothing(parameter.dtype, parameter.device).expand(parameter.shape), name, refuse)

    @classmethod
    def over(cls, values: Tensor, name: str, refuse: Callable[[str], Exception]) -> Self:
        """A placeholder over the memory of `values`, which stays readable and writable through other tensors."""
        made = values.as_subclass(cls)
        made.parameter, made.refuse = name, refuse
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _CONVERTING:
            return args[0]  # it is as unreadable in another dtype or on another device
        if isinstance(func, OpOverload) or CompileContext.try_get() is not None:
            # autograd's accumulation under a dispatch mode of the user, or torch.compile
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _SETTING and isinstance(args[0], Unreadable):
            if args[1] is args[0]:
                return None  # `Module.to` assigns the result of `Tensor.to`
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
    """The value of `p.grad` while the gradient is in a flat buffer.

    Attributes:
        zeroed: the names of the gradients that were zeroed, as by `zero_grad(set_to_none=False)`.
    """

    zeroed: set[str]

    @classmethod
    def empty(cls, parameter: Tensor, name: str, refuse: Callable[[str], Exception]) -> Self:
        """A placeholder to which autograd does not add in place: sparse, and without elements."""
        with _without_modes():
            nothing = torch.sparse_coo_tensor(  # type: ignore[call-arg]
                size=parameter.shape, dtype=parameter.dtype, device=parameter.device, check_invariants=False
            )
            made: Self = Tensor._make_subclass(cls, nothing)
        made.parameter, made.refuse = name, refuse
        return made

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


def _without_modes() -> AbstractContextManager[object]:
    """Without the dispatch modes of the user; without any, torch would take ten times as long to look for them."""
    busy = torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if busy else nullcontext()


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one element that all placeholders of a dtype and device share."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


def _reads(func: Any) -> bool:
    """Whether a function of torch reads values; unknown functions count as readers."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return getattr(func, "__self__", None) in _READING and func.__name__ == "__get__"
    return func not in _HARMLESS


def _converted(watcher: Watcher, parameter: nn.Parameter, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """`parameter.to(...)` of an absent parameter: itself if nothing changes, as in `model.to(device)`."""
    values = watcher.alias(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        if not isinstance(values, Unreadable):
            return parameter.to(*args, **kwargs)  # its values have arrived
        probe = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        converted = probe.to(*args, **kwargs)
        if converted is probe:
            return parameter
        return Unreadable.of(converted.expand(parameter.shape), values.parameter, values.refuse)


def _leaves(tree: Any) -> Iterator[Tensor]:
    """All tensors in the arguments of a function of torch."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _leaves(tuple(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
