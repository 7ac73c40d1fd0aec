"""Objects that stand for a tensor that is not made unless something needs it."""

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_map

OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__"),
    *("__matmul__", "__rmatmul__", "__neg__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("__getitem__", "__setitem__", "__len__"),
)


class TensorLike:
    """Hands every operator, method and function of torch on to the tensor that it stands for.

    A subclass makes this tensor in `_tensor`, and computes in `_do` what it can without it.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def _tensor(self, done: str) -> Any:
        """The tensor, for something of this name that is done to it."""
        raise NotImplementedError

    def _do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The result of an operator or a method."""
        return getattr(self._tensor(name), name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tensor(name), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = name_of(function)
        made = lambda leaf: leaf._tensor(done) if isinstance(leaf, TensorLike) else leaf  # noqa: E731
        args, kwargs = tree_map(made, (args, kwargs or {}))
        return function(*args, **kwargs)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function of torch."""
    return getattr(function, "__name__", str(function))


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: TensorLike, *args: Any) -> Any:
        return self._do(name, *args)

    operate.__name__ = name
    return operate


for _name in OPERATORS:
    setattr(TensorLike, _name, _operator(_name))
