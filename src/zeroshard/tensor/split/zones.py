"""Zones of a forward under tensor parallelism: how the activations that modules see lie among the ranks."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.errors import BatchError
from zeroshard.parts.place import Axis
from zeroshard.parts.zones import DividedActivations, Division, Moved
from zeroshard.parts.zones import Zone as Zone

if TYPE_CHECKING:
    from zeroshard.tensor.split.collectives import TensorRanks


class Zones:
    """The zone of the forward under way of one model.

    Attributes:
        now: that of the next operation.
        around: the one around split layers: `SEQUENCE` inside of blocks under sequence parallelism, else `WHOLE`.
        positions: of whole sequences, while `around` is `SEQUENCE`.
        axis: the ranks among which layers are split; None before the model is cut.
        moved: told of each border, for random numbers.
    """

    def __init__(self) -> None:
        self.now = self.around = Zone.WHOLE
        self.positions = 0
        self.axis: Axis | None = None
        self.moved: Moved = lambda zone, around: None
        self._columns: tuple[DividedActivations, ...] = ()

    def enter(self, zone: Zone, columns: DividedActivations | None = None) -> None:
        """Activations lie so from here on.

        Args:
            columns: the features and heads of the column-parallel layer that is entered.
        """
        if self.now is not zone:
            self.now, self._columns = zone, ()
        if columns is not None and columns not in self._columns:
            self._columns += (columns,)
        self.moved(zone, False)

    def leave(self) -> None:
        """The split layers are over: activations lie as around them."""
        self.now = self.around
        self.moved(None, False)

    def enter_sequence(self, positions: int) -> None:
        """A rank has some of so many positions from here on."""
        self.now = self.around = Zone.SEQUENCE
        self.positions = positions
        self.moved(Zone.SEQUENCE, True)

    def leave_block(self) -> None:
        """Between two blocks activations stay as they are, but whether a model skips the next is drawn on all alike."""
        self.moved(Zone.WHOLE, False)

    def enter_block(self) -> None:
        """The next block of a stack."""
        self.moved(None, False)

    def recall(self, positions: int) -> None:
        """A backward reaches a block, parts of which may be computed again."""
        if self.around is Zone.WHOLE:
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)
        self.now = self.around = Zone.SEQUENCE
        self.positions = positions

    def _forget(self) -> None:
        self.now = self.around = Zone.WHOLE

    @property
    def divided(self) -> DividedActivations | None:
        """How the activations of the next operation are divided among the ranks; None where they are whole."""
        if self.now is Zone.WHOLE or self.axis is None:
            return None
        if self.now is Zone.COLUMNS:
            return _joined(self._columns)
        return _positions(self.positions, self.axis.size, self.axis.rank)

    def total(self, x: Tensor, ranks: "TensorRanks") -> int:
        """The rows of all ranks of own rows x [..., T/t, D], or of x [B·T/t, D] where rows and positions are one.

        Raises:
            BatchError: x has the positions of no even part.
        """
        own, (start, stop) = x.shape[-2], ranks.rows(self.positions)
        if x.dim() > 2 and own == stop - start:
            return self.positions
        if self.positions % ranks.size:
            raise BatchError(
                f"Sequences of {self.positions} positions do not divide among tensor_parallel={ranks.size} ranks, and "
                f"a layer reads rows of shape {tuple(x.shape)}. Make the length of sequences a multiple of "
                f"{ranks.size}, or set TensorParallel({ranks.size}, sequence=False)."
            )
        return own * ranks.size

    def reset(self) -> None:
        """A forward begins, or the blocks are over."""
        self.now = self.around = Zone.WHOLE
        self.moved(Zone.WHOLE, True)


@lru_cache(maxsize=256)
def _positions(total: int, ranks: int, rank: int) -> DividedActivations:
    """The positions of a rank among so many."""
    chunk = -(-total // ranks)
    first = min(rank * chunk, total)
    return DividedActivations(positions=Division(total, first, min(chunk, total - first)))


@lru_cache(maxsize=256)
def _joined(columns: tuple[DividedActivations, ...]) -> DividedActivations:
    """What the column-parallel layers that were entered have, together."""
    heads = dict.fromkeys(division for each in columns for division in each.heads)
    features = dict.fromkeys(division for each in columns for division in each.features)
    return DividedActivations(heads=tuple(heads), features=tuple(features))
