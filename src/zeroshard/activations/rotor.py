"""The cheapest backward of a chain of unlike blocks under a budget of memory (Beaumont et al., 1911.13214: Rotor).

A block's forward runs in one of three ways: it saves all that its backward needs; or it saves nothing, and its input is
kept to compute it again; or neither is kept. The optimum over all orders in which what is kept stays until its backward
has used it is found by dynamic programming. With f and b the seconds of forwards and backwards, a the bytes that enter
a block, A the bytes that it saves, its output among them, and m what is free beside the input of block s:

    C(s, t, m) = min(f_s + C(s+1, t, m - A_s) + b_s,
                     min over s < r <= t of  f_s + ... + f_{r-1} + C(r, t, m - a_r) + C(s, r-1, m))

L blocks and S sizes of memory take O(L^3 S) operations; a second for 200 blocks and 500 sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from math import ceil, inf

import torch
from torch import Tensor

from zeroshard.errors import PlanError


class ChainStep(StrEnum):
    """How an operation of a chain runs."""

    SAVE = "save"
    """A forward that saves what its backward needs."""
    KEEP_INPUT = "keep input"
    """A forward that saves nothing, and whose input stays."""
    PASS = "pass"
    """A forward that saves nothing, and whose input is let go."""
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What one block takes.

    Attributes:
        forward: seconds; backward: seconds.
        entering: bytes of its input.
        saved: bytes that it saves for its backward beside its input, with its output.
        temporary: bytes besides while its backward runs.
    """

    forward: float
    backward: float
    entering: int
    saved: int
    temporary: int = 0


@dataclass(frozen=True, slots=True)
class ChainOrder:
    """The order of operations of a chain.

    Attributes:
        seconds: of them all.
        operations: (way, block) in their order.
    """

    seconds: float
    operations: tuple[tuple[ChainStep, int], ...]


def cheapest(blocks: Sequence[BlockCosts], budget: int, sizes: int = 500) -> ChainOrder:
    """The fastest order of a chain's forwards and backwards within a budget.

    Args:
        budget: bytes beside the input of the first block.
        sizes: into so many steps the budget is divided; bytes are rounded up to whole steps, so that the order keeps
            within the budget, and is the optimum where they are whole anyway.

    Raises:
        PlanError: no order fits, with the least that one needs.
    """
    table = _Table(blocks, _in_steps(blocks, budget, sizes), min(sizes, budget))
    seconds = float(table.seconds[0, len(blocks) - 1, -1])
    if seconds == inf:
        raise PlanError(
            f"A budget of {budget:,} bytes is too small for the activations of {len(blocks)} blocks; their backward "
            f"needs {least(blocks):,}, with every block but one computed again. Raise device_memory, or use smaller "
            f"microbatches."
        )
    return ChainOrder(seconds, tuple(table.operations(0, len(blocks) - 1, table.steps)))


def least(blocks: Sequence[BlockCosts]) -> int:
    """The fewest bytes, beside the input of the first block, in which a chain's backward can run.

    That is with every block but one computed anew from the first input: the largest of what one backward takes, and of
    what one forward that saves nothing does.
    """
    inputs = [0, *(block.entering for block in blocks[1:])]
    backwards = (held + block.saved + block.temporary for held, block in zip(inputs, blocks, strict=True))
    return max(*backwards, *(before + after for before, after in pairwise(inputs)), 0)


class _Table:
    """C(s, t, m) for all s <= t and all m from 0 to `steps`."""

    def __init__(self, blocks: Sequence[BlockCosts], bytes_of: Sequence[Sequence[int]], steps: int) -> None:
        count, self.steps, self._bytes = len(blocks), steps, bytes_of
        self._forward = [block.forward for block in blocks]
        self._backward = [block.backward for block in blocks]
        self._until = torch.tensor([0.0, *accumulate(self._forward)], dtype=torch.float64)
        self.seconds = torch.full((count, count, steps + 1), inf, dtype=torch.float64)
        self._after = torch.full((count, count, steps + 1), inf, dtype=torch.float64)  # [t, r]: C(r, t, m - a_r)
        for length in range(count):
            for s in range(count - length):
                self._fill(s, s + length)

    def _fill(self, s: int, t: int) -> None:
        best = self._saving(s, t)
        if t > s:
            best = torch.minimum(best, self._passing(s, t).amin(0))
        self.seconds[s, t] = best
        self._after[t, s] = _moved(best, self._bytes[s][0])

    def _saving(self, s: int, t: int) -> Tensor:
        """By m, the seconds where block s saves what its backward needs."""
        _, saved, temporary = self._bytes[s]
        rest = self.seconds[s + 1, t] if t > s else torch.zeros(self.steps + 1, dtype=torch.float64)
        found = _moved(rest, saved) + (self._forward[s] + self._backward[s])
        found[: saved + temporary] = inf
        return found

    def _passing(self, s: int, t: int) -> Tensor:
        """[r - s - 1, m]: the seconds where blocks s to r - 1 save nothing at first."""
        ahead = (self._until[s + 1 : t + 1] - self._until[s])[:, None]
        found = self._after[t, s + 1 : t + 1] + self.seconds[s, s:t] + ahead
        room = 0
        for r in range(s + 1, t + 1):
            before = self._bytes[r - 1][0] if r - 1 > s else 0
            room = max(room, before + self._bytes[r][0])
            found[r - s - 1, :room] = inf
        return found

    def operations(self, s: int, t: int, m: int) -> list[tuple[ChainStep, int]]:
        """The operations of the optimum."""
        saving = float(self._saving(s, t)[m])
        if t == s:
            return [(ChainStep.SAVE, s), (ChainStep.BACKWARD, s)]
        passing = self._passing(s, t)[:, m]
        if saving <= float(passing.min()):
            rest = self.operations(s + 1, t, m - self._bytes[s][1])
            return [(ChainStep.SAVE, s), *rest, (ChainStep.BACKWARD, s)]
        r = s + 1 + int(passing.argmin())
        ahead = [(ChainStep.KEEP_INPUT, s), *((ChainStep.PASS, block) for block in range(s + 1, r))]
        return [*ahead, *self.operations(r, t, m - self._bytes[r][0]), *self.operations(s, r - 1, m)]


def _moved(values: Tensor, steps: int) -> Tensor:
    """values[m - steps] at m; infinite where there is no such m."""
    moved = torch.full_like(values, inf)
    if steps < len(values):
        moved[steps:] = values[: len(values) - steps]
    return moved


def _in_steps(blocks: Sequence[BlockCosts], budget: int, sizes: int) -> list[list[int]]:
    """Entering, saved and temporary bytes of each block in steps of the budget."""
    step = max(1.0, budget / sizes)
    return [[ceil(size / step) for size in (block.entering, block.saved, block.temporary)] for block in blocks]
