"""Where a flat lies among the ranks: named axes of the mesh, and what each of them means for its weights.

An axis is a partition of all ranks into groups; it need not be a dimension of a rectangle, since stages may have unlike
numbers of replicas, and the axes of experts are not those of dense layers.
"""

from dataclasses import dataclass

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
        owners: ranks that hold the same parameters, sliced or whole; rank 0 of them gives the initial ones.
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


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter that is a part of a larger tensor, whose other parts other ranks hold.

    Attributes:
        axis: over which it is split, by name.
        shape: of the whole tensor.
        dimension: along which it is cut.
        pieces: those that this rank holds, which lie one after the other in the parameter, along that dimension.
    """

    axis: str
    shape: tuple[int, ...]
    dimension: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """A parameter that all ranks of an axis hold whole, and of whose gradient each has a part: the parts add up.

    Attributes:
        axis: by name.
    """

    axis: str
