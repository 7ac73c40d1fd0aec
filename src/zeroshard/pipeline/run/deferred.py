"""Backward in two parts, for zero-bubble schedules: input gradients first, weight gradients of matrices later.

"Zero Bubble Pipeline Parallelism" (2401.10241, section 2). While a store is open, linear layers leave the product that
makes their weight's gradient to the store, and so do the modules of other rooms that say so, such as stacks of experts;
everything else of the backward (biases, norms, embeddings) is done at once.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.step.context import LEAVES, WeightGradients, Within, context, store_for
from zeroshard.units.forwards import insert

Sums = Callable[[Tensor, int], Tensor]  # of gradients whose features several ranks hold, along this dimension


class Deferral:
    """Deferred weight gradients of a model's layers of the classes in `DEFERS`, by the open store.

    Warns about matrices of other layers: their gradients are made at once, and fill no bubble.
    """

    def __init__(self, model: nn.Module) -> None:
        deferred, escaped = 0, dict[str, int]()
        for path, module in model.named_modules():
            made = next((make for kind, make in DEFERS.items() if _is_plain(module, kind)), None)
            matrices = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1 and p.requires_grad)
            if made is not None:
                insert(module, "deferred", partial(made, module))
            if made is not None or getattr(module, LEAVES, False):
                deferred += matrices
            elif matrices and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not _makes_loss(module):
                escaped[path] = matrices
        if sum(escaped.values()) > ESCAPED * deferred:
            name, share = next(iter(escaped)), sum(escaped.values()) / (deferred + sum(escaped.values()))
            warnings.warn(
                f"schedule='zb-h1' leaves the weight gradients of {', '.join(kind.__name__ for kind in DEFERS)} layers "
                f"for later; {share:.0%} of the elements of matrices are in other layers (the first is {name!r}, a "
                f"{type(model.get_submodule(name)).__name__}), whose gradients are made at once and fill no bubble. "
                f"Use schedule='1f1b', or build those layers from nn.Linear.",
                stacklevel=2,
            )

    @property
    def store(self) -> WeightGradients | None:
        """The store of the current forward."""
        return context.weight_gradients

    def into(self, store: WeightGradients) -> AbstractContextManager[None]:
        """Forwards inside leave their weight gradients to `store`."""
        return Within(weight_gradients=store)


class _Linear:
    """The forward of one linear layer, around its plain one."""

    def __init__(self, module: nn.Linear, plain: Callable[..., Any]) -> None:
        self._module, self._plain = module, plain

    def __call__(self, input: Tensor, biased: bool = True, sums: Sums | None = None) -> Tensor:
        """The layer's output.

        Args:
            biased: whether to add the bias.
            sums: sums gradients of weight and bias over ranks with copies of the outputs.
        """
        x, bias = input, self._module.bias if biased else None
        weight = self._module.weight
        store = store_for(weight)
        if store is None:
            output: Tensor = self._plain(x) if biased else F.linear(x, weight)
            return output
        anchor = torch.zeros((), device=x.device, dtype=x.dtype, requires_grad=True)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, bias, anchor, weight.detach(), (weight,), store, sums
        )
        return product


# Factories of forwards by class, from the module and its plain forward.
DEFERS: dict[type[nn.Module], Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = {nn.Linear: _Linear}
ESCAPED = 0.1  # share of elements in other layers, relative to deferred ones, that gives a warning


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) and getattr(module.forward, "__func__", None) is kind.forward


def _makes_loss(module: nn.Module) -> bool:
    """Whether a module's forward computes the loss and the gradient of its weight."""
    return any(hasattr(one, "loss_chunk") for one in (module, module.forward))


class _Product(torch.autograd.Function):
    """x·Wᵀ + b, whose backward leaves the gradient of W to a store."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        value: Tensor,
        weight: tuple[nn.Parameter],
        store: WeightGradients,
        sums: Sums | None,
    ) -> Tensor:
        """[..., I] -> [..., O]; the anchor keeps the node in the graph where x and b need no gradient.

        The weight comes in a tuple, so that autograd does not take it for an input.
        """
        ctx.save_for_backward(x, value)
        ctx.weight, ctx.store, ctx.sums = weight[0], store, sums
        return F.linear(x, value, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and b only."""
        x, value = ctx.saved_tensors
        (gradient,) = gradients
        ctx.store.add(ctx.weight, partial(_make, x=x, gradient=gradient, sums=ctx.sums))
        of_x = gradient @ value if ctx.needs_input_grad[0] else None
        of_bias = _rows(gradient).sum(0) if ctx.needs_input_grad[1] else None
        if of_bias is not None and ctx.sums is not None:
            of_bias = ctx.sums(of_bias, 0)
        return of_x, of_bias, None, None, None, None, None


def _make(weight: Tensor, x: Tensor, gradient: Tensor, sums: Sums | None) -> None:
    """Pass gradientᵀ·x, with x [..., I] and gradient [..., O], to autograd as the gradient of weight [O, I]."""
    with torch.no_grad():
        product = _rows(gradient).mT @ _rows(x)
        product = product if sums is None else sums(product, 0)
    weight.backward(product.to(weight.dtype))


def _rows(x: Tensor) -> Tensor:
    """[..., N] -> [rows, N]."""
    return x.reshape(-1, x.shape[-1])
