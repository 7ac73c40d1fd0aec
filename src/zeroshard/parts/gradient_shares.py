"""A rank's shares of the mean gradients, for one who compares them with those of another run."""

from dataclasses import dataclass

from torch import Tensor

from zeroshard.parts.part import Parts


@dataclass(frozen=True, slots=True)
class GradientShare:
    """The elements of one parameter's gradient that lie in a rank's slice.

    Attributes:
        name: of the parameter.
        flat: the label of its flat buffer.
        first: the first element, in the row-major order of the parameter.
        values: [elements], the mean over all data ranks.
        counted: whether this rank counts them in the norm.
    """

    name: str
    flat: str
    first: int
    values: Tensor
    counted: bool


def shares_of(parts: Parts, factor: float) -> list[GradientShare]:
    """Copies, times `factor`, of the gradients whose slices this rank has; to be called when all are reduced."""
    found = []
    for part, gradients in parts.trained:
        total, index = gradients.settle().settle(), part.flat.index
        start = index.interval(part.weights.rank)[0]
        for number, low, high in index.overlaps(start, start + total.numel()):
            entry, values = index.entries[number], total[low - start : high - start].detach().cpu().clone()
            share = GradientShare(
                entry.name, part.flat.label, low - entry.offset, values.mul_(factor), part.place.counted
            )
            found.append(share)
    return found
