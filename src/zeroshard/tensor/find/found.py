"""Split layers of a model: style and segments of each layer, and the sizes that modules have then.

`layers.find` makes it from shapes alone; `technique` applies it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.parts.place import Piece

MOST_REASONS = 3


class Style(StrEnum):
    """How the parameters of a module lie among the ranks."""

    COLUMN = "column"
    """A linear layer, split by its output features."""
    ROW = "row"
    """A linear layer, split by its input features; its output is a sum over the ranks, and its bias is whole."""
    EMBEDDING = "embedding"
    """An embedding, split by its rows, the vocabulary; its class may scale what it looks up (Gemma)."""
    OUTPUT = "output"
    """The output layer of a language model, split by its output features, the vocabulary."""
    HEADS = "heads"
    """An embedding [rows, H] with a column per attention head, split by columns: each rank looks up its own heads, so
    that the forward stays as it is (T5's relative positions)."""
    EXPERTS = "experts"
    """Stacked parameters [E, ...] of experts, split by the inner features of each expert."""
    WHOLE = "whole"
    """Not split: all ranks hold all of it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive features of a layer, divided among ranks on its own.

    Attributes:
        size: features in the whole layer.
        parts: number of parts of ⌈size / parts⌉; only in vocabularies may the last be smaller.
            Fewer than ranks: each part is on several neighbouring ranks (KV heads).
        ranks: [first, stop) of the ranks that divide it; None for all.
    """

    size: int
    parts: int
    ranks: tuple[int, int] | None = None

    def copies(self, ranks: int) -> int:
        """The number of ranks, of `ranks`, that hold each part."""
        first, stop = self.ranks or (0, ranks)
        return (stop - first) // self.parts

    def piece(self, rank: int, ranks: int) -> Piece:
        """The features of `rank` among `ranks`; [0, 0) for a rank without a part."""
        first, stop = self.ranks or (0, ranks)
        if not first <= rank < stop:
            return Piece(0, 0, counted=False)
        part, copy = divmod(rank - first, (stop - first) // self.parts)
        each = -(-self.size // self.parts)
        start, stop = min(part * each, self.size), min((part + 1) * each, self.size)
        return Piece(start, stop, counted=copy == 0)


def pieces_of(segments: Sequence[Segment], ranks: int, rank: int) -> Iterator[Piece]:
    """A rank's pieces of a layer's features, one for each segment; empty where the rank has no part."""
    first = 0
    for segment in segments:
        piece = segment.piece(rank, ranks)
        yield Piece(first + piece.start, first + piece.stop, piece.counted)
        first += segment.size


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """The cut of one parameter of a module of experts.

    Attributes:
        name: of the parameter.
        dimension: that is cut.
        segments: of this dimension; () for a bias that stays whole and is divided by the number of ranks.
    """

    name: str
    dimension: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A module with parameters of its own.

    Attributes:
        name: its path in the model.
        style: how it is split.
        segments: of its output features, input features (row) or vocabulary; () for a whole module.
        reason: why it is split so, or why it is whole: a short sentence.
        partial: whether it is whole but works on this rank's heads only, so that each rank has a part of its gradient
            even without sequence parallelism (norms of queries and keys).
        columns: of a row-parallel layer, the column-parallel ones whose output it reads.
        head_size: of a layer of attention, the features of a head; 0 of others.
        gathers: whether it is a norm over the features of all heads, which are gathered before it; a rank keeps
            `segments` of its output.
        shared: number of last output features that all heads read; their gradients are summed over the ranks.
        cuts: of each parameter of experts.
        sizes: attributes of experts to set.
    """

    name: str
    style: Style
    segments: tuple[Segment, ...]
    reason: str
    partial: bool = False
    columns: tuple[str, ...] = ()
    head_size: int = 0
    gathers: bool = False
    shared: int = 0
    cuts: tuple[ExpertCut, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    def segments_of(self, parameter: str) -> tuple[Segment, ...]:
        """The segments of one parameter of the module."""
        return next((cut.segments for cut in self.cuts if cut.name == parameter), self.segments)


@dataclass(frozen=True, slots=True)
class HeadArgument:
    """An argument of an attention module, made for all heads.

    Attributes:
        key: keyword, or position.
        dimension: 1 for [B, H, Q, K], 2 for [B, N, H, Q, K], 0 for [H, ...] and [B·H, ...].
        rows: whether dimension 0 is B·H.
    """

    key: str | int
    dimension: int
    rows: bool = False

    def heads_of(self, shape: Sequence[int], rows: int) -> int:
        """The number of heads in a tensor of this shape, for a batch of `rows`; 0 for another number of dimensions."""
        if len(shape) != 3 + self.dimension:
            return 0
        return shape[self.dimension] if self.dimension else shape[0] // (rows if self.rows else 1)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """A module whose forward depends on the number of heads, and mixes positions.

    Attributes:
        name: path of the module that holds the column-parallel layers, or of one inside.
        sizes: attributes to set on it, so that its own forward computes one rank's heads: numbers of heads and of
            their features, and its configuration with such numbers if the forward reads it.
        heads: number over all ranks.
        arguments: arguments that a rank cuts to its heads.
        narrow: whether its forward takes the features of a rank's heads from the width of its input.
        reuses: whether it reads keys and values of another module.
    """

    name: str
    sizes: Mapping[str, Any]
    heads: int = 0
    arguments: tuple[HeadArgument, ...] = ()
    narrow: bool = False
    reuses: bool = False


@dataclass(frozen=True, slots=True)
class FoundLayers:
    """The split of a model for a number of ranks.

    Attributes:
        layers: all modules with parameters of their own, in the model's order; none for one rank.
        attentions: the split attention modules.
        blocks: paths of the blocks that work on parts of sequences under sequence parallelism, in order; one tuple
            for each stack (T5 has an encoder and a decoder). Without sequence parallelism, the blocks of all stacks.
        whole_sequences: stacks whose blocks work on whole sequences despite sequence parallelism, by path, with the
            reason.
    """

    layers: tuple[FoundLayer, ...] = ()
    attentions: tuple[AttentionSizes, ...] = ()
    blocks: tuple[tuple[str, ...], ...] = ()
    whole_sequences: tuple[tuple[str, str], ...] = ()

    @property
    def splits(self) -> bool:
        """Whether any layer is split."""
        return any(layer.style is not Style.WHOLE for layer in self.layers)

    @property
    def adapted(self) -> bool:
        """Whether modules need more than sizes, so that a trial of the whole model is required."""
        of_layers = any(layer.gathers or layer.shared for layer in self.layers)
        return of_layers or any(each.arguments or each.narrow or each.reuses for each in self.attentions)


def check_splits(found: FoundLayers, model: str, ranks: int) -> None:
    """Refuse a model without a layer that can be split.

    Args:
        model: the name of its class.

    Raises:
        PlanError: with the reasons.
    """
    if found.splits:
        return
    whole = [f"{layer.name or model}: {layer.reason}" for layer in found.layers]
    more = f"; and {len(whole) - MOST_REASONS} more" if len(whole) > MOST_REASONS else ""
    raise PlanError(
        f"tensor_parallel={ranks} splits nothing of {model}, so that all ranks of a group would do the same work "
        f"({'; '.join(whole[:MOST_REASONS])}{more}). Leave tensor_parallel out; or, where no layers were found, name a "
        f"linear layer and the one that reads its output: TensorParallel({ranks}, layers={{path: 'column', path: "
        f"'row'}})."
    )


def refuse_copies(found: FoundLayers, ranks: int) -> None:
    """Refuse copies of features on several ranks under 8-bit moments, whose blocks differ between the ranks.

    Raises:
        PlanError: with the layer's name.
    """
    for layer in found.layers:
        if layer.style is Style.COLUMN and any(segment.copies(ranks) > 1 for segment in layer.segments):
            raise PlanError(
                f"offload.moments='8bit' and tensor_parallel={ranks} do not combine here: {layer.name!r} has features "
                f"that several ranks hold (fewer key-value heads than ranks), and moments are rounded in blocks with "
                f"unlike neighbours on each, so that the copies would drift apart. Set moments='bf16', or split layers "
                f"over no more ranks than there are key-value heads."
            )


def refuse_ignored(name: str, why: str) -> None:
    """Refuse an ignored parameter that a rank would have a part of, or a part of its gradient.

    Args:
        why: "split", of a layer that is split with others; "apart", of one whose gradient is a part; else "".

    Raises:
        PlanError: with the parameter's name.
    """
    if why == "split":
        raise PlanError(
            f"The plan ignores {name!r}, and tensor_parallel splits its layer with the layers around it. Leave it out "
            f"of ignored and freeze it with requires_grad_(False); or leave these layers whole: "
            f"TensorParallel(..., layers={{...: 'whole'}})."
        )
    if why == "apart":
        raise PlanError(
            f"The plan ignores {name!r}, which requires a gradient and works on this rank's own positions or features, "
            f"so that each tensor rank would make a part of its gradient. Outside of split layers gradients are whole "
            f"under TensorParallel(..., sequence=False); or freeze it with requires_grad_(False), or leave it out of "
            f"ignored."
        )
