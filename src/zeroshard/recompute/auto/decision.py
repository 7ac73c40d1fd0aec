"""The way to keep each block of a forward, so that its backward is the fastest within a budget.

With f the seconds of a block's forward, and m the bytes free beside the input of block s, each way w to keep block s
holds w.held bytes until its backward, which needs w.peak bytes, and takes w.seconds more:

    C(s, m) = min over w with w.peak <= m of  w.seconds + C(s + 1, m - w.held)

That is the recursion of Rotor (Beaumont et al., 1911.13214) for orders in which each block that is computed again is so
from its own input, extended by further ways. Orders that drop inputs too were measured to spare less than 0.5 % of a
step at any budget that inputs fit in (`benchmarks/recompute_means.py`).

[Note: several forwards] Where n forwards come before the first backward (stages of a pipeline), all but one hold what
they keep between forward and backward, k bytes, while one has its backward, at most m bytes; so (n - 1) k + m must fit.
The model's last part, with the loss, is one more block of the chain: it is never computed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroshard.recompute.auto.meter import BlockMeasures, PassMeasures, alike
from zeroshard.recompute.auto.stored import SPACINGS, BySavers, ahead_of
from zeroshard.recompute.auto.ways import INPUT, RESTART, WHOLE, BlockWay, KeptPart, parts_of
from zeroshard.recompute.segments import Call

GRID = 24  # budgets that are tried for one of several forwards
SIZES = 400  # steps of memory
Times = NDArray[np.float64]  # seconds by sizes of memory; not a tensor, since a rehearsal's tensors have no values


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of decisions.

    Attributes:
        together: whether ranks decide alike, also in the middle of a step.
        stores: the choices of the plan's savers.
    """

    together: bool
    stores: tuple[BySavers, ...] = ()


@dataclass(frozen=True, slots=True)
class PassDecision:
    """The decision for one forward of the model.

    Attributes:
        ways: to keep its blocks, in their order.
        seconds: beside its forward, predicted.
        kept: bytes of its blocks between forward and backward.
        peak: bytes of the blocks at most while the backward runs.
        needs: by block, the bytes that the rest of the forward and its backward take besides.
    """

    ways: tuple[BlockWay, ...]
    seconds: float
    kept: int
    peak: int
    needs: tuple[int, ...]


