"""What is found in a model: which layers are split and how, and which sizes its modules have then.

`find_layers.find` makes it from shapes alone; `technique` carries it out.
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
    WHOLE = "whole"
    """Not split: all ranks hold all of it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a layer's features that is divided among ranks by itself.

    Attributes:
        size: features in the whole layer.
        parts: into how many parts of ⌈size / parts⌉ it is divided; only of vocabularies may the last be smaller.
            Fewer than ranks: each part is on several neighbouring ranks (KV heads).
        ranks: the first of the ranks among which it is divided, and the one behind the last; None for all.
    """

    size: int
    parts: int
    ranks: tuple[int, int] | None = None

    def copies(self, ranks: int) -> int:
        """On how many of so many ranks each part is."""
        first, stop = self.ranks or (0, ranks)
        return (stop - first) // self.parts

    def piece(self, rank: int, ranks: int) -> Piece:
        """The features of a rank of so many; none, [0, 0), for one that has no part in it."""
        first, stop = self.ranks or (0, ranks)
        if not first <= rank < stop:
            return Piece(0, 0, counted=False)
        part, copy = divmod(rank - first, (stop - first) // self.parts)
        each = -(-self.size // self.parts)
        start, stop = min(part * each, self.size), min((part + 1) * each, self.size)
        return Piece(start, stop, counted=copy == 0)


def pieces_of(segments: Sequence[Segment], ranks: int, rank: int) -> Iterator[Piece]:
    """What a rank holds of the features of a layer: a piece of each segment, which is empty where it has no part."""
    first = 0
    for segment in segments:
        piece = segment.piece(rank, ranks)
        yield Piece(first + piece.start, first + piece.stop, piece.counted)
        first += segment.size


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A module with parameters of its own.

    Attributes:
        name: its path in the model.
        style: how it is split.
        segments: of its output features, input features (row) or vocabulary; () for a whole module.
        reason: why it is split so, or why it is whole: a short sentence.
        partial: whether it is whole, and works on the heads of its rank alone, so that each rank has a part of its
            gradient even without sequence parallelism (norms of queries and keys).
        columns: of a row-parallel layer, the column-parallel ones whose output it reads.
        head_size: of a layer of attention, the features of a head; 0 of others.
        gathers: whether it is a norm over the features of all heads, which are gathered before it; `segments` are those
            that a rank keeps.
        shared: the last features of its output that all heads read, so that their gradients are summed over the ranks.
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


@dataclass(frozen=True, slots=True)
class HeadArgument:
    """An argument of an attention module that is made for all heads.

    Attributes:
        key: its name, or its number among those without a name.
        dimension: 1 for [B, H, ...], 0 for [H, ...] and [B·H, ...].
        rows: whether dimension 0 has those of all rows.
    """

    key: str | int
    dimension: int
    rows: bool = False

    def heads_of(self, shape: Sequence[int], rows: int) -> int:
        """The heads that a tensor has, for a batch of so many rows; 0 if it is of another kind."""
        if len(shape) != (4 if self.dimension else 3):
            return 0
        return shape[1] if self.dimension else shape[0] // (rows if self.rows else 1)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """A module whose forward depends on the number of heads, and mixes positions.

    Attributes:
        name: its path; the module that holds the column-parallel layers, or one inside of it.
        sizes: attributes to set on it, so that its own forward computes the heads of one rank: numbers of heads and of
            their features, and its configuration with such numbers where the forward reads that.
        heads: of all ranks.
        arguments: those of which a rank reads its heads' part.
        narrow: whether its forward reads the features of a rank's heads off the width of its input.
        reuses: whether it reads keys and values that another module has made.
    """

    name: str
    sizes: Mapping[str, Any]
    heads: int = 0
    arguments: tuple[HeadArgument, ...] = ()
    narrow: bool = False
    reuses: bool = False


@dataclass(frozen=True, slots=True)
class FoundLayers:
    """What is found in a model for so many ranks.

    Attributes:
        layers: all modules with parameters of their own, in the model's order; none for one rank.
        attentions: those that are split.
        blocks: paths of the blocks that work on parts of sequences under sequence parallelism, in their order; one
            tuple for each stack (T5 has an encoder and a decoder). Without sequence parallelism, those of all stacks.
        whole_sequences: stacks whose blocks work on whole sequences although sequence parallelism is on, by path, with
            the reason.
    """

    layers: tuple[FoundLayer, ...] = ()
    attentions: tuple[AttentionSizes, ...] = ()
    blocks: tuple[tuple[str, ...], ...] = ()
    whole_sequences: tuple[tuple[str, str], ...] = ()

    @property
    def splits(self) -> bool:
        """Whether anything is split."""
        return any(layer.style is not Style.WHOLE for layer in self.layers)

    @property
    def adapted(self) -> bool:
        """Whether a trial of the whole model must show that it is right: modules need more than sizes."""
        of_layers = any(layer.gathers or layer.shared for layer in self.layers)
        return of_layers or any(each.arguments or each.narrow or each.reuses for each in self.attentions)


def check_splits(found: FoundLayers, model: str, ranks: int) -> None:
    """Refuse to split a model of which nothing can be split.

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
        f"({'; '.join(whole[:MOST_REASONS])}{more}). Leave tensor_parallel out, or name layers: "
        f"TensorParallel({ranks}, layers={{path: 'column', path: 'row'}})."
    )


def refuse_copies(found: FoundLayers, ranks: int) -> None:
    """Refuse features that several ranks hold where each rank would round their moments beside others.

    Raises:
        PlanError: naming the layer.
    """
    for layer in found.layers:
        if layer.style is Style.COLUMN and any(segment.copies(ranks) > 1 for segment in layer.segments):
            raise PlanError(
                f"offload.moments='8bit' and tensor_parallel={ranks} do not combine here: {layer.name!r} has features "
                f"that several ranks hold (fewer key-value heads than ranks), and moments are rounded in blocks with "
                f"unlike neighbours on each, so that the copies would drift apart. Set moments='bf16', or split layers "
                f"over no more ranks than there are key-value heads."
            )
