"""Checks that the states of a model fit its device and its machine, before any of them is made."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from zeroshard.comm.mesh import Mesh
from zeroshard.errors import BudgetExceeded
from zeroshard.memory.ledger import Ledger
from zeroshard.offload.tiers import HostTiers
from zeroshard.optim import StateLayout
from zeroshard.pipeline.stage import Stage
from zeroshard.pipeline.whole import WholeModel
from zeroshard.plan import Plan
from zeroshard.precision.cast import Precision
from zeroshard.units import Unit
from zeroshard.validation.fitting import Fitting
from zeroshard.validation.refused import check_machine
from zeroshard.zero import Residency
from zeroshard.zero.byte_formulas import BytesPerParameter

Groups = dict[nn.Parameter, int]  # the optimizer group of each trained parameter


@dataclass(frozen=True, slots=True)
class RoomChecks:
    """Refuses what does not fit.

    Attributes:
        mesh: the ranks that slice dense parameters.
        layout: of the optimizer's states.
    """

    plan: Plan
    mesh: Mesh
    ledger: Ledger
    stage: Stage | WholeModel
    layout: StateLayout

    def all(
        self,
        units: list[Unit],
        groups: Groups,
        itemsize: Callable[[nn.Parameter], int],
        going: set[int],
        lower: HostTiers | None,
    ) -> None:
        """Refuse what `budget` and `machine` do, which say what the arguments are."""
        self.budget(units, groups, itemsize)
        self.machine(units, groups, going, lower)

    def budget(self, units: list[Unit], groups: Groups, itemsize: Callable[[nn.Parameter], int]) -> None:
        """Refuse a budget that the weights alone exceed; and tell the ledger the way out of what it refuses later.

        Args:
            itemsize: bytes of an element of a parameter, as it is computed with.

        Raises:
            BudgetExceeded: with the least that they need.
        """
        budget, ranks, offloads = self.plan.device_budget, self.mesh.ranks, self.plan.offloading.parameters
        if budget is None:
            return
        sizes = [sum(p.numel() * itemsize(p) for p in unit.parameters.values()) for unit in units]
        if self.stage.pipeline is None:
            numel = sum(p.numel() for unit in units for p in unit.parameters.values())
            trained = sum(p.numel() for unit in units for p in unit.parameters.values() if p in groups)
            width = sum(sizes) // max(1, numel)
            each = BytesPerParameter(width, width, 4 if width < 4 else 0, self.layout.bytes_per_element)
            self.ledger.way_out = Fitting(self.plan, ranks, trained, numel - trained, tuple(sizes), each).way_out
        gathered, at_once = self.stage.gathered_at_once(sizes)
        needed, what = sum(sizes), "the weights"
        if Residency.of_stage(self.plan.zero).slice_parameters and (ranks > 1 or offloads):
            needed, what = (0 if offloads else sum(sizes) // ranks) + gathered, at_once
        if needed > budget:
            way_out = "Set it to more than that, with gradients and activations on top, or use more stages."
            if self.ledger.way_out is not None:
                way_out = self.ledger.way_out(needed, budget)
            raise BudgetExceeded(f"device_memory is {budget:,} bytes, and {what} take {needed:,}.", way_out)

    def machine(self, units: list[Unit], groups: Groups, going: set[int], lower: HostTiers | None) -> None:
        """Refuse states that the machine cannot hold; some kernels would end the process in the first step.

        Args:
            going: the numbers of the units that are updated on the host.
            lower: the tiers there.

        Raises:
            BudgetExceeded: with the limit that is met.
        """
        stay = [unit for unit in units if unit.number not in going]
        numel = sum(p.numel() for unit in stay for p in unit.parameters.values() if p in groups)
        slices = self.mesh.ranks if self.plan.zero else 1
        check_machine(self.mesh, numel * self.layout.bytes_per_element // slices, "The optimizer's states")
        if lower is not None:
            compute, adds = Precision.named(self.plan.precision).compute, self.plan.microbatches > 1
            lower.check_room(units, going, compute, self.layout.bytes_per_element, adds)
