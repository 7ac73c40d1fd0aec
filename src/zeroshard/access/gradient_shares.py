"""A rank's shares of the mean gradients, for comparison with another run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.checkpoint.boxes import Box
from zeroshard.parts.part import Parts


@dataclass(frozen=True, slots=True)
class GradientShare:
    """The elements of one parameter's gradient that lie in a rank's slice.

    Attributes:
        name: of the parameter.
        flat: the label of its flat buffer.
        boxes: of the whole parameter, which hold the elements: in each all those with coordinates in [start, start +
            shape). A slice of a matrix is a few boxes; so is one of a part of a matrix that is split over ranks.
        values: [elements], those of one box after the other, each in row-major order; the mean over all data ranks.
        counted: whether this rank counts them in the norm.
    """

    name: str
    flat: str
    boxes: tuple[Box, ...]
    values: Tensor
    counted: bool


def shares_of(parts: Parts, factor: float) -> list[GradientShare]:
    """Copies, times `factor`, of the gradients in this rank's slices; called once all are reduced."""
    found = []
    for part, gradients in parts.trained:
        total, index = gradients.settle().settle(), part.flat.index
        start = index.interval(part.weights.rank)[0]
        for number, low, high in index.overlaps(start, start + total.numel()):
            every = list(part.boxes(number, low, total[low - start : high - start].detach()))
            for mine in (True, False):  # the pieces that this rank counts, and those that another rank counts
                held = [each for each, counted in every if counted is mine]
                if held:
                    values = torch.cat([each.values.reshape(-1) for each in held]).cpu().mul_(factor)
                    name, boxes = index.entries[number].name, tuple(each.box for each in held)
                    counts = mine and part.place.counted
                    found.append(GradientShare(name, part.flat.label, boxes, values, counts))
    return found
