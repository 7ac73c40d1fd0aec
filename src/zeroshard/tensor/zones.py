"""Zones of a forward under tensor parallelism: how the activations that modules see lie among the ranks."""

from enum import StrEnum
from typing import TYPE_CHECKING

from torch import Tensor

from zeroshard.errors import BatchError

if TYPE_CHECKING:
    from zeroshard.tensor.collectives import TensorRanks


class Zone(StrEnum):
    """How activations lie among the ranks that split layers."""

    WHOLE = "whole"
    """Equal on all ranks."""
    COLUMNS = "columns"
    """This rank's features or heads, between a column-parallel and a row-parallel layer."""
    SEQUENCE = "sequence"
    """This rank's positions of each sequence, between the split layers of blocks."""


class Zones:
    """The zone of the forward under way of one model.

    Attributes:
        now: that of the next operation.
        around: the one around split layers: `SEQUENCE` inside of blocks under sequence parallelism, else `WHOLE`.
        positions: of whole sequences, while `around` is `SEQUENCE`.
    """

    def __init__(self) -> None:
        self.now = self.around = Zone.WHOLE
        self.positions = 0

    def enter(self, zone: Zone) -> None:
        """Activations lie so from here on."""
        self.now = zone

    def leave(self) -> None:
        """The split layers are over: activations lie as around them."""
        self.now = self.around

    def enter_sequence(self, positions: int) -> None:
        """A rank has some of so many positions from here on."""
        self.now = self.around = Zone.SEQUENCE
        self.positions = positions

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
