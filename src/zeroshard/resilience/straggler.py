"""Slow ranks: detected by the seconds that each rank computed in each step, without its waits for other ranks.

The median of a rank over time is compared with the median of the other ranks, since single steps vary.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 20  # steps in a median, half of which reveal a rank that turns slow
LEAST = 15  # steps before a rank can be called slow


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank, its median seconds per step, and those of the other ranks."""

    rank: int
    seconds: float
    others: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: it is busy for {self.seconds:.3g} s a step, the other ranks for "
            f"{self.others:.3g} s"
        )


class Stragglers:
    """The slow ranks in a group with equal work, such as all ranks, or the replicas of one pipeline stage.

    Args:
        ranks: number of ranks.
        factor: a rank is slow when its median is more than `factor` times the median of the others' medians.
        least_seconds: the least difference between the two.
    """

    def __init__(self, ranks: int, *, factor: float = 2.0, least_seconds: float = 0.05) -> None:
        self._factor, self._least = factor, least_seconds
        self._recovered = (
            1 + factor
        ) / 2  # less than `factor`, so that a rank at the limit is not reported again and again
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(ranks)]
        self._slow: set[int] = set()

    @property
    def slow(self) -> list[int]:
        """The ranks that are slow now."""
        return sorted(self._slow)

    def step(self, seconds: Sequence[float]) -> list[Straggler]:
        """Enter a step; returns the ranks that have turned slow, each once until it has recovered.

        Args:
            seconds: time for which each rank computed, in rank order.
        """
        for kept, value in zip(self._seconds, seconds, strict=True):
            kept.append(value)
        if len(seconds) == 1 or len(self._seconds[0]) < LEAST:
            return []
        medians = [statistics.median(kept) for kept in self._seconds]
        found = []
        for rank, median in enumerate(medians):
            others = statistics.median(medians[:rank] + medians[rank + 1 :])
            if rank in self._slow:
                if median <= self._recovered * others or median - others <= self._least:
                    self._slow.remove(rank)
            elif median > self._factor * others and median - others > self._least:
                self._slow.add(rank)
                found.append(Straggler(rank, median, others))
        return found
