"""The position in the training data, in samples: rows of global batches, counted over the whole run.

The same position holds at every world size and batch size, and a resume is one number. Samples that spoiled the loss
are left out as intervals of positions.
"""

import bisect
from collections.abc import Mapping
from typing import Any


class Cursor:
    """Hands out the numbers of samples in order, each once, except those that are to be left out.

    Attributes:
        position: the next sample to look at; all before it have been taken or left out.
    """

    def __init__(self) -> None:
        self.position = 0
        self._left_out: list[tuple[int, int]] = []  # disjoint, in order

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """The intervals [start, stop) that are left out, disjoint and in order."""
        return list(self._left_out)

    def take(self, rows: int) -> list[int]:
        """The samples of the next global batch, in order: [rows]."""
        samples: list[int] = []
        while len(samples) < rows:
            place = bisect.bisect_right(self._left_out, self.position, key=lambda interval: interval[0])
            if place and self.position < self._left_out[place - 1][1]:
                self.position = self._left_out[place - 1][1]
                continue
            stop = self.position + rows - len(samples)
            if place < len(self._left_out):
                stop = min(stop, self._left_out[place][0])
            samples.extend(range(self.position, stop))
            self.position = stop
        return samples

    def leave_out(self, start: int, stop: int) -> None:
        """Never take the samples [start, stop), from now on."""
        if start >= stop:
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._left_out, (start, stop)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], high)
            else:
                merged.append((low, high))
        self._left_out = merged

    def state(self) -> dict[str, Any]:
        """The position and what is left out, in plain JSON values."""
        return {"position": self.position, "left_out": [list(interval) for interval in self._left_out]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, in another process."""
        self.rewind(state)
        self._left_out = [(int(start), int(stop)) for start, stop in state["left_out"]]

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go back to the position in `state` for a rollback; samples that are left out stay so."""
        self.position = int(state["position"])
