"""The place of a flat among the ranks: named axes of the mesh, and the meaning of each for its weights.

An axis is a partition of all ranks into groups; it need not be a dimension of a rectangle, since stages may have unlike
numbers of replicas, and the axes of experts are not those of dense layers.

[Note: parts as boxes] A parameter may be a part of a larger tensor: a few pieces of it, cut along one dimension and
laid one after the other. A run of the elements of such a part is a few boxes of the larger tensor, whose values are
strided views of the run: at most 2 * dimensions - 1 for each piece. Norms, checkpoints and gradients that are shown to
others all go through these boxes (`boxes_of`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from zeroshard.checkpoint.boxes import Box, BoxValues, cut
from zeroshard.comm.collectives import Comm


@dataclass(frozen=True, slots=True)
class Axis:
    """A partition of the ranks, and this rank's group in it.

    Attributes:
        name: such as "slices" or "tensor".
        groups: the ranks of the world in each group; every rank is in one.
        comm: the collectives of this rank's group.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    comm: Comm

    @property
    def size(self) -> int:
        """Ranks in this rank's group."""
        return self.comm.mesh.ranks

    @property
    def rank(self) -> int:
        """This rank in its group."""
        return self.comm.mesh.rank


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a flat's parameters.

    Attributes:
        slices: ranks among which the flat is cut into even slices.
        owners: ranks that hold the same parameters, sliced or whole; their rank 0 gives the initial values.
        copies: ranks that hold the same slice and work on other data, so that their gradients are averaged (hybrid
            sharding: MiCS, 2205.00119; hpZ of ZeRO++, 2306.10209); None where there is one.
        twins: ranks that hold the same slice and work on the same data; None where there is one.
        divisor: of the sum of gradients over `slices`, so that it is with the mean over `copies` one over the data
            ranks behind the loss; never the length of the slice.
        counted: whether this rank counts the slice in norms and writes it to checkpoints: one of those that hold it.
    """

    slices: Axis
    owners: Axis
    copies: Axis | None
    twins: Axis | None
    divisor: int
    counted: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a split dimension: elements [start, stop) of the whole tensor.

    Attributes:
        counted: whether this rank counts it in norms and writes it to checkpoints: one of those that hold it.
    """

    start: int
    stop: int
    counted: bool = True

    @property
    def length(self) -> int:
        """Elements along the dimension."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter that is a part of a larger tensor; other ranks hold the other parts.

    Attributes:
        axis: over which it is split, by name.
        shape: of the whole tensor.
        dimension: along which it is cut.
        pieces: those that this rank holds, which lie one after the other in the parameter, along that dimension.
        by_rank: those of each rank of the axis, for a technique that allows updates of assembled whole matrices; empty
            for others.
    """

    axis: str
    shape: tuple[int, ...]
    dimension: int
    pieces: tuple[Piece, ...]
    by_rank: tuple[tuple[Piece, ...], ...] = ()

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        length = sum(piece.length for piece in self.pieces)
        return (*self.shape[: self.dimension], length, *self.shape[self.dimension + 1 :])

    @property
    def counted(self) -> bool:
        """Whether this rank counts all of it."""
        return all(piece.counted for piece in self.pieces)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of the whole tensor."""
        runs = [whole.narrow(self.dimension, piece.start, piece.length) for piece in self.pieces]
        return torch.cat(runs or [whole.narrow(self.dimension, 0, 0)], self.dimension)

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's part to its places in the whole tensor."""
        for first, piece in self.placed:
            here = part.narrow(self.dimension, first, piece.length)
            whole.narrow(self.dimension, piece.start, piece.length).copy_(here)

    @property
    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Each piece, with its first element along the dimension in the parameter."""
        return zip(accumulate((piece.length for piece in self.pieces), initial=0), self.pieces, strict=False)


@dataclass(frozen=True, slots=True)
class Partial:
    """A parameter that all ranks of an axis hold whole, each with a partial gradient; the partial gradients add up.

    Attributes:
        axis: by name.
    """

    axis: str


Cuts = Mapping[nn.Parameter, Split | Partial]  # by techniques, of a model's parameters


@dataclass(frozen=True, slots=True)
class PlaceKind:
    """The kind of a parameter's place: dense, split over an axis, or partial over one.

    Attributes:
        axis: None for a dense one.
        partial: whether it is held whole, with gradients that add up over the axis.
    """

    axis: str | None = None
    partial: bool = False

    @classmethod
    def of(cls, cut: Split | Partial | None) -> "PlaceKind":
        """The kind of a parameter that a technique has cut, or of a dense one."""
        return DENSE if cut is None else cls(cut.axis, isinstance(cut, Partial))

    def __str__(self) -> str:
        """In labels of flats and axes; empty for dense parameters."""
        return f"partial {self.axis}" if self.partial else self.axis or ""


DENSE = PlaceKind()


def boxes_of(
    shape: Sequence[int], split: Split | None, first: int, values: torch.Tensor
) -> Iterator[tuple[BoxValues, bool]]:
    """A run of a parameter's elements as boxes of the whole tensor ([Note: parts as boxes]).

    Args:
        shape: of the parameter.
        split: which part of a larger tensor it is; None for all of it.
        first: the first element of the run, in the row-major order of the parameter.
        values: of the run (1-D).

    Returns:
        the boxes with views of their values, each with whether this rank counts it.
    """
    at = 0
    for run in cut(Box.whole(tuple(shape)), first, first + values.numel()):
        inside = values[at : at + run.numel].view(run.shape)
        at += run.numel
        if split is None:
            yield BoxValues(run, inside), True
            continue
        along, low = split.dimension, run.start[split.dimension]
        for origin, piece in split.placed:
            begin, end = max(low, origin), min(low + run.shape[along], origin + piece.length)
            if begin < end:
                start, lengths = list(run.start), list(run.shape)
                start[along], lengths[along] = piece.start + begin - origin, end - begin
                box = Box(tuple(start), tuple(lengths))
                yield BoxValues(box, inside.narrow(along, begin - low, end - begin)), piece.counted
