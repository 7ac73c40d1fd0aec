"""Activations between the two products of experts; their gradients write into existing memory.

Shapes: `made` [n, M] comes from the first product; `hidden` [n, F] goes into the second; M = 2F where gated.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroshard.errors import ModelError

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


class Activation(Protocol):
    """An activation of n rows.

    Attributes:
        features: hidden features of each made one: 1, or 0.5 where gated.
        overwrites: `hidden` takes the place of `made`, and is all that `gradient` needs.
    """

    features: float
    overwrites: bool

    def __call__(self, made: Tensor) -> Tensor:
        """The hidden features, for autograd."""

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """The hidden features, in `into` [n, F] or, if it overwrites, in `made`.

        Args:
            room: [n, M], where something may be left for `gradient`.
        """

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """The gradient of `made`, in the memory of `of_hidden` or in `into` [n, M], the room of `hidden`."""


class Relu:
    """max(x, 0): the hidden features say which were positive."""

    features = 1.0
    overwrites = True

    def __call__(self, made: Tensor) -> Tensor:
        """For autograd."""
        return F.relu(made)

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """In the place of `made`."""
        return made.relu_()

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """In the place of `of_hidden`."""
        result: Tensor = aten.threshold_backward.grad_input(of_hidden, made, 0, grad_input=of_hidden)
        return result


class ReluSquared:
    """max(x, 0)^2 (Primer: 2109.08668, section 3.2)."""

    features = 1.0
    overwrites = False

    def __call__(self, made: Tensor) -> Tensor:
        """For autograd."""
        return F.relu(made).square()

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """In `into`."""
        torch.clamp(made, min=0, out=into)
        return into.mul_(into)

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """In the place of `of_hidden`."""
        of_positive: Tensor = aten.threshold_backward.grad_input(of_hidden, made, 0, grad_input=of_hidden)
        return of_positive.mul_(made).mul_(2)


class Gelu:
    """GELU (1606.08415), exact or by tanh."""

    features = 1.0
    overwrites = False

    def __init__(self, approximate: str) -> None:
        self._approximate = approximate

    def __call__(self, made: Tensor) -> Tensor:
        """For autograd."""
        return F.gelu(made, approximate=self._approximate)

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """In `into`."""
        result: Tensor = aten.gelu.out(made, approximate=self._approximate, out=into)
        return result

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """In the place of `of_hidden`."""
        result: Tensor = aten.gelu_backward.grad_input(
            of_hidden, made, approximate=self._approximate, grad_input=of_hidden
        )
        return result


class Silu:
    """x * sigmoid(x)."""

    features = 1.0
    overwrites = False

    def __call__(self, made: Tensor) -> Tensor:
        """For autograd."""
        return F.silu(made)

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """In `into`."""
        result: Tensor = aten.silu.out(made, out=into)
        return result

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """In the place of `of_hidden`."""
        result: Tensor = aten.silu_backward.grad_input(of_hidden, made, grad_input=of_hidden)
        return result


class Gated:
    """activation(gate) * value of made = [gate, value] (2002.05202)."""

    features = 0.5
    overwrites = False

    def __init__(self, of_gate: Activation) -> None:
        self._of_gate = of_gate

    def __call__(self, made: Tensor) -> Tensor:
        """For autograd."""
        gate, value = made.chunk(2, -1)
        return self._of_gate(gate) * value

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """In `into`."""
        gate, value = made.chunk(2, -1)
        active = self._active(gate, into if room is None else room.chunk(2, -1)[0])
        return torch.mul(active, value, out=into)

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """In `into`, whose first half is the activation of the gate."""
        gate, value = made.chunk(2, -1)
        of_gate, of_value = into.chunk(2, -1)
        torch.mul(of_hidden, of_gate, out=of_value)
        reads = of_gate.clone() if self._of_gate.overwrites else gate
        torch.mul(of_hidden, value, out=of_gate)
        self._of_gate.gradient(of_gate, reads, of_gate)
        return into

    def _active(self, gate: Tensor, into: Tensor) -> Tensor:
        """The activation of the gate, in `into`; `gate` stays as it is."""
        if self._of_gate.overwrites:
            return self._of_gate.hidden(into.copy_(gate), into)
        return self._of_gate.hidden(gate, into)


class Traced:
    """Any function of rows, by autograd.

    Args:
        function: from [n, M] to [n, F], each row by itself.
        features: F / M.
    """

    overwrites = False

    def __init__(self, function: Function, features: float = 1.0) -> None:
        self._function, self.features = function, features

    def __call__(self, made: Tensor) -> Tensor:
        """For autograd."""
        return self._function(made)

    def hidden(self, made: Tensor, into: Tensor, room: Tensor | None = None) -> Tensor:
        """A tensor of its own."""
        return self._function(made)

    def gradient(self, of_hidden: Tensor, made: Tensor, into: Tensor) -> Tensor:
        """A tensor of its own."""
        with torch.enable_grad():
            made = made.detach().requires_grad_()
            return torch.autograd.grad(self._function(made), made, of_hidden)[0]


ACTIVATIONS: dict[str, Activation] = {
    "relu": Relu(),
    "relu_squared": ReluSquared(),
    "gelu": Gelu("none"),
    "gelu_tanh": Gelu("tanh"),
    "silu": Silu(),
}


def activation_of(name: str, gated: bool) -> Activation:
    """The activation of this name.

    Raises:
        ModelError: there is none.
    """
    if name not in ACTIVATIONS:
        raise ModelError(f"There is no activation {name!r}, but {', '.join(ACTIVATIONS)}.")
    return Gated(ACTIVATIONS[name]) if gated else ACTIVATIONS[name]
