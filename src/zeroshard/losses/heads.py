"""What a plan says about the loss, brought to the output layer of a model: rows of a chunk, and a split vocabulary."""

from collections.abc import Callable
from typing import Any

from torch import nn

from zeroshard.losses.causal_models import make_loss_by_chunks, split_causal_loss
from zeroshard.losses.vocabulary import Vocabulary

CHUNK = "loss_chunk"  # the attribute of a module that makes the loss, with the rows of a chunk; None for the default


def set_loss_chunk(model: nn.Module, chunk: int | None) -> None:
    """Let the loss of `model` be made of chunks of so many rows; None leaves the model as it is.

    Modules with an attribute `loss_chunk`, such as the head of the built-in model, are told of it. A causal language
    model of transformers gets a loss that stands in for its output layer and its loss function.

    Raises:
        PlanError: the model is neither.
    """
    if chunk is None:
        return
    told = [module for module in model.modules() if hasattr(module, CHUNK)]
    for module in told:
        setattr(module, CHUNK, chunk)
    if not told:
        make_loss_by_chunks(model, chunk)


def split_loss(model: nn.Module, layer: nn.Linear, vocabulary: Vocabulary, make: Callable[..., Any]) -> None:
    """Let the loss of an output layer be made by ranks that have the weights of some classes each.

    The loss of a causal language model of transformers is then made by chunks, without logits. The layer of any other
    model gets the forward `make`, which stands for logits.
    """
    if not split_causal_loss(model, layer, vocabulary, make):
        vars(layer)["forward"] = make
