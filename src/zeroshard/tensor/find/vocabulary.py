"""The vocabulary of a language model: its embedding and its output layer, with all layers tied to them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from zeroshard.tensor.find.found import FoundLayer, Segment, Style
from zeroshard.tensor.find.layer_plans import PlannedLayer
from zeroshard.tensor.find.linear import why_no_linear
from zeroshard.units.token_layers import token_layers

WHOLE_WEIGHT = ("max_norm", "scale_grad_by_freq", "sparse")  # options of an embedding that need all of its rows


def find_vocabulary(
    modules: Mapping[str, nn.Module],
    known: Sequence[str],
    ranks: int,
    planned: Mapping[str, PlannedLayer],
    elsewhere: Collection[str] = (),
) -> tuple[dict[str, FoundLayer], dict[str, str]]:
    """Embeddings and output layers to split by the vocabulary, and reasons of the others, by path.

    Args:
        known: as from `known_vocabulary`; layers that a plan names are added, and all that share a weight.
        elsewhere: layers whose weight is read outside of their forward.
    """
    named = [path for path, each in planned.items() if each.style in (Style.EMBEDDING, Style.OUTPUT)]
    holders: dict[nn.Parameter, list[str]] = {}
    for path, module in modules.items():
        if isinstance(weight := module._parameters.get("weight"), nn.Parameter):
            holders.setdefault(weight, []).append(path)
    layers: dict[str, FoundLayer] = {}
    reasons: dict[str, str] = {}
    for weight in dict.fromkeys(modules[path].get_parameter("weight") for path in dict.fromkeys((*known, *named))):
        paths = holders[weight]
        why = next(filter(None, (_why_whole(path, modules[path], planned, ranks) for path in paths)), "")
        why = why or next((f"other code reads the weight of {path}" for path in paths if path in elsewhere), "")
        for path in paths:
            if why:
                reasons[path] = why if len(paths) == 1 else f"shares its weight with {_others(path, paths)}; {why}"
                continue
            style = Style.EMBEDDING if isinstance(modules[path], nn.Embedding) else Style.OUTPUT
            reason = _reason(path, paths, len(weight), ranks)
            layers[path] = FoundLayer(path, style, (Segment(len(weight), ranks),), reason)
    return layers, reasons


def known_vocabulary(modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths of embeddings and output layers of a vocabulary.

    They are those of transformers (`get_input_embeddings`, `get_output_embeddings`), and output layers that compute the
    loss themselves (`loss_chunk`).
    """
    given = {id(each) for module in modules.values() for each in token_layers(module)}
    return [
        path for path, module in modules.items()
        if (isinstance(module, nn.Linear) and hasattr(module, "loss_chunk"))
        or (id(module) in given and (isinstance(module, (nn.Embedding, nn.Linear))))
    ]  # fmt: skip


def _why_whole(path: str, module: Any, planned: Mapping[str, PlannedLayer], ranks: int) -> str:
    """Why a module cannot be split by its rows; "" if it can."""
    said = planned.get(path)
    if said is not None and said.style not in (Style.EMBEDDING, Style.OUTPUT, Style.COLUMN):
        return said.refused or said.said
    if len(module.weight) < ranks:
        return f"a vocabulary of {len(module.weight)} is fewer than {ranks} ranks"
    if isinstance(module, nn.Embedding):
        option = next((name for name in WHOLE_WEIGHT if getattr(module, name)), None)
        return "" if option is None else f"{option}={getattr(module, option)!r} needs all of its rows"
    return "" if isinstance(module, nn.Linear) else why_no_linear(module)


def _reason(path: str, paths: list[str], size: int, ranks: int) -> str:
    tied = f"; tied to {_others(path, paths)}" if len(paths) > 1 else ""
    return f"at most {-(-size // ranks)} of {size} of the vocabulary{tied}"


def _others(path: str, paths: list[str]) -> str:
    return " and ".join(other for other in paths if other != path)
