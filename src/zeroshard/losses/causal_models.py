"""The loss of a model by chunks: in its own head, or in an unmodified causal language model of transformers.

The forward of the latter calls the output layer, and then `self.loss_function(logits, labels, ...)`. Given labels, the
output layer returns `AbsentLogits`; the loss function calls the layer again with these and the labels, and the layer
computes the loss. So the weight is used inside the layer's forward, for which the engine has gathered or borrowed it.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import PlanError
from zeroshard.losses.absent_logits import AbsentLogits, LayerCall
from zeroshard.losses.linear_cross_entropy import OutputLayer, linear_cross_entropy
from zeroshard.losses.row_gradients import WHOLE, Vocabulary
from zeroshard.units.changed_attributes import changing
from zeroshard.units.forwards import insert, inside, layer_of, replaced
from zeroshard.units.hooks import Hook
from zeroshard.units.token_layers import output_layer

LOSS = "ForCausalLMLoss"  # of transformers.loss.loss_utils: cross entropy of the next token


def make_loss_by_chunks(model: nn.Module, chunk: int) -> None:
    """Replace the forward of the output layer and the loss function of the causal model in `model`.

    Args:
        chunk: rows whose logits exist at once.

    Raises:
        PlanError: there is no such model, or its output layer or loss is of another kind.
    """
    causal = _causal_model(model)
    if causal is None:
        raise PlanError(
            f"loss_chunk={chunk} is for causal language models of transformers and for modules with an attribute "
            f"loss_chunk, and {type(model).__name__} is neither. Leave it out, and call "
            f"zeroshard.losses.linear_cross_entropy in the model's forward."
        )
    layer, loss, name = _trained_layer(causal), causal.loss_function, type(causal).__name__
    if not _is_plain(layer):
        raise PlanError(
            f"loss_chunk={chunk} needs an output layer that is a plain nn.Linear, and that of {name} is a "
            f"{_kind(layer)}. Leave it out; of peft's adapters, modules_to_save leaves a plain nn.Linear there."
        )
    if getattr(loss, "__name__", "") != LOSS:
        raise PlanError(
            f"loss_chunk={chunk} stands in for the loss function {LOSS} of transformers, and {name} has "
            f"{getattr(loss, '__name__', loss)!r}. Leave it out."
        )
    _install(causal, layer, chunk)


def split_causal_loss(model: nn.Module, layer: nn.Linear, vocabulary: Vocabulary) -> bool:
    """Make the loss by chunks over ranks that split the vocabulary of an output layer.

    If the model reads logits, the layer's inner forward makes them.

    Returns:
        whether it is the output layer of a causal model with such a loss.
    """
    forward = layer_of(layer, "loss")
    if forward is None:
        causal = _causal_model(model)
        if causal is None or _trained_layer(causal) is not layer or not _is_plain(layer):
            return False
        if getattr(causal.loss_function, "__name__", "") != LOSS:
            return False
        forward = _install(causal, layer, None)
    forward.vocabulary = vocabulary
    return True


def _causal_model(model: nn.Module) -> Any:
    """The first model with an output layer and a loss function of its own; None without.

    A wrapper, such as peft's, that passes the names of its attributes on to a model inside is none.
    """
    own = (m for m in model.modules() if "loss_function" in vars(m) or hasattr(type(m), "loss_function"))
    return next((m for m in own if callable(m.loss_function) and _trained_layer(m) is not None), None)


def _kind(layer: Any) -> str:
    """The name of a layer's class, with its module where torch has a class of this name."""
    kind = type(layer)
    return (
        f"{kind.__module__}.{kind.__name__}"
        if hasattr(nn, kind.__name__) and kind.__module__[:6] != "torch."
        else kind.__name__
    )


def _is_plain(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) and getattr(inside(layer, "loss"), "__func__", None) is nn.Linear.forward


def _install(causal: Any, layer: nn.Linear, chunk: int | None) -> "_LayerForward":
    forward = _LayerForward(layer, _Labelled(causal), chunk)
    insert(layer, "loss", partial(forward.around, layer))
    causal.loss_function = _ChunkedLoss(layer, causal.loss_function, type(causal).__name__)
    return forward


def _trained_layer(module: nn.Module) -> Any:
    """The output layer that is trained, of a model of transformers; None without."""
    layer = output_layer(module)
    copies, active = getattr(layer, "modules_to_save", None), getattr(layer, "active_adapters", ())
    trained = [copies[name] for name in active if name in copies] if isinstance(copies, nn.ModuleDict) else []
    return trained[0] if trained else layer  # peft trains a copy of it


