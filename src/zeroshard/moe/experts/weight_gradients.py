"""Gradients of stacked weights, computed one expert after the other in their final memory.

That is the slot that an engine lends (`autograd.gradient_slot`), or `parameter.grad` if there is one, or a new tensor
of the whole stack: never a tensor of the stack's size for each expert, which is what autograd makes of `stack[expert]`.
What is added to earlier gradients is summed in scratch first, so that it rounds as autograd's own sum does. Experts
without rows get zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroshard.autograd.gradient_slot import reached, slot_of


class Target:
    """A stacked parameter of a forward, whose gradient its backward will make.

    Args:
        parameter: [E, ...].
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._room = parameter, slot_of(parameter)

    def gradient(self, weight: Tensor, dtype: torch.dtype, transposed: bool) -> "StackGradient":
        """The gradient, to be made now.

        Args:
            weight: the parameter as it was saved for backward.
            dtype: of the products.
            transposed: experts' weights are [in, out].
        """
        lent = None if self._room is None else self._room.lend(self._parameter)
        if lent is not None:
            return StackGradient(lent.tensor, lent.tensor, lent.adds, dtype, transposed)
        grad = self._parameter.grad if self._parameter.is_leaf else None
        if grad is not None and _may_be_written(self._parameter, grad):
            return StackGradient(grad, None, True, dtype, transposed)
        fresh = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        return StackGradient(fresh, fresh, False, dtype, transposed)


def make_later(
    add: Callable[["StackGradient"], None], counts: Sequence[int], dtype: torch.dtype, transposed: bool
) -> Callable[[Tensor], None]:
    """A function that makes the gradient of a stacked weight in a backward of its own.

    Args:
        add: adds the products of all experts with rows.
        counts: rows of each expert.
        dtype, transposed: as of `Target.gradient`.
    """

    def gradient_of(weight: Tensor) -> Tensor | None:
        made = Target(weight).gradient(weight, dtype, transposed)
        add(made)
        return made.finish(counts)

    def make(weight: Tensor) -> None:
        _Later.apply(weight, gradient_of).backward()  # type: ignore[no-untyped-call]

    return make


class _Later(torch.autograd.Function):
    """A scalar of a weight, whose backward makes the gradient of the weight where it belongs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient_of: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.weight, ctx.gradient_of = weight, gradient_of
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient_of(ctx.weight), None


class StackGradient:
    """The gradient [E, ...] of a stacked weight or bias.

    Args:
        tensor: where it is made.
        answer: what autograd gets for it.
        adds: it is added to what is there.
        dtype: of the products.
        transposed: experts' weights are [in, out].
    """

    def __init__(self, tensor: Tensor, answer: Tensor | None, adds: bool, dtype: torch.dtype, transposed: bool) -> None:
        self._each: Sequence[Tensor] = tensor.unbind()
        self._answer, self._adds, self._dtype, self._transposed = answer, adds, dtype, transposed
        self._scratch: dict[torch.dtype, Tensor] = {}

    def add_product(self, expert: int, of_outputs: Tensor, inputs: Tensor, begins: bool, ends: bool) -> None:
        """Add the gradient [O, I] of a weight, from [n, O] and [n, I].

        Args:
            begins: these are the first rows of the expert.
            ends: these are the last.
        """
        left, right = (inputs, of_outputs) if self._transposed else (of_outputs, inputs)
        total = self._total(expert, begins and ends)
        if total.dtype == self._dtype:
            if begins:
                torch.mm(left.mT, right, out=total)
            else:
                torch.addmm(total, left.mT, right, out=total)
        else:
            piece = torch.mm(left.mT, right)
            total.copy_(piece) if begins else total.add_(piece)
        self._end(expert, total, ends)

    def add_rows(self, expert: int, of_outputs: Tensor, gates: Tensor | None, begins: bool, ends: bool) -> None:
        """Add the gradient [O] of a bias, from [n, O] and gates [n, 1]."""
        wide = torch.promote_types(self._dtype, torch.float32)
        piece = of_outputs.sum(0, dtype=wide) if gates is None else (of_outputs * gates).sum(0, dtype=wide)
        total = self._total(expert, begins and ends)
        total.copy_(piece) if begins else total.add_(piece)
        self._end(expert, total, ends)

    def finish(self, counts: Sequence[int]) -> Tensor | None:
        """The gradient for autograd: the stack, or None where it is in its place already."""
        if not self._adds:
            for each, count in zip(self._each, counts, strict=True):
                if not count:
                    each.zero_()
        self._each, answer = (), self._answer  # autograd takes over tensors that nothing else views
        self._answer = None
        return answer

    def _total(self, expert: int, whole: bool) -> Tensor:
        """Where the rows of one expert are summed: in fp32 at least, where there are several parts."""
        into = self._each[expert]
        dtype = self._dtype if whole else torch.promote_types(self._dtype, torch.float32)
        if not self._adds and into.dtype == dtype:
            return into
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty_like(into, dtype=dtype)
        return self._scratch[dtype]

    def _end(self, expert: int, total: Tensor, ends: bool) -> None:
        into = self._each[expert]
        if ends and total is not into:
            into.add_(total) if self._adds else into.copy_(total)


def _may_be_written(parameter: Tensor, grad: Tensor) -> bool:
    """Whether this backward may add to `parameter.grad` in place: no hook or other reader gets the gradient."""
    hooked = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooked or type(grad) is not Tensor or grad.dtype != parameter.dtype or not grad.is_contiguous():
        return False
    return reached(parameter)