class PassChain:
    """The blocks of one forward as a chain under given rules.

    Args:
        measures: of its blocks.
        forwards: how many such forwards come before the first backward.
    """

    def __init__(self, measures: PassMeasures, rules: Rules, forwards: int = 1) -> None:
        self._measures, self._rules, self._forwards = measures, rules, max(1, forwards)
        self._blocks = alike(measures.blocks)
        kinds: dict[Any, list[BlockWay]] = {}
        for each in self._blocks:
            kind = _kind(each)
            kinds[kind] = kinds[kind] if kind in kinds else parts_of(each)
        entering = [*(each.entering for each in self._blocks), 0][1:]
        self._ways = [
            [_whole(block), *kinds[_kind(block)], _input_alone(block, following)]
            for block, following in zip(self._blocks, entering, strict=True)
        ]

    @property
    def outside(self) -> int:
        """Bytes of each forward besides its blocks' kept tensors."""
        return self._measures.before + sum(each.kept for each in self._measures.blocks)

    @property
    def least(self) -> int:
        """The fewest bytes in which the forwards and backwards can run."""
        return self._total(self._inputs)

    @property
    def enough(self) -> int:
        """The bytes in which they can run with all blocks computed again, if all take as much as the largest."""
        held = [way.held for way in self._inputs]
        inputs = len(self._blocks) * max([0, *held])
        block = max([self._measures.after, *(_whole(block).peak for block in self._blocks)])
        return max(self.least, self._forwards * (self.outside + inputs) + block)

    @property
    def frugal(self) -> PassDecision:
        """The decision that takes the fewest bytes."""
        return self._decision(self._inputs)

    def decide(self, budget: int) -> PassDecision | None:
        """The fastest decision within a budget for all forwards; None if it is too small."""
        whole = [ways[0] for ways in self._ways]
        if self._total(whole) <= budget:
            return self._decision(whole)
        if self.least > budget:
            return None
        room = min(budget - self._forwards * self.outside, self._decision(whole).peak)
        found = [self.frugal]
        for ways in self._variants():
            table = WayTable(ways, self._measures.after, room)
            for steps in [table.steps] if self._forwards == 1 else _grid(table.steps):
                chosen = table.fastest(steps)
                if chosen is not None and self._total(chosen) <= budget:
                    found.append(self._decision(chosen))
        return min(found, key=lambda decision: (decision.seconds, decision.peak))

    @property
    def _inputs(self) -> list[BlockWay]:
        return [ways[-1] for ways in self._ways]

    def _variants(self) -> Iterator[list[list[BlockWay]]]:
        """The ways with none stored, or one of so many; where copies do not run beside the computation, any may be."""
        yield self._ways
        stored = [each for block in self._blocks for each in block.stored if each is not None]
        beside = any(each.down > each.own for each in stored)
        for spacing in SPACINGS if beside else SPACINGS[: bool(stored)]:
            yield [[*ways, *self._stored(number, spacing)] for number, ways in enumerate(self._ways)]

    def _stored(self, number: int, spacing: int) -> Iterator[BlockWay]:
        block, ahead = self._blocks[number], ahead_of([each.seconds for each in self._blocks], number, spacing)
        for stored, by in zip(block.stored, self._rules.stores, strict=True):
            if stored is not None and ahead is not None and stored.held + block.leaving < block.saved:
                held, peak = stored.held + block.leaving + block.sums, stored.held + _whole(block).peak
                yield BlockWay(held, peak, stored.seconds(ahead), KeptPart(0, by=by))

    def _total(self, ways: Sequence[BlockWay]) -> int:
        """Bytes of all forwards at most."""
        found = self._decision(ways)
        return self._forwards * self.outside + (self._forwards - 1) * (found.kept + self._measures.after) + found.peak

    def _decision(self, ways: Sequence[BlockWay]) -> PassDecision:
        needs, most, beside = list[int](), self._measures.after, 0
        for block, way in reversed([*zip(self._blocks, ways, strict=True)]):
            most, beside = max(way.peak, way.held + most), beside + block.kept
            needs.append(most + beside)
        seconds = sum(way.seconds for way in ways) + self._first_read(ways)
        return PassDecision(tuple(ways), seconds, sum(way.held for way in ways), most, tuple(reversed(needs)))

    def _first_read(self, ways: Sequence[BlockWay]) -> float:
        """Seconds of reading the last block that is stored, which the backward meets first: nothing runs beside it."""
        for block, way in reversed([*zip(self._blocks, ways, strict=True)]):
            if way.part.by is not None:
                costs = block.stored[way.part.by.number]
                return 0.0 if costs is None else costs.up
        return 0.0


class WayTable:
    """C(s, m) for all blocks s and all m from 0 to `steps`.

    Args:
        ways: of each block.
        after: bytes that the model saves after its last block.
        budget: bytes of the largest m.
        sizes: number of steps, at most; bytes are rounded up to whole steps, so that ways keep within the budget.
    """

    def __init__(self, ways: Sequence[Sequence[BlockWay]], after: int, budget: int, sizes: int = SIZES) -> None:
        self.steps, self._step = min(sizes, max(budget, 0)), max(1.0, budget / sizes)
        self._ways = ways
        rest = np.zeros(self.steps + 1)
        rest[: self._whole(after)] = inf
        self._chosen: list[NDArray[np.int64]] = []
        for of_block in reversed(ways):
            found = np.stack([self._keeping(way, rest) for way in of_block])
            self._chosen.insert(0, found.argmin(0))
            rest = found.min(0)
        self._seconds = rest

    def fastest(self, steps: int) -> list[BlockWay] | None:
        """The fastest ways within so many steps of memory; None if none fit."""
        if self._seconds[steps] == inf:
            return None
        found = []
        for of_block, chosen in zip(self._ways, self._chosen, strict=True):
            found.append(of_block[chosen[steps]])
            steps -= self._whole(found[-1].held)
        return found

    def _whole(self, nbytes: int) -> int:
        return ceil(nbytes / self._step)

    def _keeping(self, way: BlockWay, rest: Times) -> Times:
        """By m, the seconds where a block is kept in a way."""
        held, found = self._whole(way.held), np.full_like(rest, inf)
        if held < len(rest):
            found[held:] = rest[: len(rest) - held] + way.seconds
        found[: self._whole(way.peak)] = inf
        return found


