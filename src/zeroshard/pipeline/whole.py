"""The model in one stage: the stage of a model that is not cut."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.parts.place import Axis, Cuts
from zeroshard.parts.planned import Planned
from zeroshard.parts.technique import Technique
from zeroshard.pipeline.cut.layers import Layer
from zeroshard.pipeline.policy import Cut
from zeroshard.schedule import PipelineSchedule
from zeroshard.units import Unit, find_units
from zeroshard.units.changed_attributes import changing
from zeroshard.units.ignored import ignored_in
from zeroshard.units.materialise import take_from_rank_0

Replaced = tuple[Cuts, dict[nn.Parameter, nn.Parameter]]


def replaced(model: nn.Module, technique: Technique, axes: Mapping[str, Axis]) -> Replaced:
    """Apply a technique to a model.

    Returns:
        the places of parameters; and the replacement of each replaced parameter.
    """
    before = dict(model.named_parameters())
    with changing(model):
        cuts = technique.cut(model, axes)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    return cuts, {parameter: after[name] for name, parameter in before.items() if after[name] is not parameter}


DtypeOf = Callable[[nn.Parameter], torch.dtype]


class WholeModel:
    """The one stage of a model that is not cut, on every rank; attributes and methods as of `Stage`."""

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
        """The modules of all units except the root, with the units' numbers."""
        return [(unit.module, unit.number) for unit in self.units if unit.name]

    @property
    def data_ranks(self) -> int:
        """One per rank, or per group of ranks with the same data."""
        return self.mesh.ranks // self._cut.together

    @property
    def data_rank(self) -> int:
        """The number of this rank's batch."""
        return self.mesh.rank // self._cut.together

    @property
    def parts(self) -> list[list[int]]:
        """All ranks."""
        return [list(range(self.mesh.ranks))]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Empty: every parameter is in a unit of this rank."""
        return {}

    def cut(self, technique: Technique, axes: Mapping[str, Axis]) -> Replaced:
        """Apply a technique, which replaces parameters by parts; before the first one rank 0's values are broadcast.

        Parameters on the meta device get their values later, by name.
        """
        if not self._alike:
            take_from_rank_0(self._model, self.world)
        self._alike = True
        return replaced(self._model, technique, axes)

    def stage_of_buffer(self, module: nn.Module, name: str) -> int:
        """0: the only stage."""
        return 0

    def copy_of(self, stage: int) -> int:
        """This rank: each has its own buffers."""
        return self.mesh.rank

    def is_elsewhere(self, module: nn.Module) -> bool:
        """False: every module runs on this rank."""
        return False

    def release_other_stages(
        self, units: list[Unit], real: Callable[[nn.Parameter], nn.Parameter], dtype: DtypeOf, ledger: Ledger
    ) -> None:
        """Nothing to free or to borrow: the one stage keeps every parameter."""

    def gathered_at_once(self, sizes: Sequence[int]) -> tuple[int, str]:
        """The least size of units gathered at once, from the units' sizes, and its description."""
        return sum(sorted(sizes[:-1])[-2:]) + sizes[-1], "two units at a time and the root"

    def planned(self) -> Iterator[Planned]:
        """Ignored parameters; nothing is borrowed."""
        return planned_ignored(self._model, self.mesh.device)


def planned_ignored(model: nn.Module, device: torch.device) -> Iterator[Planned]:
    """Planned bytes of the ignored parameters on this rank's device, which are whole."""
    for parameter in ignored_in(model).values():
        if parameter.device.type == device.type:
            yield Planned("device", Category.PARAMETERS, Fraction(parameter.nbytes), Fraction(0))
