"""The axes of the ranks under a plan: stages, data ranks cut into slices and copies, and those of techniques.

A rank's coordinates are its place in the group of each axis. Ranks hold the same dense parameters if they are of one
stage; they work on the same data if they differ in axes alone that are no data axes (tensor parallelism).

[Note: PTD-P] Pipeline, tensor and data parallelism in one mesh (2104.04473, section 3): stages are the outermost axis,
tensor ranks neighbours, and data ranks the rest of a stage, cut into copies and slices.
"""

import math
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Protocol

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh, beside, part_of
from zeroshard.errors import PlanError
from zeroshard.parts.place import DENSE, Axis, Place, PlaceKind
from zeroshard.parts.technique import NewAxis, Technique, ranks_together

Partition = list[list[int]]  # of the ranks of a stage
Groups = tuple[tuple[int, ...], ...]  # of the ranks of all stages


class StageRanks(Protocol):
    """The ranks of a model, or of the stages that it is cut into."""

    @property
    def world(self) -> Comm:
        """All ranks of the job."""

    @property
    def mesh(self) -> Mesh:
        """The ranks of this rank's stage."""

    @property
    def parts(self) -> list[list[int]]:
        """The ranks of each stage."""

    @property
    def data_ranks(self) -> int:
        """Number of batches in a step."""

    @property
    def data_rank(self) -> int:
        """The number of this rank's batch."""

    @property
    def called(self) -> str:
        """The phrase for the ranks of a stage in error messages."""


