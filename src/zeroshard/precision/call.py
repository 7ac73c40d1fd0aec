"""A call of a model, with dtypes that do not fit explained."""

from collections.abc import Mapping
from typing import Any

from zeroshard.precision.clash import raise_clash


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
