"""Room for a gradient that the function which makes it writes in place, instead of making a tensor of its own.

[Note: gradients in place] The gradients of a stack of experts are as large as the stack, and a fresh tensor of that
size costs a fifth of a step on a CPU. A function that borrows the room of a parameter writes there and hands the
borrowed tensor itself to autograd, which takes it as the gradient and calls its hooks as ever; who lent the room finds
the gradient in its place. A second function of the same backward gets no room, since autograd may have summed the first
gradient already. Only big parameters have rooms, and only while nobody's hook may change the gradient on the
way.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(slots=True)
class Lent:
    """What a room is lent for.

    Attributes:
        tensor: in the shape of the parameter, and of its dtype.
        adds: whether the gradient is to be added to what is there, and else takes its place.
    """

    tensor: Tensor
    adds: bool


@dataclass(slots=True)
class RowGradient:
    """A gradient of some rows of a matrix; the others are zero.

    Attributes:
        numbers: of the rows [n].
        values: their gradients [n, W]; a row that is named more than once has zeros behind its first.
    """

    numbers: Tensor
    values: Tensor

    def add_to(self, matrix: Tensor) -> None:
        """Add them to a gradient [V, W]."""
        matrix.index_add_(0, self.numbers, self.values)


class GradientSlot(Protocol):
    """The room of one parameter."""

    def lend(self, parameter: Tensor) -> Lent | None:
        """The room of this parameter, inside of a backward; None where the gradient has to be a tensor of its own."""

    def leave(self, parameter: Tensor, rows: RowGradient) -> bool:
        """Have these rows added to the gradient that another function of this backward makes; False if none is."""


class LentRooms(Protocol):
    """The rooms of the parameters of one flat, by their numbers."""

    def begin(self) -> None:
        """A backward begins."""

    def lend(self, number: int, adds: bool) -> Lent | None:
        """The room of one gradient, which is to be added where `adds`; None where it has to be a tensor of its own."""

    def leave(self, number: int, rows: RowGradient) -> bool:
        """Add rows to the gradient that is made in a room, once it has come; False where none is being made."""


_rooms: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of parameters; an attribute would be pickled with them


def offer_slot(parameter: Tensor, room: GradientSlot) -> None:
    """Let functions that use this parameter find its room."""
    _rooms[parameter] = room


def slot_of(parameter: Tensor) -> GradientSlot | None:
    """The room of a parameter; None if it has none."""
    room: GradientSlot | None = _rooms.get(parameter)
    return room


def reached(parameter: Tensor) -> bool:
    """Whether the backward under way hands a gradient to this parameter, and is no `torch.autograd.grad`."""
    try:  # False for the backward of other inputs, an error for torch.autograd.grad
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def goes_straight(parameter: Tensor) -> bool:
    """Whether the backward under way hands a gradient to this parameter, and no hook but one of an engine sees it."""
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return all(each is not None and len(each) == 1 for each in hooks) and reached(parameter)
