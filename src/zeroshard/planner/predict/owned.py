"""Plans under which whole parameters have owners: their ranks are not alike, and no number grows evenly with blocks.

So every block is rehearsed, on each of a few ranks; of more ranks, on those that the engine makes the fullest
(`zeroshard.optim.owners`).
"""

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.needs import Needs
from zeroshard.planner.predict.rehearse import TrainingTask

FEW_RANKS = 3  # up to which all are rehearsed; of more, the two fullest and the next, which bounds all others


def owner_ranks(task: TrainingTask, plan: Plan, first: int, slices: int) -> list[int]:
    """The ranks to rehearse of those from `first` on that slice among themselves; of alike ones the first."""
    if choices_of(plan).slicing.updated_by(slices) == 1 or task.layout.whole is None:
        return [first]
    return [first + number * plan.tensor.ranks for number in range(min(slices, FEW_RANKS))]


def fullest_of(needs: Sequence[Needs], slices: int) -> Needs:
    """The numbers of the fullest of some ranks that `owner_ranks` gives, with the time of the slowest.

    Args:
        slices: ranks that slice among themselves, over which bytes in host memory are averaged.
    """
    fullest = max(needs, key=lambda one: sum(one.memory.values()))
    slowest = max(needs, key=lambda one: sum(one.spent.values()))
    if len(needs) == 1:
        return fullest
    on_host = [one.on_host for one in needs]
    mean = -(-(sum(on_host) + (slices - len(needs)) * on_host[-1]) // slices)
    return replace(fullest, spent=slowest.spent, host_mean=mean)
