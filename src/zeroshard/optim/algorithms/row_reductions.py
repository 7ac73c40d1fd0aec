"""Reductions over the rows of a matrix on several ranks, in rounds of an optimizer's update.

[Note: row reductions] Updates of some optimizers need means or maxima of the columns of a matrix, or its norm. Such an
update is a generator: it yields the reduction of this rank's rows, and is sent the reduction of all rows. On a rank
with all rows both are equal, so the same code updates a whole matrix, with the same bits.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from torch import Tensor


class Over(Enum):
    """The kind of a reduction, by which the ranks' parts are combined."""

    MEAN = "mean"
    MEAN_SQUARE = "root of the mean square"
    NORM = "2-norm"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True)
class RowReduction:
    """One reduction of an update.

    Attributes:
        over: its kind.
        part: the reduction of this rank's rows.
    """

    over: Over
    part: Tensor

    def total(self, parts: Tensor, shares: Tensor) -> Tensor:
        """The reduction of all rows, added in rank order and in fp64; in shape and dtype of the part.

        Args:
            parts: of each rank [N, numel].
            shares: the share of each rank in all rows [N], in fp64.
        """
        if self.over is Over.MAXIMUM:
            total = parts.amax(0)
        elif self.over is Over.MEAN:
            total = _sum(parts.double() * shares.unsqueeze(1))
        elif self.over is Over.MEAN_SQUARE:
            total = _sum(parts.double().square() * shares.unsqueeze(1)).sqrt()
        else:
            total = _sum(parts.double().square()).sqrt()
        return total.to(self.part.dtype).view(self.part.shape)


Rounds = Generator[Sequence[RowReduction], Sequence[Tensor], None]
Reduce = Callable[[Sequence[RowReduction]], Sequence[Tensor]]  # of the reductions of one round


def local_parts(reductions: Sequence[RowReduction]) -> list[Tensor]:
    """The reductions of matrices with all rows on this rank."""
    return [reduction.part for reduction in reductions]


def in_rounds(updates: Iterable[Rounds], reduce: Reduce = local_parts) -> None:
    """Run updates concurrently, with all their reductions of a round in one call of `reduce`."""
    running: list[tuple[Rounds, Sequence[Tensor] | None]] = [(update, None) for update in updates]
    while running:
        yielded: list[tuple[Rounds, Sequence[RowReduction]]] = []
        for update, totals in running:
            try:
                yielded.append((update, next(update) if totals is None else update.send(totals)))
            except StopIteration:
                continue
        found = iter(reduce([each for _, reductions in yielded for each in reductions]) if yielded else ())
        running = [(update, list(islice(found, len(reductions)))) for update, reductions in yielded]


def _sum(parts: Tensor) -> Tensor:
    """The sum over the ranks [N, numel] in rank order: in another order the bits may differ between ranks."""
    return parts.cumsum(0)[-1]
