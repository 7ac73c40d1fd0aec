"""Weight gradients that a backward leaves for later, where a schedule has it in two parts (2401.10241, section 2).

While a store is open, the backward of a forward that runs may make the gradients of its inputs alone, and leave the
products that make those of its weights to the store. The schedule says when these are made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LEAVES = "leaves_weight_gradients"  # an attribute, true of modules that leave those of all their matrices

Make = Callable[[Tensor], object]


class WeightGradients:
    """The products that one microbatch's backward left for later."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Make]] = []

    def add(self, weight: Tensor, make: Make) -> None:
        """Leave the gradient of a weight.

        Args:
            make: makes it, and hands it to autograd as the gradient of the weight that it is given.
        """
        self._left.append((weight, make))

    def compute(self) -> None:
        """Make all, in the order in which they were left."""
        left, self._left = self._left, []
        left.reverse()
        while left:  # what a product needs is free once it is made
            weight, make = left.pop()
            make(weight)


class _Open:
    """The store that is open: one for the process, since autograd has threads of its own."""

    def __init__(self) -> None:
        self.store: WeightGradients | None = None


_open = _Open()


def open_store() -> WeightGradients | None:
    """The store of the forward under way; None outside of such."""
    return _open.store


def store_for(*weights: Tensor) -> WeightGradients | None:
    """The store to which a function leaves the gradients of these weights; None where they are made at once or not."""
    values = torch.is_grad_enabled() and not any(weight.is_meta for weight in weights)
    return _open.store if values and any(weight.requires_grad for weight in weights) else None


@contextmanager
def leaving_to(store: WeightGradients) -> Iterator[None]:
    """Forwards inside leave their weight gradients to `store`."""
    before, _open.store = _open.store, store
    try:
        yield
    finally:
        _open.store = before