class Axes:
    """The axes of one engine; making it is a collective call.

    Args:
        shard_group: number of ranks that slice among themselves; by default all that work on different data.

    Attributes:
        world: all ranks that train.
        alike: the ranks of this rank's stage, which agree on each step.
        new: the axes of techniques, by name.
        new_groups: the ranks of the stage in the groups of each of them.
        data_ranks: how many batches make up a step; `data_rank` is this rank's.

    Raises:
        PlanError: the ranks do not divide as they should.
    """

    def __init__(self, stage: StageRanks, shard_group: int | None, techniques: Sequence[Technique] = ()) -> None:
        self._stage, self._size, self._techniques = stage, shard_group, techniques
        self.world = stage.world
        mesh, everyone = stage.mesh, stage.world.mesh
        self.alike = self.world if mesh is everyone else Comm(mesh)
        self._known: dict[str, Axis] = {}
        self._comms: dict[tuple[Groups, str], Comm] = {}  # of groups that are alike, one for each name of its own
        self.new: dict[str, Axis] = {}
        for members in stage.parts:
            self._check(members)
        new = self._new(stage.mesh.ranks)
        for name, axis in new.items():  # traffic of data axes interleaves with reductions of the same ranks
            self.new[name] = self._axis(name, partial(self._groups_of, name), own=axis.data)
        self.new_groups = [self._groups_of(name, stage.mesh.ranks) for name in new]
        kinds = [DENSE, *map(PlaceKind, new), *(PlaceKind(name, True) for name, axis in new.items() if not axis.data)]
        self._places = {kind: self._place(kind) for kind in kinds}
        self.dense = self.place(DENSE)

    @property
    def data_ranks(self) -> int:
        """Number of batches in a step."""
        return self._stage.data_ranks

    @property
    def data_rank(self) -> int:
        """The number of this rank's batch."""
        return self._stage.data_rank

    def place(self, kind: PlaceKind) -> Place:
        """The place of parameters of a kind."""
        return self._places[kind]

    @property
    def all(self) -> list[Comm]:
        """The collectives of each group of this rank, once."""
        return list(dict.fromkeys([self.world, self.alike, *(axis.comm for axis in self._known.values())]))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count collectives inside of layers as those of an evaluation."""
        for comm in self.all:
            comm.evaluates = True
        try:
            yield
        finally:
            for comm in self.all:
                comm.evaluates = False

    def begin(self) -> None:
        """Begin training: digests start at 0 on all ranks."""
        for comm in self.all:
            comm.digests = dict.fromkeys(comm.digests, 0)

    @property
    def digests(self) -> tuple[int, ...]:
        """Checksums of this rank's gathers and reductions so far, equal on ranks that did the same.

        The first two are of units, over all other axes. One for each of the axes in `new` follows: its ranks call
        layers together, whose branches may be others in another of its groups.
        """
        inside = [axis.comm for axis in self.new.values()]
        comms = [comm for comm in dict.fromkeys(axis.comm for axis in self._known.values()) if comm not in inside]
        gathers, reductions = ([comm.digests[kind] for comm in comms] for kind in ("gather", "reduce"))
        return _joined(gathers), _joined(reductions), *(_joined([*comm.digests.values()]) for comm in inside)

    @property
    def same_data(self) -> Partition:
        """The ranks of the stage, grouped by the data that they work on."""
        return self._on_same_data(self._stage.mesh.ranks)

    @property
    def named(self) -> list[Axis]:
        """All axes, in the same order on all ranks."""
        return list(self._known.values())

    def _place(self, kind: PlaceKind) -> Place:
        ranks, label = self._stage.mesh.ranks, f" of {kind}" if str(kind) else ""
        owners = self._axis(f"owners{label}", partial(self._owners, kind))
        apart = kind.partial or (kind.axis is not None and self._new(ranks)[kind.axis].data)  # may share memory
        slices = self._axis(f"slices{label}", partial(self._slices, kind), apart)
        copies = self._axis(f"replicas{label}", partial(self._copies, kind))
        twins = self._axis(f"twins{label}", partial(self._twins, kind))
        data_ranks = ranks // ranks_together(self._techniques, ranks)
        if data_ranks % copies.size:
            raise PlanError(
                f"shard_group={self._size} makes {copies.size} copies of each slice{label}, and there are {data_ranks} "
                f"data ranks{self._stage.called}. Leave shard_group out."
            )
        return Place(
            slices,
            owners,
            copies if copies.size > 1 else None,
            twins if twins.size > 1 else None,
            divisor=data_ranks // copies.size,
            counted=copies.rank == 0 and twins.rank == 0,
        )

    def _new(self, ranks: int) -> dict[str, NewAxis]:
        return {name: axis for technique in self._techniques for name, axis in technique.axes(ranks).items()}

    def _groups_of(self, name: str, ranks: int) -> Partition:
        return [list(group) for group in self._new(ranks)[name].groups]

    def _coordinates(self, kind: PlaceKind, ranks: int) -> list[tuple[int, ...]]:
        """Of each rank of a stage: its places in the axes that distinguish slices or data of this kind."""
        new = self._new(ranks)
        dense = [name for name, axis in new.items() if not axis.data and name != kind.axis]
        names = dense if kind.axis is None or kind.partial else [*dense, kind.axis]
        if kind.axis is not None and new[kind.axis].data:
            names = [kind.axis]  # ranks that split other layers have tokens of their own there
        places = [_places_in(new[name]) for name in names]
        return [tuple(of[rank] for of in places) for rank in range(ranks)]

    def _on_same_data(self, ranks: int) -> Partition:
        """The ranks, grouped by the data that they work on."""
        dense = _by(self._coordinates(DENSE, ranks))
        return [list(column) for column in zip(*dense, strict=True)]

    def _owners(self, kind: PlaceKind, ranks: int) -> Partition:
        if kind.axis is None or kind.partial:
            return [list(range(ranks))]
        places = _places_in(self._new(ranks)[kind.axis])
        return _by([(places[rank],) for rank in range(ranks)])

    def _sliced(self, kind: PlaceKind, ranks: int) -> list[Partition]:
        """The slice groups over the same coordinates, for each of these.

        Gradients that are partial over an axis add up over it and over data ranks at once, in one group.
        """
        found = []
        for group in map(set, _by(self._coordinates(kind, ranks))):
            columns = self._on_same_data(ranks) if kind.partial else [[rank] for rank in sorted(group)]
            together = [mine for column in columns if (mine := [rank for rank in column if rank in group])]
            size = math.gcd(self._size or 0, len(together))
            cuts = range(0, len(together), size)
            found.append([sorted(chain.from_iterable(together[first : first + size])) for first in cuts])
        return found

    def _slices(self, kind: PlaceKind, ranks: int) -> Partition:
        return [group for groups in self._sliced(kind, ranks) for group in groups]

    def _copies(self, kind: PlaceKind, ranks: int) -> Partition:
        """Equal places of the slice groups over the same coordinates."""
        return [list(place) for groups in self._sliced(kind, ranks) for place in zip(*groups, strict=True)]

    def _twins(self, kind: PlaceKind, ranks: int) -> Partition:
        """Among ranks on the same data, groups that hold the same part or slice."""
        if kind.axis is not None and self._new(ranks)[kind.axis].data:
            return [[rank] for rank in range(ranks)]
        twins: Partition = []
        places = dict.fromkeys(range(ranks), 0) if kind.axis is None else _places_in(self._new(ranks)[kind.axis])
        for members in self._on_same_data(ranks):
            twins += [[members[n] for n in group] for group in _by([(places[rank],) for rank in members])]
        return twins

    def _axis(self, name: str, of: Callable[[int], Partition], apart: bool = False, own: bool = False) -> Axis:
        """An axis from the partition of a stage of so many ranks; a collective call, unless its groups are known.

        Args:
            apart: give its collectives a `Comm` of their own, even if another axis has the same groups.
            own: give them process groups of their own too.
        """
        stage, mesh = self._stage, self._stage.mesh
        local = of(mesh.ranks)
        groups = tuple(tuple(members[r] for r in group) for members in stage.parts for group in of(len(members)))
        key = groups, name if own else ""
        if key not in self._comms:
            self._comms[key] = self.alike if len(local) == 1 and not own else Comm(part_of(mesh, local, name))
        comm = self._comms[key]
        axis = Axis(name, groups, Comm(beside(comm.mesh, name)) if apart else comm)
        self._known[name] = axis
        return axis

    def _check(self, members: Sequence[int]) -> None:
        size, data_ranks = self._size, len(members) // ranks_together(self._techniques, len(members))
        if size and data_ranks % size:
            raise PlanError(
                f"{data_ranks} ranks{self._stage.called} do not divide into groups of shard_group={size}; start a "
                f"multiple of {size} ranks{self._stage.called}."
            )


def _joined(checksums: list[int]) -> int:
    return checksums[0] if len(checksums) == 1 else zlib.crc32(struct.pack(f"<{len(checksums)}I", *checksums))


def _places_in(axis: NewAxis) -> dict[int, int]:
    """The position of each rank of a stage in its group."""
    return {rank: place for group in axis.groups for place, rank in enumerate(group)}


def _by(keys: Sequence[tuple[int, ...]]) -> Partition:
    """The positions of equal keys, in the order of the keys."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return [found[key] for key in sorted(found)]
