"""The random numbers of modules in training: where they come from, as the orders of a step see it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """The rows of one microbatch in the whole batch of a step.

    Attributes:
        step: steps taken before it.
        first: the number of its first row: rows of lower data ranks and of earlier microbatches come before.
        count: how many they are.
    """

    step: int
    first: int
    count: int


class RandomNumbers(Protocol):
    """Gives modules the random numbers that they draw in forwards that are trained, and in recomputations."""

    def number(self, parts: Sequence[Any]) -> list[MicrobatchRows | None]:
        """The rows of each microbatch of this data rank's batch; may be a collective call."""

    def microbatch(self, rows: MicrobatchRows | None) -> AbstractContextManager[None]:
        """Forwards inside are of these rows."""

    def again(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, a module's own forward is computed again in a backward, with torch's generators as at its start."""

    def discard(self) -> None:
        """The backwards of the step so far are as if they had not been."""

    def end_step(self) -> None:
        """A step of a loop by hand ends; may be a collective call."""


class TorchStreams:
    """Each rank's own generators of torch: the numbers depend on ranks, stages and microbatches; they cost nothing."""

    def number(self, parts: Sequence[Any]) -> list[MicrobatchRows | None]:
        """Rows have no numbers."""
        return [None] * len(parts)

    def microbatch(self, rows: MicrobatchRows | None) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def again(self, module: nn.Module) -> AbstractContextManager[None]:
        """Torch's generators say all."""
        return nullcontext()

    def discard(self) -> None:
        """Streams go on."""

    def end_step(self) -> None:
        """There is nothing to check."""
