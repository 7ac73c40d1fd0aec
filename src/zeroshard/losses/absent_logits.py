"""The output of an output layer whose logits are not made."""

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor

from zeroshard.errors import PlanError

Number = int | float


class LayerCall:
    """One call of an output layer.

    Attributes:
        hidden: what entered it, [..., D]; None when the model's forward is over.
        shape: of its logits, [..., V].
    """

    __slots__ = ("device", "hidden", "shape")

    def __init__(self, hidden: Tensor, vocabulary: int) -> None:
        self.hidden: Tensor | None = hidden
        self.shape = torch.Size((*hidden.shape[:-1], vocabulary))
        self.device = hidden.device


class AbsentLogits:
    """Stands for logits on their way from the output layer to the loss, which makes them by chunks.

    It takes note of what models do to logits on the way: a factor, a divisor, a soft cap, and dtypes and devices, which
    the loss chooses itself. Whatever else is done to it is an error.

    Attributes:
        call: of the output layer.
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
        """Of the hidden states."""
        return self.call.device

    @property
    def cap(self) -> tuple[float, float | None]:
        """The scale and the soft cap of an `OutputLayer` with these logits."""
        return (self._scale, None) if self._inner is None else (self._scale * self._inner, self._scale)

    def __mul__(self, factor: Any) -> "AbsentLogits":
        if not isinstance(factor, Number) or isinstance(factor, bool):
            refuse("*")
        return AbsentLogits(self.call, self._scale * factor, self._inner)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "AbsentLogits":
        if not isinstance(divisor, Number) or not divisor:
            refuse("/")
        return self * (1 / divisor)

    def tanh(self) -> "AbsentLogits":
        """The first half of a soft cap."""
        if self._inner is not None:
            refuse("tanh")
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

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], AbsentLogits):
            return args[0].tanh()
        return refuse(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(name)

    def __getitem__(self, index: Any) -> Never:
        refuse("[...]")

    def __setitem__(self, index: Any, value: Any) -> Never:
        refuse("[...] =")

    def __len__(self) -> Never:
        refuse("len")

    def __add__(self, other: Any) -> Never:
        refuse("+")

    __radd__ = __add__

    def __sub__(self, other: Any) -> Never:
        refuse("-")

    __rsub__ = __sub__


def refuse(done: str) -> Never:
    """Refuse what needs logits.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        f"The logits were read ({done}), and under Plan(loss_chunk=...) the output layer makes none when there are "
        f"labels. To read logits, leave the labels out of the batch; if the model itself reads them, leave loss_chunk "
        f"out."
    )
