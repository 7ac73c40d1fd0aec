"""Questions that the update of a matrix has about all its rows, and the rounds in which they are answered.

[Note: asks] A rank that has some rows of a matrix knows neither the means nor the maxima of its columns, nor its norm.
So an update is a generator: it yields what it found over its own rows, and gets the same over all rows in its place.
Where one rank has all rows each answer is the part itself, so that the same code, with the same bits, is the update of
a whole matrix.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from torch import Tensor


class Over(Enum):
    """How parts that were found over some rows each make what would be found over all of them."""

    MEAN = "mean"
    MEAN_SQUARE = "root of the mean square"
    NORM = "2-norm"
    MAXIMUM = "maximum"


@dataclass(frozen=True, slots=True)
class Ask:
    """What an update asks for.

    Attributes:
        over: how the parts are put together.
        part: found over the rows that are here.
    """

    over: Over
    part: Tensor

    def answer(self, parts: Tensor, shares: Tensor) -> Tensor:
        """What all ranks' parts make, which are added in rank order, in fp64; in shape and dtype of the part.

        Args:
            parts: of each rank [N, numel].
            shares: of all rows, which each rank has [N], in fp64.
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


Rounds = Generator[Sequence[Ask], Sequence[Tensor], None]
Answer = Callable[[Sequence[Ask]], Sequence[Tensor]]


def own_parts(asks: Sequence[Ask]) -> list[Tensor]:
    """The answers where all rows are here."""
    return [ask.part for ask in asks]


def in_rounds(updates: Iterable[Rounds], answer: Answer = own_parts) -> None:
    """Run updates side by side: those that ask have all their answers at once, round by round.

    Args:
        answer: the answers to some asks; called once for each round.
    """
    answers: list[tuple[Rounds, Sequence[Tensor] | None]] = [(update, None) for update in updates]
    while answers:
        asked: list[tuple[Rounds, Sequence[Ask]]] = []
        for update, given in answers:
            try:
                asked.append((update, next(update) if given is None else update.send(given)))
            except StopIteration:
                continue
        found = iter(answer([ask for _, asks in asked for ask in asks]) if asked else ())
        answers = [(update, list(islice(found, len(asks)))) for update, asks in asked]


def _sum(parts: Tensor) -> Tensor:
    """Over the ranks [N, numel], one after the other: a sum in another order may have other bits on another rank."""
    return parts.cumsum(0)[-1]
