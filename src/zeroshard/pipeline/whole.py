"""The model in one stage: the stage of a model that is not cut."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.place import Axis, Cuts
from zeroshard.parts.planned import Planned
from zeroshard.parts.technique import Technique
from zeroshard.pipeline.cut.chain import Layer
from zeroshard.pipeline.policy import Cut
from zeroshard.schedule import PipelineSchedule
from zeroshard.units import Unit, find_units
from zeroshard.units.materialise import take_from_rank_0

Replaced = tuple[Cuts, dict[nn.Parameter, nn.Parameter]]


def replaced(model: nn.Module, technique: Technique, axes: Mapping[str, Axis]) -> Replaced:
    """Let a technique cut a model.

    Returns:
        what it says of parameters; and of each that is gone the one that took its place, by name.
    """
    before = dict(model.named_parameters())
    cuts = technique.cut(model, axes)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    return cuts, {parameter: after[name] for name, parameter in before.items() if after[name] is not parameter}


DtypeOf = Callable[[nn.Parameter], torch.dtype]


class WholeModel:
    """The model in one stage, which is on every rank; attributes and methods are those of `Stage`."""

    number, is_last, versions, borrowed_versions, ranks_per_data_rank = 0, True, 1, 1, 1
    called = ""
    facts: ClassVar[list[Any]] = [1, 1, None]
    layers: tuple[Layer, ...] = ()
    split: tuple[str, ...] = ()
    pipeline: PipelineSchedule | None = None

    def __init__(self, model: nn.Module, cut: Cut, mesh: Mesh) -> None:
        self._model, self._cut, self.mesh, self.world = model, cut, mesh, Comm(mesh)
        self.skipped_modules: set[nn.Module] = set()
        self._alike = False  # whether all ranks have rank 0's values

    @property
    def units(self) -> list[Unit]:
        """The units of the model."""
        return find_units(self._model, self._cut.units)

    def blocks(self) -> list[tuple[nn.Module, int]]:
        """The modules of all units but the root's, with the numbers of these units."""
        return [(unit.module, unit.number) for unit in self.units if unit.name]

    @property
    def data_ranks(self) -> int:
        """One per rank, or for several that work together."""
        return self.mesh.ranks // self._cut.together

    @property
    def data_rank(self) -> int:
        """This rank's own, or theirs."""
        return self.mesh.rank // self._cut.together

    @property
    def parts(self) -> list[list[int]]:
        """All ranks."""
        return [list(range(self.mesh.ranks))]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter is in a unit."""
        return {}

    def cut(self, technique: Technique, axes: Mapping[str, Axis]) -> Replaced:
        """Let a technique put parts in the place of parameters, which are rank 0's before the first does.

        Those on the meta device get their values later, by their names.
        """
        if not self._alike:
            take_from_rank_0(self._model, self.world)
        self._alike = True
        return replaced(self._model, technique, axes)

    def stage_of_buffer(self, module: nn.Module, name: str) -> int:
        """There is one stage."""
        return 0

    def copy_of(self, stage: int) -> int:
        """Each rank has buffers of its own."""
        return self.mesh.rank

    def is_elsewhere(self, module: nn.Module) -> bool:
        """Nothing is."""
        return False

    def let_go(
        self, units: list[Unit], real: Callable[[nn.Parameter], nn.Parameter], dtype: DtypeOf, ledger: Ledger
    ) -> None:
        """There is nothing to let go of, nor to borrow."""

    def gathered_at_once(self, sizes: Sequence[int]) -> tuple[int, str]:
        """Of units of these sizes that are gathered for use, what is here together at least, and in words."""
        return sum(sorted(sizes[:-1])[-2:]) + sizes[-1], "two units at a time and the root"

    def planned(self) -> Iterator[Planned]:
        """Nothing is borrowed."""
        yield from ()
