"""The axes of the ranks under a plan: stages, data ranks cut into slices and copies, and those of techniques.

A rank's coordinates are its place in the group of each axis. Ranks hold the same dense parameters if they are of one
stage; they work on the same data if they differ in axes alone that are no data axes (tensor parallelism).
"""

import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import part_of
from zeroshard.errors import PlanError
from zeroshard.parts.place import Axis, Place
from zeroshard.parts.technique import NewAxis, Technique, ranks_together
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel

Partition = list[list[int]]  # of the ranks of a stage


class Axes:
    """The axes of one engine; making it is a collective call.

    Args:
        shard_group: ranks that slice among themselves; all that work on different data by default.

    Attributes:
        world: all ranks that train.
        alike: those of this rank's stage, which agree on each step.
        new: the axes of techniques, by name.
        data_ranks: how many batches make up a step; `data_rank` is this rank's.

    Raises:
        PlanError: the ranks do not divide as they should.
    """

    def __init__(
        self, stage: Stage | WholeModel, shard_group: int | None, techniques: Sequence[Technique] = ()
    ) -> None:
        self._stage, self._shard_group, self._techniques = stage, shard_group, techniques
        self.world = stage.world
        self.alike = self.world if stage.mesh is stage.world.mesh else Comm(stage.mesh)
        self._known: dict[str, Axis] = {}
        self.new: dict[str, Axis] = {}
        for members in stage.parts:
            self._check(members)
        for name in self._new(stage.mesh.ranks):
            self.new[name] = self._axis(name, partial(self._groups_of, name))
        self._places: dict[str | None, Place] = {}
        self.dense = self.place(None)

    @property
    def data_ranks(self) -> int:
        """Batches of a step."""
        return self._stage.data_ranks

    @property
    def data_rank(self) -> int:
        """This rank's batch."""
        return self._stage.data_rank

    def place(self, split: str | None) -> Place:
        """The place of parameters that are split over an axis, or of dense ones."""
        if split not in self._places:
            self._places[split] = self._place(split)
        return self._places[split]

    @property
    def all(self) -> list[Comm]:
        """The collectives of each group of this rank, once."""
        return list(dict.fromkeys([self.world, self.alike, *(axis.comm for axis in self._known.values())]))

    def begin(self) -> None:
        """Training begins; from here on, ranks that do the same have the same digests."""
        for comm in self.all:
            comm.digests = dict.fromkeys(comm.digests, 0)

    @property
    def digests(self) -> tuple[int, int]:
        """Checksums of this rank's gathers and reductions so far in all axes, equal on ranks that did the same."""
        comms = dict.fromkeys(axis.comm for axis in self._known.values())
        gathers, reductions = ([comm.digests[kind] for comm in comms] for kind in ("gather", "reduce"))
        return _joined(gathers), _joined(reductions)

    @property
    def named(self) -> list[Axis]:
        """All axes, in the same order on all ranks."""
        return list(self._known.values())

    def _place(self, split: str | None) -> Place:
        ranks = self._stage.mesh.ranks
        label = "" if split is None else f" of {split}"
        owners = self._axis(f"owners{label}", lambda n: self._owners(n, split))
        slices = self._axis(f"slices{label}", lambda n: self._slices(n, split))
        copies = self._axis(f"replicas{label}", lambda n: self._copies(n, split))
        twins = self._axis(f"twins{label}", lambda n: self._twins(n, split))
        data_ranks = ranks // ranks_together(self._techniques, ranks)
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

    def _coordinates(self, ranks: int, split: str | None) -> list[tuple[int, ...]]:
        """Of each rank of a stage: its places in the axes that tell parameters or data of this kind apart."""
        new = self._new(ranks)
        names = [name for name, axis in new.items() if name == split or not axis.data]
        return [tuple(_coordinate(new[name], rank) for name in names) for rank in range(ranks)]

    def _on_same_data(self, ranks: int) -> Partition:
        """The ranks that work on the same data."""
        dense = _by(self._coordinates(ranks, None))
        return [list(column) for column in zip(*dense, strict=True)]

    def _owners(self, ranks: int, split: str | None) -> Partition:
        if split is None:
            return [list(range(ranks))]
        return _by([(_coordinate(self._new(ranks)[split], rank),) for rank in range(ranks)])

    def _slices(self, ranks: int, split: str | None) -> Partition:
        groups = _by(self._coordinates(ranks, split))
        size = min(self._shard_group or len(groups[0]), len(groups[0]))
        return [group[first : first + size] for group in groups for first in range(0, len(group), size)]

    def _copies(self, ranks: int, split: str | None) -> Partition:
        """Equal places of the slice groups over the same coordinates."""
        groups = _by(self._coordinates(ranks, split))
        size = min(self._shard_group or len(groups[0]), len(groups[0]))
        return [group[place::size] for group in groups for place in range(size)]

    def _twins(self, ranks: int, split: str | None) -> Partition:
        """Of ranks on the same data, those with the same part."""
        new, twins = self._new(ranks), []
        for members in self._on_same_data(ranks):
            mine = [() if split is None else (_coordinate(new[split], rank),) for rank in members]
            twins += [[members[n] for n in group] for group in _by(mine)]
        return twins

    def _axis(self, name: str, of: Callable[[int], Partition]) -> Axis:
        """An axis from the partition of a stage of so many ranks; a collective call, unless its groups are known."""
        stage, mesh = self._stage, self._stage.mesh
        local = of(mesh.ranks)
        groups = tuple(tuple(members[r] for r in group) for members in stage.parts for group in of(len(members)))
        known = next((axis for axis in self._known.values() if axis.groups == groups), None)
        if known is not None:
            comm = known.comm
        elif len(local) == 1:
            comm = self.alike
        else:
            comm = Comm(part_of(mesh, local, name))
        axis = Axis(name, groups, comm)
        self._known[name] = axis
        return axis

    def _check(self, members: Sequence[int]) -> None:
        size, data_ranks = self._shard_group, len(members) // ranks_together(self._techniques, len(members))
        if size and data_ranks % size:
            raise PlanError(
                f"{data_ranks} ranks{self._stage.called} do not divide into groups of shard_group={size}; start a "
                f"multiple of {size} ranks{self._stage.called}."
            )


def _joined(checksums: list[int]) -> int:
    return checksums[0] if len(checksums) == 1 else zlib.crc32(struct.pack(f"<{len(checksums)}I", *checksums))


def _coordinate(axis: NewAxis, rank: int) -> int:
    return next(list(group).index(rank) for group in axis.groups if rank in group)


def _by(keys: Sequence[tuple[int, ...]]) -> Partition:
    """The places of equal keys, in the order of the keys."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return [found[key] for key in sorted(found)]