class _Labelled:
    """Whether a causal model's current forward has labels.

    Attributes:
        calls: calls of its output layer in this forward.
    """

    def __init__(self, model: nn.Module) -> None:
        names = list(inspect.signature(model.forward).parameters)
        self._place = names.index("labels") if "labels" in names else len(names)
        self._now = False
        self.calls: list[LayerCall] = []
        model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True)
        model.register_forward_hook(Hook(self._leave), always_call=True)

    def __bool__(self) -> bool:
        return self._now

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        positional = args[self._place] if self._place < len(args) else None
        self._now = kwargs.get("labels", positional) is not None

    def _leave(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self._now = False
        for call in self.calls:
            call.hidden = None  # logits that the user keeps must not keep the graph
        self.calls.clear()


class _LayerForward:
    """The forward of an output layer; a copy of the layer has its own class's, or `make`.

    Attributes:
        loss_chunk: rows whose logits exist at once; None for the default of `linear_cross_entropy`.
        vocabulary: the classes of the rows of the weight.
        make: the forward that makes logits, also with labels; by default the layer's own, and none with labels.
    """

    def __init__(self, layer: nn.Linear, labelled: _Labelled, chunk: int | None) -> None:
        self._layer, self._labelled, self.loss_chunk = weakref.ref(layer), labelled, chunk
        self.vocabulary: Vocabulary = WHOLE
        self.make: Callable[..., Any] | None = None

    def around(self, layer: nn.Linear, inner: Callable[..., Any]) -> "_LayerForward":
        """Itself, with another forward inside."""
        self.make = replaced(layer, inner)
        return self

    def __call__(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        logits: AbsentLogits | None = None,
        read: bool = False,
        **options: Any,
    ) -> Any:
        """Hidden states [..., D] to logits or `AbsentLogits`; with `logits` and `labels`, to their loss.

        Args:
            read: make logits although the model has labels.
        """
        layer = self._layer()
        assert layer is not None
        if labels is None and (read or not self._labelled):
            return F.linear(input, layer.weight, layer.bias) if self.make is None else self.make(input)
        if logits is None or labels is None:
            make = None if self.make is None else lambda hidden: layer(hidden, read=True)
            self._labelled.calls.append(LayerCall(input, layer.out_features, make))
            return AbsentLogits(self._labelled.calls[-1])
        scale, softcap = logits.cap
        output = OutputLayer(layer.weight, layer.bias, scale, softcap, self.vocabulary)
        return linear_cross_entropy(input, output, labels, chunk=self.loss_chunk, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_plain_forward, (self._layer(),)) if self.make is None else (_same, (self.make,))


class _ChunkedLoss:
    """Replacement of `ForCausalLMLoss` for absent logits."""

    def __init__(self, layer: nn.Linear, plain: Callable[..., Any], name: str) -> None:
        self._layer, self._plain, self._name = weakref.ref(layer), plain, name
        self.__name__ = getattr(plain, "__name__", type(plain).__name__)  # identifies its kind of labels

    def __call__(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over the labels that count, or the sum divided by `num_items_in_batch`, as in `ForCausalLMLoss`.

        Args:
            shift_labels: the label of each position; by default the next position's of `labels`.
        """
        layer = self._layer()
        if isinstance(logits, AbsentLogits) and logits.call.makes:
            given = labels if shift_labels is None else shift_labels
            positions = logits.shape[:-1].numel()
            if vocab_size not in (None, logits.shape[-1]) or given is None or given.numel() != positions:
                logits = logits.made()
        if not isinstance(logits, AbsentLogits):
            loss: Tensor = self._plain(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return loss
        assert layer is not None
        if vocab_size not in (None, layer.out_features):
            raise PlanError(
                f"The loss of {self._name} takes rows of {vocab_size} logits, and its output layer makes "
                f"{layer.out_features}. Leave loss_chunk out."
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = logits.call.hidden
        if hidden is None or hidden.shape[:-1].numel() != shift_labels.numel():
            raise PlanError(
                f"The labels have shape {tuple(shift_labels.shape)} and the hidden states "
                f"{None if hidden is None else tuple(hidden.shape)}, so that they do not belong together. Give a label "
                f"for each position (no logits_to_keep), or leave loss_chunk out."
            )
        reduction = "mean" if num_items_in_batch is None else "sum"
        targets = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
        total: Tensor = layer(hidden, targets, logits, ignore_index=ignore_index, reduction=reduction)
        if num_items_in_batch is None:
            return total
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._plain,)


def _plain_forward(layer: nn.Linear) -> MethodType:
    return MethodType(type(layer).forward, layer)


def _same(loss: Callable[..., Any]) -> Callable[..., Any]:
    return loss


CHUNK = "loss_chunk"  # the attribute of a module that makes the loss, with the rows of a chunk; None for the default


def set_loss_chunk(model: nn.Module, chunk: int | None) -> None:
    """Make the loss of `model` by chunks of `chunk` rows; None leaves the model as it is.

    Modules with an attribute `loss_chunk`, such as the head of the built-in model, get it set. In a causal language
    model of transformers, the output layer and the loss function are replaced.

    Raises:
        PlanError: the model is neither.
    """
    if chunk is None:
        return
    told = [module for module in model.modules() if hasattr(module, CHUNK)]
    with changing(model):
        for module in told:
            setattr(module, CHUNK, chunk)
        if not told:
            make_loss_by_chunks(model, chunk)


def split_loss(model: nn.Module, layer: nn.Linear, vocabulary: Vocabulary, make: Callable[..., Any]) -> None:
    """Make the loss of an output layer over ranks that split its vocabulary.

    In a causal language model of transformers, the loss is made by chunks, without logits. The layer gets the forward
    `make`, which returns logits.
    """
    split_causal_loss(model, layer, vocabulary)
    insert(layer, "divided", lambda _: make)
