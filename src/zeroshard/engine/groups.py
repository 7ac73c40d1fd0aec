"""Which ranks speak with which: all of them, those that slice among themselves, and those that hold the same slice.

Hybrid sharding (MiCS, 2205.00119; hpZ of ZeRO++, 2306.10209): slices inside groups of neighbours, whose links are fast,
and copies of them from group to group. Gradients are summed inside a group as often as the plan says, and over the
groups once per step, a slice each.
"""

from dataclasses import dataclass

from zeroshard.comm import Comm
from zeroshard.errors import PlanError
from zeroshard.mesh import part_of
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import Whole
from zeroshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank.

    Attributes:
        world: all ranks that train.
        alike: those that have the same parameters: the replicas of a stage.
        slices: those among which each flat buffer is sliced.
        replicas: those that hold the same slice as this rank, one in each group; None where there is one group.
    """

    world: Comm
    alike: Comm
    slices: Comm
    replicas: Comm | None = None

    @classmethod
    def of(cls, plan: Plan, stage: Stage | Whole) -> "Groups":
        """The groups that a plan asks for; a collective call.

        Raises:
            PlanError: the ranks do not divide into groups.
        """
        world, mesh = stage.world, stage.mesh
        alike = world if mesh is world.mesh else Comm(mesh)
        size = plan.shard_ranks or mesh.ranks
        for members in stage.parts:
            if plan.shard_ranks and len(members) % size:
                raise PlanError(
                    f"{len(members)} ranks{stage.called} do not divide into groups of shard_ranks={size}; start a "
                    f"multiple of {size} ranks{stage.called}."
                )
        if size == mesh.ranks:
            return cls(world, alike, alike)
        blocks = [range(first, first + size) for first in range(0, mesh.ranks, size)]
        strides = [range(place, mesh.ranks, size) for place in range(size)]
        return cls(world, alike, Comm(part_of(mesh, blocks, "slices")), Comm(part_of(mesh, strides, "replicas")))

    @property
    def all(self) -> list[Comm]:
        """Each group once."""
        return list(dict.fromkeys(comm for comm in (self.slices, self.world, self.alike, self.replicas) if comm))