@dataclass(slots=True)
class AppliedDecision:
    """A decision in use.

    Attributes:
        decision, measures: the decision, and the forward that it was made for.
        least: the fewest bytes of such a forward.
        forwards: that were run so.
        again: by the name of a block, how often it had been computed again when the decision was made, the seconds, and
            those in which tensors of it had been made again.
        held: bytes that each block added to the activations in its last forward, but for the last block.
    """

    decision: PassDecision
    measures: PassMeasures
    least: int
    forwards: int = 0
    again: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Bytes of a forward whose blocks all take as much as the largest."""
        return len(self.measures.blocks) * max((block.saved for block in self.measures.blocks), default=0)

    def enter(self, number: int, nbytes: int) -> BlockMeasures | None:
        """Enter a block's added bytes of activations; returns larger measures if it is kept and took more."""
        self.held[number] = nbytes
        blocks = self.measures.blocks
        block, between = blocks[number], blocks[number + 1].kept if number + 1 < len(blocks) else 0
        more = nbytes - between - block.saved
        whole = self.decision.ways[number].part.whole
        return replace(block, saved=block.saved + more) if whole and more > 0 else None

    def keeps_from(self, number: int) -> bool:
        """Whether a block from `number` on keeps more than its input."""
        return any(way.part != INPUT for way in self.decision.ways[number:])


def rows_of(applied: AppliedDecision, calls: Mapping[str, Call]) -> list[dict[str, Any]]:
    """A row for each block, in the order of the forward.

    Each has `block` (its path), `action` (a sentence), `saved_bytes` (that it would keep of itself), `kept_bytes` and
    `measured_kept_bytes` (between forward and backward; of the last block none is measured, nor where savers store
    blocks, as copies may be under way), `again` and `measured_again` (how often a forward is computed again),
    `again_seconds` and `measured_again_seconds` (of one forward, the measured ones the mean over the steps since the
    decision), and `stored_seconds` and `measured_stored_seconds` (that a block takes longer that is stored, of which
    none are measured, or made again in part).
    """
    blocks = applied.measures.blocks
    stores = any(block.stored for block in blocks)
    uses = {block.name: sum(other.name == block.name for other in blocks) for block in blocks}
    rows = []
    for number, (block, way) in enumerate(zip(blocks, applied.decision.ways, strict=True)):
        call, before = calls[block.name], applied.again.get(block.name, (0, 0.0, 0.0))
        divisor, again = max(1, applied.forwards) * uses[block.name], int(way.part.computed)
        rows.append(
            {
                "block": block.name,
                "action": _action(way.part, block),
                "saved_bytes": block.saved,
                "kept_bytes": block.saved if way.part.whole else way.held,
                "measured_kept_bytes": None if stores else applied.held.get(number),
                "again": again,
                "measured_again": (call.again[0] - before[0]) / divisor,
                "again_seconds": way.seconds if again else 0.0,
                "measured_again_seconds": (call.again[1] - before[1]) / divisor,
                "stored_seconds": 0.0 if again else way.seconds,
                "measured_stored_seconds": None if way.part.by else (call.made - before[2]) / divisor,
            }
        )
    return rows


def _action(part: KeptPart, block: BlockMeasures) -> str:
    if part.whole:
        return "kept"
    if part.by is not None:
        return part.by.how
    if part.remade:
        return f"kept but for results of {', '.join(sorted({recipe.rule for recipe in part.remade}))}"
    if part.first is None:
        return "computed again"
    calls = next(each.calls for each in block.tails if each.first == part.first)
    return f"computed again but for what it saves after {calls} of {block.calls} operations"


def _whole(block: BlockMeasures) -> BlockWay:
    """The block kept as autograd keeps it; computed again, it takes as much in its backward."""
    return BlockWay(block.saved + block.copied, block.saved + block.copied + block.sums, 0.0, WHOLE)


def _input_alone(block: BlockMeasures, following: int) -> BlockWay:
    """The block computed again from its input; the input of the `following` block is the output that it holds."""
    held = following + block.sums
    return BlockWay(held, max(held, _whole(block).peak), block.again + RESTART, INPUT)


def _kind(block: BlockMeasures) -> Any:
    """Measures on which the ways to keep a block in part depend."""
    return block.saved, block.leaving, block.sums, block.copied, block.again, block.calls, block.tails, block.remade


def _grid(steps: int) -> list[int]:
    return sorted({max(1, steps * n // GRID) for n in range(1, GRID + 1)}, reverse=True)
