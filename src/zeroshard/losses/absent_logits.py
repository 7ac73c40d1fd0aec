"""Lazy logits: the output of an output layer, computed only if they are read."""

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zeroshard.errors import PlanError

OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__"),
    *("__matmul__", "__rmatmul__", "__neg__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("__getitem__", "__setitem__", "__len__"),
)


class TensorLike:
    """An object that forwards every operator, method and function of torch to a tensor.

    A subclass makes this tensor in `_tensor`, and may compute operations without it in `_do`.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def _tensor(self, done: str) -> Any:
        """The tensor, for the operation `done`."""
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


Number = int | float
Make = Callable[[Tensor], Any]  # hidden states [..., D] -> logits [..., V], or `ShardedLogits`


class LayerCall:
    """One call of an output layer.

    Args:
        make: makes logits that are read; without it, reading them is an error.

        Attributes:
            hidden: the input, [..., D]; None after the model's forward.
        shape: of its logits, [..., V].
    """

    __slots__ = ("_made", "_make", "device", "hidden", "shape")

    def __init__(self, hidden: Tensor, vocabulary: int, make: Make | None = None) -> None:
        self.hidden: Tensor | None = hidden
        self.shape = torch.Size((*hidden.shape[:-1], vocabulary))
        self.device = hidden.device
        self._make, self._made = make, None

    @property
    def makes(self) -> bool:
        """Whether logits can be read."""
        return self._make is not None

    def logits(self, done: str) -> Any:
        """The logits, for the operation `done`.

        Raises:
            PlanError: they are not made, or the model's forward is over.
        """
        if self._made is None:
            if self._make is None or self.hidden is None:
                refuse(done)
            self._made = self._make(self.hidden)
        return self._made


class AbsentLogits(TensorLike):
    """A placeholder of logits between the output layer and the loss, which makes them by chunks.

    It records a factor, a divisor and a soft cap, and ignores dtypes and devices, which the loss chooses itself. Any
    other operation makes the logits if the layer can, and is an error otherwise.

    Attributes:
        call: the call of the output layer.
    """

    def __init__(self, call: LayerCall, scale: float = 1.0, inner: float | None = None) -> None:
        """The logits are scale·z of the output layer's z, or scale·tanh(inner·z)."""
        self.call, self._scale, self._inner = call, float(scale), inner

    @property
    def shape(self) -> torch.Size:
        """[..., V]."""
        return self.call.shape

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self.call.device

    @property
    def cap(self) -> tuple[float, float | None]:
        """The scale and the soft cap of an `OutputLayer` with these logits."""
        return (self._scale, None) if self._inner is None else (self._scale * self._inner, self._scale)

    def made(self, done: str = "logits") -> Any:
        """The logits, for the operation `done`.

        Raises:
            PlanError: they are not made.
        """
        z = self.call.logits(done)
        if self._inner is not None:
            z = (z * self._inner).tanh()
        return z if self._scale == 1 else z * self._scale

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, Number) or isinstance(factor, bool):
            return self.made("*") * factor
        return AbsentLogits(self.call, self._scale * factor, self._inner)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not isinstance(divisor, Number) or not divisor:
            return self.made("/") / divisor
        return self * (1 / divisor)

    def tanh(self) -> Any:
        """The first half of a soft cap."""
        if self._inner is not None:
            return self.made("tanh").tanh()
        return AbsentLogits(self.call, 1.0, self._scale)

    def float(self) -> "AbsentLogits":
        """Itself: the loss is computed in fp32."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "AbsentLogits":
        """Itself: the loss is computed where the hidden states are."""
        return self

    def contiguous(self) -> "AbsentLogits":
        """Itself."""
        return self

    def _tensor(self, done: str) -> Any:
        return self.made(done)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], AbsentLogits):
            return args[0].tanh()
        return super().__torch_function__(function, types, args, kwargs)


def refuse(done: str) -> Never:
    """Refuse the operation `done`, which reads logits.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        f"The logits were read ({done}), and under Plan(loss_chunk=...) or tensor_parallel the output layer makes none "
        f"when there are labels. To read logits, leave the labels out of the batch; if the model itself reads them, "
        f"leave loss_chunk out."
    )
