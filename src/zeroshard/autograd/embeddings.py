"""Embeddings whose gradients are made row by row, in the slot of the gradient.

[Note: rows alone] Autograd makes the gradient of an embedding as a matrix of its size, which is zero but for the rows
that were looked up, and where the output layer has the same weight it adds two such matrices. Here the rows that were
looked up are added to the gradient's slot (`autograd.gradient_slot`), to the same bits: those of one token are summed
first. The module, its class and its forward stay; a hook gives its output another derivative.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.autograd.gradient_slot import RowGradient, slot_of


def make_rows_alone(model: nn.Module) -> None:
    """Make gradients of a model's embeddings from the looked-up rows alone, where an engine lends slots."""
    for module in model.modules():
        known = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
        if known and _derive not in module._forward_hooks.values():
            module.register_forward_hook(_derive, prepend=True)


def _derive(module: nn.Embedding, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """The output of an embedding, with a row-wise derivative; None where torch's own is better."""
    if torch.compiler.is_compiling() or not output.requires_grad or torch._C._are_functorch_transforms_active():
        return None
    weight, tokens = module.weight, inputs[0] if inputs else None
    changed = "forward" in vars(module)  # by a technique that cut its weight, or by the user
    other = changed or module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    if other or tokens is None or 2 * tokens.numel() > len(weight) or slot_of(weight) is None:
        return None
    made: Tensor = _Lookup.apply(weight, tokens, module.padding_idx, [output.detach()])  # type: ignore[no-untyped-call]
    return made


class _Lookup(torch.autograd.Function):
    """Lookup of rows whose gradient is a `RowGradient`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding: int | None, looked_up: list[Tensor]) -> Tensor:
        """[V, W], [...] -> [..., W], looked up by the caller."""
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding = weight, -1 if padding is None else padding
        return looked_up.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        """The gradient of the matrix; None where its rows are added to a gradient that another function makes."""
        (tokens,), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        slot = None if torch.is_grad_enabled() else slot_of(weight)
        lent = None if slot is None else slot.lend(weight)
        made: Tensor | None
        if lent is not None:
            made = lent.tensor if lent.adds else lent.tensor.zero_()
            _rows(gradient, tokens, ctx.padding).add_to(made)
        elif slot is not None and slot.leave(weight, _rows(gradient, tokens, ctx.padding)):
            made = None
        else:
            made = _dense(gradient, tokens, len(weight), ctx.padding)
        return made, None, None, None


def _dense(gradient: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """The gradient [rows, W] of a matrix from the gradients [..., W] of its rows."""
    made: Tensor = torch.ops.aten.embedding_dense_backward(gradient, tokens, rows, padding, False)
    return made


def _rows(gradient: Tensor, tokens: Tensor, padding: int) -> RowGradient:
    """The gradients [n, W] summed over equal tokens, as a gradient of n rows; no shape depends on values."""
    ordered, order = tokens.reshape(-1).sort(stable=True)
    number = torch.zeros_like(ordered)
    number[1:] = ordered[1:] != ordered[:-1]
    number = number.cumsum(0)
    numbers = torch.zeros_like(ordered).index_copy_(0, number, ordered)
    place = torch.empty_like(number).index_copy_(0, order, number)
    flat = gradient.reshape(-1, gradient.shape[-1])
    if padding >= 0:
        flat = flat.masked_fill((tokens.reshape(-1) == padding).unsqueeze(1), 0.0)
    return RowGradient(numbers, _dense(flat, place, len(place), -1))
