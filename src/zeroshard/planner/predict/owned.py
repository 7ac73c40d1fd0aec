"""Plans under which whole parameters have owners: their ranks are not alike, and no number grows evenly with blocks.

So every block is rehearsed, on each of a few ranks; of more ranks, on those that the engine makes the fullest
(`zeroshard.optim.slices.owners`).
"""

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.needs import Needs
from zeroshard.planner.predict.rehearse import TrainingTask

FEW_RANKS = 3  # up to which all are rehearsed; of more, the two fullest and the next, which bounds all others


def owner_ranks(task: TrainingTask, plan: Plan, first: int, slices: int) -> list[int]:
    """The ranks to rehearse of those from `first` on that slice or split among themselves; of alike ones the first."""
    if task.layout.whole is None:
        return [first]
    split = plan.tensor.ranks  # among which each matrix has an owner too
    chosen = range(min(choices_of(plan).slicing.updated_by(slices), FEW_RANKS))
    return [first + number * split + place for number in chosen for place in range(min(split, FEW_RANKS))]


def fullest_of(needs: Sequence[Needs], ranks: int) -> Needs:
    """The numbers of the fullest of some ranks that `owner_ranks` gives, with the time of the slowest.

    Args:
        ranks: of one stage and one slice group, over which bytes in host memory are averaged.
    """
    fullest = max(needs, key=lambda one: sum(one.memory.values()))
    slowest = max(needs, key=lambda one: sum(one.spent.values()))
    if len(needs) == 1:
        return fullest
    on_host = [one.on_host for one in needs]
    mean = -(-(sum(on_host) + (ranks - len(needs)) * on_host[-1]) // ranks)
    return replace(fullest, spent=slowest.spent, host_mean=mean)
