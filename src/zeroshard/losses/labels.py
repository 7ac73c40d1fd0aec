"""The labels that count in the losses of transformers' models.

Its losses of language models are functions which a model's forward calls as `self.loss_function`: that of causal models
predicts the label one position further on. Older forwards compute the cross entropy themselves: the mean over labels at
their own positions, whatever `num_items_in_batch` says.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.errors import BatchError

SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}  # labels, by one token


def calls_loss_function(model: nn.Module) -> bool:
    """Whether the forward of a module of the model, or one that it extends, calls the loss function of transformers."""
    return any(_calls_loss_function(type(module)) for module in model.modules())


def labels_that_count(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The number of labels over which a model sums its loss, given transformers' `num_items_in_batch`.

    Raises:
        BatchError: they are not known, or the model leaves the argument aside.
    """
    name = getattr(getattr(model, "loss_function", None), "__name__", "its own")
    labels, way_out = batch.get("labels"), "pass Engine(..., loss=function of (output, batch) to (sum, count))"
    if name not in SHIFTS or not isinstance(labels, torch.Tensor):
        raise BatchError(
            f"The batch has num_items_in_batch, whose labels are not known ({type(model).__name__} with the loss "
            f"function {name}); {way_out}."
        )
    if not calls_loss_function(model):
        raise BatchError(
            f"The batch has num_items_in_batch, which {type(model).__name__} leaves aside: its forward returns the "
            f"mean over the labels of its own rows. Leave the argument out for the mean of all rows, or {way_out}: "
            f"(output.loss * count, count), where count is the number of labels."
        )
    counted: torch.Tensor = batch.get("shift_labels", labels[..., 1:] if SHIFTS[name] else labels)
    return (counted != -100).sum()


def _calls_loss_function(kind: type[nn.Module]) -> bool:
    forwards = (inspect.unwrap(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))
