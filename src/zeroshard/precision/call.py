"""A call of a model, with an explanation of dtypes that do not fit, and of transforms inside of it."""

from collections.abc import Mapping
from typing import Any

from zeroshard.precision.clash import raise_clash
from zeroshard.units.hooks import raise_transform


def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The output of a model.

    Raises:
        ModelError: a module computed with tensors of different dtypes, or by a transform that hooks do not reach.
    """
    try:
        return model(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        raise_clash(error)
        raise_transform(error)
        raise


def call_with(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping as keywords, a tuple or list as arguments, anything else as one argument."""
    if isinstance(batch, Mapping):
        return call(model, **batch)
    return call(model, *batch) if isinstance(batch, (tuple, list)) else call(model, batch)
