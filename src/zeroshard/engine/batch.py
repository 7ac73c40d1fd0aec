"""A call of the model, and the loss in what it returned."""

from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.errors import BatchError
from zeroshard.precision import raise_clash


def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What a model returns.

    Raises:
        ModelError: tensors of different dtypes met in it.
    """
    try:
        return model(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        raise_clash(error)
        raise


def call_with(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping as keywords, a tuple or list as arguments, anything else as it is."""
    if isinstance(batch, Mapping):
        return call(model, **batch)
    return call(model, *batch) if isinstance(batch, (tuple, list)) else call(model, batch)


def loss_in(output: Any) -> torch.Tensor:
    """The scalar loss in a model's output: the output itself, its `.loss`, or its "loss" entry.

    Raises:
        BatchError: there is none.
    """
    candidates = [output, getattr(output, "loss", None), output.get("loss") if isinstance(output, Mapping) else None]
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
            return candidate.reshape(())
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    raise BatchError(
        f"The model returned a {type(output).__name__}{shape} without a scalar loss. Return the loss, an object with "
        f".loss, or pass "
        "Engine(..., loss=function of (output, batch))."
    )
