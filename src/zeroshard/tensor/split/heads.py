"""Adaptions of modules between split layers besides sizes, so that their own forwards compute one rank's heads.

- An argument made outside for all heads, such as alibi: a rank reads its own heads; the gradients are summed.
- A forward that takes the width from its input, as nanoGPT's: it gets a view of one rank's number of features, and the
  column-parallel layers read the input itself.
- A norm over the features of all heads (OLMo 2): features are gathered before it, and a rank keeps its own.
- Features of a whole layer that all heads read (the rotary key of latent attention): their gradients are summed.
- Parameters with a row for each head.

Trials and the model itself use the same functions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.parts.place import Piece
from zeroshard.tensor.find.found import AttentionSizes, FoundLayer, HeadArgument, Style, pieces_of
from zeroshard.tensor.split.collectives import CopyIn, SumOut, TensorRanks
from zeroshard.tensor.split.layers import Entrance
from zeroshard.tensor.split.sequence import activation_in, with_activation
from zeroshard.units.forwards import insert
from zeroshard.units.hooks import Hook


class Borders(Protocol):
    """Operations at the borders between whole activations and one rank's heads."""

    def entered(self, path: str, x: Tensor) -> Tensor:
        """x; its gradient is summed over the ranks."""

    def shared(self, path: str, x: Tensor, features: int) -> Tensor:
        """x; the gradient of its last features is summed over the ranks."""

    def gathered(self, path: str, x: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The features of all ranks; x has this rank's."""


class SharedFeatures(torch.autograd.Function):
    """x, equal on all ranks; the gradient of its last features is summed over the ranks, of the others it is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, features: int, label: str) -> Tensor:
        """x itself."""
        ctx.ranks, ctx.features, ctx.label = ranks, features, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient, its last features summed over the ranks."""
        (gradient,) = gradients
        last = ctx.ranks.sum(gradient[..., -ctx.features :].clone(), f"gradient of {ctx.label}")
        return torch.cat([gradient[..., : -ctx.features], last], -1), None, None, None


class GatheredFeatures(torch.autograd.Function):
    """The features of all ranks, from x [..., F/t]; the gradient is this rank's features of its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, label: str) -> Tensor:
        """[..., F/t] to [..., F]."""
        ctx.ranks, ctx.label = ranks, label
        return ranks.gather(x, -1, x.shape[-1] * ranks.size, label)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Own features of the sum."""
        return ctx.ranks.scatter_sum(gradients[0], -1, f"gradient of {ctx.label}"), None, None


class RankBorders:
    """The borders of a rank in its tensor group."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks

    def entered(self, path: str, x: Tensor) -> Tensor:
        """x; its gradient is summed over the ranks."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        copied: Tensor = CopyIn.apply(x, self._ranks, path)  # type: ignore[no-untyped-call]
        return copied

    def summed(self, path: str, y: Tensor) -> Tensor:
        """The sum of y over the ranks."""
        if not (torch.is_grad_enabled() and y.requires_grad):
            return self._ranks.sum(y, path)
        total: Tensor = SumOut.apply(y.clone() if y._is_view() else y, self._ranks, path)  # type: ignore[no-untyped-call]
        return total

    def shared(self, path: str, x: Tensor, features: int) -> Tensor:
        """x; the gradient of its last features is summed over the ranks."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        marked: Tensor = SharedFeatures.apply(x, self._ranks, features, path)  # type: ignore[no-untyped-call]
        return marked

    def gathered(self, path: str, x: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """The features of all ranks; x has this rank's."""
        whole: Tensor = GatheredFeatures.apply(x, self._ranks, path)  # type: ignore[no-untyped-call]
        return whole


def head_dimension(module: nn.Module) -> int:
    """The parameters' dimension of heads: an embedding has a column for each head, other modules a row."""
    return int(isinstance(module, nn.Embedding))


def per_head(args: Sequence[Any], kwargs: Mapping[str, Any], heads: int, rows: int) -> tuple[HeadArgument, ...]:
    """The arguments of a call with a part for each head: [H, ...], [B·H, ...], [B, H, ...] or [B, N, H, ...].

    Args:
        rows: B, of the call.
    """
    found: list[HeadArgument] = []
    named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in named:
        if not isinstance(value, Tensor) or not value.is_floating_point() or heads < 2:
            continue
        if value.dim() in (4, 5) and value.shape[value.dim() - 3] == heads:
            found.append(HeadArgument(key, value.dim() - 3))
        elif value.dim() == 3 and value.shape[0] in (heads, rows * heads) and value.shape[0] != rows:
            found.append(HeadArgument(key, 0, rows=value.shape[0] != heads))
    return tuple(found)


def own_heads(value: Tensor, argument: HeadArgument, heads: int, ranks: int, rank: int) -> Tensor:
    """The part of an argument that belongs to a rank's heads."""
    own = heads // ranks
    if argument.dimension:
        return value.narrow(argument.dimension, rank * own, own)
    each = value.reshape(-1, heads, *value.shape[1:]).narrow(1, rank * own, own)
    return each.flatten(0, 1)


def fit_layer(module: Any, layer: FoundLayer, borders: Borders, ranks: int, rank: int | None) -> None:
    """Adapt a whole module to the heads of a rank; `rank` None is the whole model, in a trial."""
    if layer.gathers:
        pieces = list(pieces_of(layer.segments, ranks, rank or 0))
        own = sum(piece.length for piece in pieces)

        def gathered(forward: Callable[..., Any]) -> Callable[..., Any]:
            def normed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                if rank is not None and x.shape[-1] != own:
                    return forward(x, *args, **kwargs)
                whole = forward(borders.gathered(layer.name, x, pieces), *args, **kwargs)
                if rank is None:
                    return whole
                return torch.cat([whole[..., p.start : p.stop] for p in pieces], -1)

            return normed

        insert(module, "gathered", gathered)
    if layer.shared:

        def shared(module: nn.Module, args: Any, made: Tensor) -> Tensor:
            return borders.shared(layer.name, made, layer.shared)

        module.register_forward_hook(Hook(shared))


def fit_attention(
    module: Any, attention: AttentionSizes, borders: Borders, ranks: int, rank: int | None, entrance: Entrance | None
) -> None:
    """Cut the arguments of an attention module to its rank's heads; `rank` None is the whole model, in a trial.

    Args:
        entrance: of its column-parallel layers; None in a trial, in which a view has its tensor as `stands_for`.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        for argument in attention.arguments:
            value = args[argument.key] if isinstance(argument.key, int) else kwargs.get(argument.key)
            rows = activation_in(args, kwargs, attention.name).shape[0]
            if not isinstance(value, Tensor) or argument.heads_of(value.shape, rows) != attention.heads:
                continue  # an earlier layer made it for this rank's heads
            value = borders.entered(f"{attention.name}.{argument.key}", value)
            if rank is not None:
                value = own_heads(value, argument, attention.heads, ranks, rank)
            if isinstance(argument.key, int):
                args = (*args[: argument.key], value, *args[argument.key + 1 :])
            else:
                kwargs = {**kwargs, argument.key: value}
        if attention.narrow and rank is not None:
            x = activation_in(args, kwargs, attention.name)
            view = x.detach().narrow(-1, 0, x.shape[-1] // ranks)
            if entrance is None:
                vars(view)["stands_for"] = x
            else:
                entrance.stand(view, x)
            args, kwargs = with_activation(args, kwargs, view)
        return args, kwargs

    if attention.arguments or attention.narrow:
        module.register_forward_pre_hook(Hook(before), with_kwargs=True)


def cut_heads(module: Any, layer: FoundLayer, ranks: int, rank: int) -> None:
    """Cut the parameters of a trial's copy of a module with a row or a column per head to one rank's heads."""
    if layer.style is not Style.HEADS:
        return
    dimension, pieces = head_dimension(module), list(pieces_of(layer.segments, ranks, rank))
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.requires_grad:  # and not a stand-in's weight
            parts = [parameter.detach().narrow(dimension, p.start, p.length) for p in pieces]
            module._parameters[name] = nn.Parameter(torch.cat(parts, dimension))
