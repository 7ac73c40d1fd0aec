"""Context of the current step, for code inside of models and of autograd, which gets no engine.

[Note: one context] There is one context for the process, not one for each thread: autograd computes in threads of its
own. It is entered by `Within` alone, and has its defaults outside of an engine.

[Note: weight gradients for later] Where a schedule has the backward in two parts (2401.10241, section 2), a forward
inside of a store may leave the products for the gradients of its weights to that store; the schedule says when they are
computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

LEAVES = "leaves_weight_gradients"  # an attribute, true of modules that leave those of all their matrices

Make = Callable[[Tensor], object]


class KeptResults(Protocol):
    """Results that a forward keeps so that its recomputation does not compute them again: collectives, random draws."""

    def once(self, make: Callable[[], Tensor], written: Tensor) -> Tensor:
        """The result of `make`, which is called in the forward; its recomputation gets that result again.

        Args:
            written: a tensor that `make` may write into, unseen by dispatch.
        """


class WeightGradients:
    """Products of one microbatch's backward that are computed later ([Note: weight gradients for later])."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Make]] = []

    def add(self, weight: Tensor, make: Make) -> None:
        """Defer the gradient of a weight.

        Args:
            make: computes it, and gives it to autograd as the gradient of its argument, the weight.
        """
        self._left.append((weight, make))

    def compute(self) -> None:
        """Compute all, in the order in which they were deferred."""
        left, self._left = self._left, []
        left.reverse()
        while left:  # the memory of a product's inputs is free once it is computed
            weight, make = left.pop()
            make(weight)


@dataclass(slots=True)
class StepContext:
    """The context ([Note: one context]).

    Attributes:
        penalty_weight: of penalties in the backward under way, times the loss scale; 1 in a plain `loss.backward()`.
        weight_gradients: the store of the forward under way; None where gradients are computed at once.
        kept: results of the forward under way that is to be computed again, or of its recomputation; else None.
    """

    penalty_weight: float | Tensor = 1.0
    weight_gradients: WeightGradients | None = None
    kept: KeptResults | None = None


context = StepContext()


class Within:
    """A context in which one field of `context` has another value: `Within(kept=results)`."""

    __slots__ = ("before", "name", "value")

    def __init__(self, **field: Any) -> None:
        ((self.name, self.value),) = field.items()

    def __enter__(self) -> None:
        self.before = getattr(context, self.name)
        setattr(context, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(context, self.name, self.before)


def store_for(*weights: Tensor) -> WeightGradients | None:
    """The store for the gradients of these weights; None where they are computed at once or not at all."""
    values = torch.is_grad_enabled() and not any(weight.is_meta for weight in weights)
    return context.weight_gradients if values and any(weight.requires_grad for weight in weights) else None
