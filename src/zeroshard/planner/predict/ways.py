"""Ways to rehearse a plan: one rank, where all are alike, or one of each of some stages."""

from collections.abc import Sequence
from typing import Protocol

from zeroshard.doctor.hardware import Machines
from zeroshard.plan import Plan
from zeroshard.planner.predict.alone import Unstaged
from zeroshard.planner.predict.needs import Needs, Times
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.shallow import Stack
from zeroshard.planner.predict.stages import Staged


class Way(Protocol):
    """How plans of one kind are rehearsed."""

    @property
    def work(self) -> float:
        """Duration of a rehearsal, relative to that of a plan without stages."""

    def whole(self, plan: Plan, blocks: int) -> int:
        """The size of a rehearsal of every block and stage, for a model with so many blocks."""

    def needs(
        self, task: TrainingTask, plan: Plan, machines: Machines, rows: int, stacks: Sequence[Stack] | None
    ) -> list[Needs]:
        """The numbers of ranks, of which one is the fullest.

        Args:
            rows: of one data rank in one step.
            stacks: the repeated blocks of the model, of which few are rehearsed; None rehearses all.
        """

    def timed(self, task: TrainingTask, plan: Plan, machines: Machines, rows: int) -> list[Needs]:
        """The same, from real steps.

        Raises:
            PlanError: few blocks do not fit into the memory of this machine.
        """

    def times(self, needs: Sequence[Needs], plan: Plan, machines: Machines) -> Times:
        """The time of a step of all ranks."""


def way_of(plan: Plan) -> Way:
    """The way for a plan."""
    return Staged() if plan.pipelined else Unstaged()
