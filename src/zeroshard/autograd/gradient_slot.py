"""Slots of gradients: memory in the gradient buffer into which a function writes the gradient that it makes.

[Note: gradients in place] The gradients of a stack of experts are as large as the stack, and a fresh tensor of that
size costs a fifth of a step on a CPU. A function that borrows the slot of a parameter writes there and returns the
borrowed tensor itself to autograd, which takes it as the gradient and calls its hooks as ever; so the gradient is in
its place. A second function of the same backward gets no slot, since autograd may have summed the first gradient
already. Only big parameters have slots, and only while no hook of the user may change the gradient on the way.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(slots=True)
class Lent:
    """A slot on loan.

    Attributes:
        tensor: in the shape of the parameter, and of its dtype.
        adds: whether the gradient is added to the slot's content, or replaces it.
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
    """The slot of one parameter's gradient."""

    def lend(self, parameter: Tensor) -> Lent | None:
        """The slot of this parameter, inside of a backward; None where the gradient must be a tensor of its own."""

    def leave(self, parameter: Tensor, rows: RowGradient) -> bool:
        """Add these rows later to the gradient that another function of this backward makes; False if there is none."""


_slots: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of parameters; an attribute would be pickled with them


def offer_slot(parameter: Tensor, slot: GradientSlot) -> None:
    """Register the slot of a parameter."""
    _slots[parameter] = slot


def slot_of(parameter: Tensor) -> GradientSlot | None:
    """The slot of a parameter; None if it has none."""
    slot: GradientSlot | None = _slots.get(parameter)
    return slot


def reached(parameter: Tensor) -> bool:
    """Whether the current backward passes a gradient to this parameter, and is no `torch.autograd.grad`."""
    try:  # False for the backward of other inputs, an error for torch.autograd.grad
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def goes_straight(parameter: Tensor) -> bool:
    """Whether the current backward passes a gradient to this parameter, with no hooks but an engine's."""
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return all(each is not None and len(each) == 1 for each in hooks) and reached(parameter)
