"""Embeddings and output layers whose rows, the vocabulary, are split among ranks (1909.08053, section 3).

Rank r has rows [r·c, (r+1)·c) of V, c = ⌈V/t⌉, in the module's `weight` and `bias`; modules keep class, names and
sizes, and get another forward. Tied weights have the same rows in both.

An embedding looks up this rank's rows and sums them over the ranks, one message of [..., D]. The input of an output
layer is equal on all ranks, and its gradient is summed over them; its logits are `ShardedLogits`, or of all classes in
evaluation. If `losses` supports a model's loss, there are no logits.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroshard.errors import ModelError
from zeroshard.losses.causal_models import split_loss
from zeroshard.losses.linear_cross_entropy import OutputLayer, linear_cross_entropy
from zeroshard.tensor.split.collectives import CopyIn, SumOut, TensorRanks
from zeroshard.tensor.split.cross_entropy import SplitVocabulary
from zeroshard.tensor.split.layers import Input, Parameters, column_product
from zeroshard.tensor.split.logits import ShardedLogits
from zeroshard.traffic import Purpose
from zeroshard.units.forwards import insert, inside, replaced
from zeroshard.units.hooks import listen


class _SplitForward:
    """The forward of a module with some rows of a vocabulary.

    It runs the forward of the module's class, with functions of torch replaced by ones for all ranks.

    Args:
        functions: replacements of torch's functions; they get the module first, and may return NotImplemented.
    """

    def __init__(
        self, module: nn.Module, vocabulary: SplitVocabulary, functions: Mapping[Any, Callable[..., Any]]
    ) -> None:
        self._module, self.vocabulary, self._functions = weakref.ref(module), vocabulary, functions

    def plain(self, module: Any, input: Tensor) -> Any:
        """The forward of torch's own class, for all ranks."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class, for all ranks."""
        module: Any = self._module()
        kind = type(module)
        if kind.forward in (nn.Embedding.forward, nn.Linear.forward):
            return self.plain(module, *args, **kwargs)
        with _InPlaceOf({f: partial(own, module) for f, own in self._functions.items()}) as mode:
            output = kind.forward(module, *args, **kwargs)
        if not mode.called:
            raise ModelError(
                f"{self.vocabulary.name} is a {kind.__name__}, whose forward does not give its weight and bias as they "
                f"are to {' or '.join(f.__name__ for f in self._functions)}, so that their rows cannot be split. Leave "
                f"the layer whole: tensor_parallel.layers '{self.vocabulary.name}=whole'."
            )
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self.vocabulary)


class _InPlaceOf(TorchFunctionMode):
    """A mode that replaces functions of torch.

    Attributes:
        called: whether a replacement returned a result.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions, self.called = functions, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = self._functions.get(function)
        result = NotImplemented if own is None else own(*args, **kwargs)
        if result is NotImplemented:
            return function(*args, **kwargs)
        self.called = True
        return result


class SplitEmbedding(_SplitForward):
    """The forward of an embedding; a deep copy of the module has its own."""

    def __init__(self, module: nn.Embedding, vocabulary: SplitVocabulary) -> None:
        super().__init__(module, vocabulary, {F.embedding: self._embedding})

    def plain(self, module: Any, input: Tensor) -> Tensor:
        """Token numbers [...] -> [..., D]."""
        padding, start, weight = module.padding_idx, self.vocabulary.start, module.weight
        at, elsewhere = self.vocabulary.find(input)
        if len(weight):
            held = padding is not None and start <= padding < self.vocabulary.stop
            rows = F.embedding(at, weight, padding - start if held else None)
            rows = rows.masked_fill_(elsewhere.unsqueeze(-1), 0)
        else:
            rows = weight.sum() + weight.new_zeros(*input.shape, weight.shape[1])
        self.vocabulary.ranks.plan(Purpose.SUM_ACTIVATIONS, 0 if rows.is_meta else 2 * rows.numel())
        summed: Tensor = SumOut.apply(rows, self.vocabulary.ranks, self.vocabulary.name)  # type: ignore[no-untyped-call]
        return summed

    def _embedding(self, module: Any, input: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Any:
        return self.plain(module, input) if weight is module.weight else NotImplemented


class SplitOutput(_SplitForward):
    """The forward of an output layer; a deep copy of the module has its own.

    Args:
        product: another technique's replacement of the module's forward, or None.
    """

    def __init__(self, module: nn.Linear, vocabulary: SplitVocabulary, product: Any = None) -> None:
        super().__init__(module, vocabulary, {F.linear: self._linear, linear_cross_entropy: self._loss})
        self._product = product

    def plain(self, module: Any, input: Tensor) -> Any:
        """Hidden states [..., D], equal on all ranks -> logits [..., V]."""
        logits = ShardedLogits(self._local(module, input), self.vocabulary.itself)
        return logits if torch.is_grad_enabled() or module.training else logits.whole()

    def _local(self, module: Any, input: Tensor) -> Tensor:
        """[..., D] -> [..., V/t]."""
        ranks, name = self.vocabulary.ranks, self.vocabulary.name
        local: Tensor
        if not input.is_meta:
            listen(input, lambda gradient: ranks.plan(Purpose.SUM_ACTIVATIONS, 2 * gradient.numel()))
        if self._product is not None:
            local = self._product(CopyIn.apply(input, ranks, name))  # type: ignore[no-untyped-call]
        elif input.is_meta or not torch.is_grad_enabled():
            local = F.linear(input, module.weight, module.bias)
        else:
            shared = Input(input, ranks, name, [Parameters(module, transposed=False)])
            local = column_product(shared, module)
            shared.close()
        return local

    def _linear(self, module: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self.plain(module, input) if weight is module.weight and bias is module.bias else NotImplemented

    def _loss(self, module: Any, hidden: Tensor, weight: Any, labels: Tensor, **options: Any) -> Any:
        layer = weight if isinstance(weight, OutputLayer) else OutputLayer(weight)
        if layer.weight is not module.weight:
            return NotImplemented
        return linear_cross_entropy(hidden, replace(layer, vocabulary=self.vocabulary), labels, **options)


def split_embedding(module: nn.Embedding, ranks: TensorRanks, start: int, stop: int, total: int, name: str) -> None:
    """Install the forward of an embedding whose weight has become rows [start, stop) of `total`.

    Args:
        name: of the module, for messages.

    Raises:
        ModelError: it has an option that needs the whole weight.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ModelError(
                f"{name} is an embedding with {option}={getattr(module, option)!r}, which does not work on a part of "
                f"its rows. Leave the option out, or leave the layer whole: tensor_parallel.layers '{name}=whole'."
            )
    split = SplitEmbedding(module, SplitVocabulary(ranks, start, stop, total, name))
    insert(module, "divided", lambda _: split)


def split_output(
    model: nn.Module, module: nn.Linear, ranks: TensorRanks, start: int, stop: int, total: int, name: str
) -> None:
    """Install the forward of an output layer whose weight has become rows [start, stop) of `total`.

    Args:
        model: the whole model, whose loss may be supported.
        name: of the module, for messages.
    """
    vocabulary = SplitVocabulary(ranks, start, stop, total, name)
    product = replaced(module, inside(module, "divided"))
    split_loss(model, module, vocabulary, SplitOutput(module, vocabulary, product))
