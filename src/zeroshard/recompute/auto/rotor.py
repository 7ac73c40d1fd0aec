"""The cheapest backward of a chain of unlike blocks under a budget of memory (Beaumont et al., 1911.13214: Rotor).

A block's forward runs in one of three ways: it saves all that its backward needs; or it saves nothing, and its input is
kept to compute it again; or neither is kept. The optimum over all orders in which what is kept stays until its backward
has used it is found by dynamic programming. With f and b the seconds of forwards and backwards, a the bytes that enter
a block, A the bytes that it saves, its output among them, and m what is free beside the input of block s:

    C(s, t, m) = min(f_s + C(s+1, t, m - A_s) + b_s,
                     min over s < r <= t of  f_s + ... + f_{r-1} + C(r, t, m - a_r) + C(s, r-1, m))

A block that saves nothing runs once more for each time that it did so; what that costs beside f is added there.
L blocks and S sizes of memory take O(L^3 S) operations; a second for 200 blocks and 500 sizes.

[Note: other ways] In the first forward of the chain, which is that of the problems C(s, L, m), a block may also be kept
in another way w: with its input it holds w.held bytes until its backward, which then has w.peak bytes, and all that is
computed of it takes w.seconds. So a block that keeps the results of some operations, that goes to the host, or that is
compressed adds one term to the minimum: w.seconds + C(s+1, L, m - w.held), where m is at least w.peak.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from zeroshard.errors import PlanError

Times = NDArray[np.float64]  # seconds by sizes of memory; not a tensor, since a rehearsal's tensors have no values


class ChainStep(StrEnum):
    """How an operation of a chain runs."""

    SAVE = "save"
    """A forward that saves what its backward needs, or keeps it in another way."""
    KEEP_INPUT = "keep input"
    """A forward that saves nothing, and whose input stays."""
    PASS = "pass"
    """A forward that saves nothing, and whose input is let go."""
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class OtherWay:
    """A way to keep a block between its forward and its backward, beside saving all ([Note: other ways]).

    Attributes:
        held: bytes until the backward beside the block's input, its output among them.
        peak: bytes when its backward begins.
        seconds: of its forward, backward and what is computed or copied between them.
        choice: what is done, for the caller.
    """

    held: int
    peak: int
    seconds: float
    choice: object = None


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What one block takes.

    Attributes:
        forward: seconds; backward: seconds.
        entering: bytes of its input.
        saved: bytes that it saves for its backward beside its input, with its output.
        temporary: bytes besides while its backward runs.
        ways: other ways to keep it.
        restart: seconds besides, each time that it is computed again.
    """

    forward: float
    backward: float
    entering: int
    saved: int
    temporary: int = 0
    ways: tuple[OtherWay, ...] = ()
    restart: float = 0.0


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block that is kept until its backward: all that it saves, or as a way says."""

    block: int
    way: OtherWay | None = None


@dataclass(frozen=True, slots=True)
class PassedBlocks:
    """Blocks of which the first's input alone is kept, and that are then computed again in the order of `again`."""

    first: int
    last: int
    again: "tuple[ChainItem, ...]"


ChainItem = SavedBlock | PassedBlocks


@dataclass(frozen=True, slots=True)
class ChainOrder:
    """The order of operations of a chain.

    Attributes:
        seconds: of them all.
        items: its blocks in the order of their forward, and what is done with each.
    """

    seconds: float
    items: tuple[ChainItem, ...]

    @property
    def operations(self) -> tuple[tuple[ChainStep, int], ...]:
        """(way, block) in their order."""
        return tuple(_operations(self.items))


def cheapest(blocks: Sequence[BlockCosts], budget: int, sizes: int = 500) -> ChainOrder:
    """The fastest order of a chain's forwards and backwards within a budget.

    Args:
        budget: bytes beside the input of the first block.
        sizes: into so many steps the budget is divided; bytes are rounded up to whole steps, so that the order keeps
            within the budget, and is the optimum where they are whole anyway.

    Raises:
        PlanError: no order fits, with the least that one needs.
    """
    table = OrderTable(blocks, budget, sizes)
    found = table.order(table.steps)
    if found is None:
        raise PlanError(
            f"A budget of {budget:,} bytes is too small for the activations of {len(blocks)} blocks; their backward "
            f"needs {least(blocks):,}, with every block but one computed again. Raise device_memory, or use smaller "
            f"microbatches."
        )
    return found


def least(blocks: Sequence[BlockCosts]) -> int:
    """The fewest bytes, beside the input of the first block, in which a chain's backward can run.

    That is with every block but one computed anew from the first input: the largest of what one backward takes, and of
    what one forward that saves nothing does.
    """
    inputs = [0, *(block.entering for block in blocks[1:])]
    backwards = (held + block.saved + block.temporary for held, block in zip(inputs, blocks, strict=True))
    return max(*backwards, *(before + after for before, after in pairwise(inputs)), 0)


