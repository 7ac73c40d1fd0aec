"""The layers of a model of transformers with one row per token, found without an import of that package."""

from collections.abc import Iterator

from torch import nn


def output_layer(model: nn.Module) -> nn.Module | None:
    """The output layer of a model, by transformers' `get_output_embeddings`; None without."""
    return _given(model, "get_output_embeddings")


def token_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The input embedding and the output layer of a model, as far as it has them."""
    for layer in (_given(model, "get_input_embeddings"), output_layer(model)):
        if layer is not None:
            yield layer


def _given(model: nn.Module, method: str) -> nn.Module | None:
    give = getattr(model, method, None)
    try:
        layer = give() if callable(give) else None
    except (AttributeError, NotImplementedError):  # of models without any
        return None
    return layer if isinstance(layer, nn.Module) else None
