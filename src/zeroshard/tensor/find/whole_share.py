"""The share of a model that every rank of tensor parallelism holds whole, and where it is."""

import warnings
from collections.abc import Mapping

from torch import nn

from zeroshard.errors import WholeLayersWarning
from zeroshard.tensor.find.found import FoundLayers, Style
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.find.linear import linear_features

MOST = 3  # places that are named


def whole_share(model: nn.Module, found: FoundLayers, ranks: int) -> str:
    """A sentence with the share and the largest of these layers; "" where only norms and biases are whole."""
    modules = dict(model.named_modules())
    of_all = {parameter: parameter.numel() for parameter in model.parameters()}
    counted: set[nn.Parameter] = set()
    whole: dict[str, int] = {}
    why: dict[str, str] = {}
    for layer in found.layers:
        module = modules[layer.name]
        own = [p for p in module.parameters(recurse=False) if p not in counted]
        counted |= {*own}
        norm = type(module).__name__.endswith("Norm") or (
            linear_features(module) is None and all(p.dim() < 2 for p in own)
        )
        if layer.style is not Style.WHOLE or norm or layer.reason.startswith("its parameters are"):
            continue
        name = every(layer.name) or type(model).__name__
        whole[name] = whole.get(name, 0) + sum(p.numel() for p in own)
        why.setdefault(name, layer.reason)
    total = sum(whole.values())
    if not total:
        return ""
    largest = sorted(whole, key=lambda name: -whole[name])
    named = "; ".join(f"{name} ({whole[name]:,}: {why[name]})" for name in largest[:MOST])
    more = f"; and {len(largest) - MOST} more" if len(largest) > MOST else ""
    everything = sum(of_all.values())
    return (
        f"Of {everything:,} parameters {total:,} ({100 * total / everything:.0f} %) are whole on every one of {ranks} "
        f"tensor ranks, norms and biases apart: {named}{more}. `zeroshard plan --explain 1` shows all of them; "
        f"TensorParallel(layers=...) names layers to split."
    )


def warn_of_whole(sentence: str, ranks: Mapping[str, int]) -> None:
    """Say it once, on the first rank.

    Args:
        ranks: this one, along each axis.
    """
    if sentence and not any(ranks.values()):
        warnings.warn(sentence, WholeLayersWarning, stacklevel=2)