class OrderTable:
    """C(s, t, m) for all s <= t and all m from 0 to `steps`.

    Args:
        budget: bytes of the largest m.
        sizes: number of steps, at most.
        alone: whether each block that is computed again is so by itself, from its own input.

    Attributes:
        steps: of memory; `step` is the bytes of one.
    """

    def __init__(self, blocks: Sequence[BlockCosts], budget: int, sizes: int = 500, alone: bool = False) -> None:
        self.steps = min(sizes, max(budget, 0))
        self.step = max(1.0, budget / sizes)
        self._blocks, self._alone = blocks, alone
        self._bytes = [[self._whole(n) for n in (each.entering, each.saved, each.temporary)] for each in blocks]
        self._forward = [block.forward for block in blocks]
        self._backward = [block.backward for block in blocks]
        self._until = np.array([0.0, *accumulate(block.forward + block.restart for block in blocks)])
        count = self._count = len(blocks)
        self._seconds = np.full((count, count, self.steps + 1), inf)
        self._after = np.full((count, count, self.steps + 1), inf)  # [t, r]: C(r, t, m - a_r)
        for length in range(count):
            for s in range(count - length):
                if not alone or length == 0 or s + length == count - 1:
                    self._fill(s, s + length)

    def order(self, steps: int) -> ChainOrder | None:
        """The fastest order within so many steps of memory; None if none fits."""
        seconds = float(self._seconds[0, self._count - 1, steps])
        return None if seconds == inf else ChainOrder(seconds, tuple(self._items(0, self._count - 1, steps)))

    def again(self, last: int, steps: int) -> tuple[ChainItem, ...] | None:
        """In which order blocks 0 to `last` are computed again within so many steps of memory; None if none fits."""
        fits = float(self._seconds[0, last, steps]) < inf
        return tuple(self._items(0, last, steps)) if fits else None

    def _whole(self, nbytes: int) -> int:
        return ceil(nbytes / self.step)

    def _fill(self, s: int, t: int) -> None:
        best = self._saving(s, t)
        for way in self._ways(s, t):
            best = np.minimum(best, self._keeping(s, t, way))
        if t > s:
            best = np.minimum(best, self._passing(s, t).min(0))
        self._seconds[s, t] = best
        self._after[t, s] = _moved(best, self._bytes[s][0])

    def _ways(self, s: int, t: int) -> tuple[OtherWay, ...]:
        return self._blocks[s].ways if t == self._count - 1 else ()

    def _rest(self, s: int, t: int) -> Times:
        return self._seconds[s + 1, t] if t > s else np.zeros(self.steps + 1)

    def _saving(self, s: int, t: int) -> Times:
        """By m, the seconds where block s saves what its backward needs."""
        _, saved, temporary = self._bytes[s]
        found = _moved(self._rest(s, t), saved) + (self._forward[s] + self._backward[s])
        found[: saved + temporary] = inf
        return found

    def _keeping(self, s: int, t: int, way: OtherWay) -> Times:
        """By m, the seconds where block s is kept in another way."""
        found = _moved(self._rest(s, t), self._whole(way.held)) + way.seconds
        found[: self._whole(way.peak)] = inf
        return found

    def _passing(self, s: int, t: int) -> Times:
        """[r - s - 1, m]: the seconds where blocks s to r - 1 save nothing at first."""
        most = s + 1 if self._alone else t
        ahead = (self._until[s + 1 : most + 1] - self._until[s])[:, None]
        found: Times = self._after[t, s + 1 : most + 1] + self._seconds[s, s:most] + ahead
        room = 0
        for r in range(s + 1, most + 1):
            before = self._bytes[r - 1][0] if r - 1 > s else 0
            room = max(room, before + self._bytes[r][0])
            found[r - s - 1, :room] = inf
        return found

    def _items(self, s: int, t: int, m: int) -> list[ChainItem]:
        """What the optimum does with each block."""
        items: list[ChainItem] = []
        while s <= t:
            wanted = float(self._seconds[s, t, m])
            if float(self._saving(s, t)[m]) == wanted:
                items.append(SavedBlock(s))
                s, m = s + 1, m - self._bytes[s][1]
                continue
            way = next((way for way in self._ways(s, t) if float(self._keeping(s, t, way)[m]) == wanted), None)
            if way is not None:
                items.append(SavedBlock(s, way))
                s, m = s + 1, m - self._whole(way.held)
                continue
            r = s + 1 + int(self._passing(s, t)[:, m].argmin())
            items.append(PassedBlocks(s, r - 1, tuple(self._items(s, r - 1, m))))
            s, m = r, m - self._bytes[r][0]
        return items


def _operations(items: Sequence[ChainItem]) -> Iterator[tuple[ChainStep, int]]:
    backwards: list[Sequence[ChainItem] | int] = []
    for item in items:
        if isinstance(item, SavedBlock):
            yield ChainStep.SAVE, item.block
            backwards.append(item.block)
        else:
            yield ChainStep.KEEP_INPUT, item.first
            yield from ((ChainStep.PASS, block) for block in range(item.first + 1, item.last + 1))
            backwards.append(item.again)
    for done in reversed(backwards):
        if isinstance(done, int):
            yield ChainStep.BACKWARD, done
        else:
            yield from _operations(done)


def _moved(values: Times, steps: int) -> Times:
    """values[m - steps] at m; infinite where there is no such m."""
    moved = np.full_like(values, inf)
    if steps < len(values):
        moved[steps:] = values[: len(values) - steps]
    return moved
