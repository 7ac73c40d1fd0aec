"""Rows: the number of each row of a rank's microbatches in the whole batch of a step.

The whole batch is one process's: the batches of the data ranks in order, each with its microbatches in order.
`train_step` has its batch, and the ranks all-gather their numbers of rows. In a loop by hand the rows of lower ranks
are unknown: rows are numbered as if all microbatches of all ranks had equally many, and as if there were as many
microbatches as in the plan; before the update the ranks check this.

[Note: microbatches by hand] The first forward of a step, and the first after a backward, begins a microbatch; further
forwards before a backward are further calls on the same rows.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroshard.comm.collectives import Comm
from zeroshard.errors import BatchError
from zeroshard.parts.part import MicrobatchRows
from zeroshard.units.hooks import tensors_in

COUNT = struct.Struct("<qq")  # of a batch: the data rank, and its rows
DONE = struct.Struct("<qq?")  # of a step by hand: rows of each microbatch, -1 if unequal; microbatches; numbers in use


class Rows:
    """Numbers the rows of one rank.

    Args:
        comm: of all ranks.
        data_rank: number of this rank's batch among `data_ranks`.
        microbatches: of a step, by the plan.
        steps: returns the number of steps taken.
    """

    def __init__(
        self, comm: Comm, data_rank: int, data_ranks: int, microbatches: int, steps: Callable[[], int]
    ) -> None:
        self._comm, self._data_rank, self._data_ranks = comm, data_rank, data_ranks
        self._microbatches, self._steps = microbatches, steps
        self._by_hand: list[MicrobatchRows] = []  # of the current step
        self._ended = True  # whether the next forward begins a microbatch
        self._used = False

    def of_batch(self, parts: Sequence[Any]) -> list[MicrobatchRows]:
        """The rows of each microbatch of a batch; a collective call with several data ranks."""
        counts = [_rows_in(part) for part in parts]
        first, step = 0, self._steps()
        self._used = False
        if self._data_ranks > 1:
            word = COUNT.pack(self._data_rank, sum(counts))
            rows = dict(COUNT.unpack(frame) for frame in self._comm.agree(word, f"rows of step {step}"))
            first = sum(count for rank, count in rows.items() if rank < self._data_rank)
        firsts = [first + sum(counts[:k]) for k in range(len(counts))]
        return [MicrobatchRows(step, start, count) for start, count in zip(firsts, counts, strict=True)]

    def of_forward(self, args: Any, kwargs: Any) -> MicrobatchRows | None:
        """The rows of a forward by hand; None for another call on the same rows ([Note: microbatches by hand])."""
        step = self._steps()
        if self._by_hand and self._by_hand[0].step != step:
            self._by_hand.clear()
        if self._by_hand and not self._ended:
            return None
        count = _rows_in((args, kwargs))
        self._ended = False
        self._by_hand.append(MicrobatchRows(step, self._first(len(self._by_hand), count), count))
        return self._by_hand[-1]

    def _first(self, number: int, count: int) -> int:
        """The first row of a microbatch by hand."""
        if self._data_ranks == 1:
            return sum(rows.count for rows in self._by_hand[:number])
        return (self._data_rank * self._microbatches + number) * count

    def backward_began(self, gradient: torch.Tensor) -> None:
        """Note a backward: the next forward begins a microbatch."""
        self._ended = True

    def drew(self) -> None:
        """Note that a draw has used the rows' numbers."""
        self._used = True

    def discard(self) -> None:
        """Restart the step, with the forward whose backward is still to come, if any."""
        self._by_hand = [] if self._ended else self._by_hand[-1:]

    def check(self) -> None:
        """Compare the microbatches of a step by hand with those of other ranks; a collective call.

        Raises:
            BatchError: the row numbers differ from those in the whole batch.
        """
        used, self._used = self._used and bool(self._by_hand), False
        if self._data_ranks == 1:
            return
        counts = {
            rows.count if rows.first == self._first(number, rows.count) else -1
            for number, rows in enumerate(self._by_hand)
        }
        mine = DONE.pack(counts.pop() if len(counts) == 1 else -1, len(self._by_hand), used)
        self._by_hand.clear()
        frames = self._comm.agree(mine, f"rows of step {self._steps()} by hand")
        answers = [DONE.unpack(frame) for frame in frames]
        if not any(used for _, _, used in answers):
            return
        rows, microbatches = ([answer[n] for answer in answers] for n in (0, 1))
        if len(set(rows)) > 1 or rows[0] < 0:
            raise BatchError(
                f"rng='exact' numbers rows in a loop by hand by equal counts, and the microbatches of the ranks have "
                f"{', '.join('unlike numbers' if count < 0 else str(count) for count in rows)} of rows. Use "
                f"engine.train_step(batch), which counts them, or give every rank microbatches of one size."
            )
        if set(microbatches) != {self._microbatches}:
            raise BatchError(
                f"rng='exact' numbers rows by the plan's microbatches={self._microbatches}, and the ranks had "
                f"{', '.join(map(str, microbatches))} in this step. Set microbatches to the number of backwards in a "
                f"step, each after its own forward, or use engine.train_step(batch)."
            )


def _rows_in(tree: Any) -> int:
    """The first dimension of the first tensor with dimensions; 0 without."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(tree) if tensor.dim()), 0)
