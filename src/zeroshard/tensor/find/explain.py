"""A table of a model's split: one row for each module with parameters, its style and the reason."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroshard.errors import WholeLayersWarning
from zeroshard.tensor.find.found import FoundLayer, FoundLayers, Style, pieces_of
from zeroshard.tensor.find.layout import every
from zeroshard.tensor.find.linear import linear_features


@dataclass(frozen=True, slots=True)
class ExplainedLayer:
    """A module with parameters of its own, or the same module of several blocks.

    Attributes:
        name: path; block numbers are `*` if equal modules of several blocks are merged.
        count: number of merged modules.
        kind: name of the class.
        style: how the module is split.
        part: features or rows of the first rank, of all; "" for a whole module.
        reason: why it is split so, or whole.
    """

    name: str
    count: int
    kind: str
    style: str
    part: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def explain(model: nn.Module, found: FoundLayers, ranks: int) -> list[ExplainedLayer]:
    """A row for each module with parameters, in the model's order; equal modules of several blocks share one."""
    modules = dict(model.named_modules())
    rows = [_row(layer, type(modules[layer.name]).__name__, ranks) for layer in found.layers]
    together: dict[str, list[ExplainedLayer]] = {}
    for row in rows:
        together.setdefault(every(row.name), []).append(row)
    merged: list[ExplainedLayer] = []
    for name, same in together.items():
        alike = len({(row.kind, row.style, row.part, row.reason) for row in same}) == 1
        merged += [replace(same[0], name=name, count=len(same))] if alike and len(same) > 1 else same
    return merged


def explain_sequences(found: FoundLayers, sequence: bool) -> list[str]:
    """Sentences about sequence parallelism: the blocks that work on parts of sequences, and reasons of the others.

    Args:
        sequence: whether the plan sets it.
    """
    if not sequence:
        return ["Sequence parallelism is off: between split layers all ranks work on whole sequences."]
    lines = [f"{_through(blocks)} work on parts of sequences between their split layers." for blocks in found.blocks]
    lines += [f"{path} works on whole sequences: {reason}." for path, reason in found.whole_sequences]
    return lines or ["No blocks with split layers were found, so that all of the model works on whole sequences."]


def _row(layer: FoundLayer, kind: str, ranks: int) -> ExplainedLayer:
    whole = sum(segment.size for segment in layer.segments)
    own = sum(piece.stop - piece.start for piece in pieces_of(layer.segments, ranks, 0))
    style = f"{layer.style.value}, partial gradient" if layer.partial else layer.style.value
    part = "" if layer.style is Style.WHOLE else f"{own} of {whole}"
    return ExplainedLayer(layer.name, 1, kind, style, part, layer.reason)


def _through(blocks: Sequence[str]) -> str:
    last = f" to {blocks[-1]}" if len(blocks) > 1 else ""
    return f"{blocks[0]}{last}"


MOST = 3  # places that are named


def whole_share(model: nn.Module, found: FoundLayers, ranks: int) -> str:
    """A sentence with the share and the largest of the whole layers; "" if only norms and biases are whole."""
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
    """Warn once, on the first rank.

    Args:
        ranks: this rank's number along each axis.
    """
    if sentence and not any(ranks.values()):
        warnings.warn(sentence, WholeLayersWarning, stacklevel=2)
