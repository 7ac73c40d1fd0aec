"""Decisions in use, and what they cost: predicted beside measured, block by block."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zeroshard.recompute.auto.decision import PassDecision
from zeroshard.recompute.auto.kept_parts import RESTART, part_of
from zeroshard.recompute.auto.meter import BlockMeasures, PassMeasures, alike
from zeroshard.recompute.auto.rotor import ChainItem, PassedBlocks, SavedBlock
from zeroshard.recompute.segments import Call


@dataclass(slots=True)
class Decided:
    """A decision in use.

    Attributes:
        decision, measures: what it is, and the forward that it was made for.
        least: the fewest bytes of such a forward.
        by_block: the item of each block, by the block's place in the forward.
        forwards: that were run so.
        again: by the name of a block, how often it had been computed again when the decision was made, the seconds, and
            those in which tensors of it had been made again.
        held: bytes that each block added to the activations in its last forward, but for the last block.
    """

    decision: PassDecision
    measures: PassMeasures
    least: int
    by_block: dict[int, ChainItem] = field(default_factory=dict)
    forwards: int = 0
    again: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in self.decision.items:
            blocks = [item.block] if isinstance(item, SavedBlock) else range(item.first, item.last + 1)
            self.by_block |= dict.fromkeys(blocks, item)

    @property
    def most(self) -> int:
        """Bytes of a forward whose blocks all take as much as the largest."""
        return len(self.measures.blocks) * max((block.saved for block in self.measures.blocks), default=0)

    def enter(self, number: int, nbytes: int) -> BlockMeasures | None:
        """Enter what a block added to the activations; its measures with that, if it is kept and they have less."""
        self.held[number] = nbytes
        blocks, item = self.measures.blocks, self.by_block[number]
        between = blocks[number + 1].kept if number + 1 < len(blocks) else 0
        more = nbytes - between - blocks[number].saved
        kept = isinstance(item, SavedBlock) and item.way is None
        return replace(blocks[number], saved=blocks[number].saved + more) if kept and more > 0 else None

    def keeps_from(self, number: int) -> bool:
        """Whether a block from `number` on keeps more than its input."""
        return any(isinstance(item, SavedBlock) for block, item in self.by_block.items() if block >= number)


def rows_of(decided: Decided, calls: Mapping[str, Call]) -> list[dict[str, Any]]:
    """A row for each block, in the order of the forward.

    Each has `block` (its path), `action` (a sentence), `saved_bytes` (that it would keep of itself), `kept_bytes` and
    `measured_kept_bytes` (between forward and backward; of the last block none is measured, nor where savers store
    blocks, as copies may be under way), `again` and `measured_again` (how often a forward is computed again),
    `again_seconds` and `measured_again_seconds` (of one forward, the measured ones the mean over the steps since the
    decision), and `stored_seconds` and `measured_stored_seconds` (that a block takes longer that is stored, of which
    none are measured, or made again in part).
    """
    rows = []
    blocks = decided.measures.blocks
    counts = _again(decided.decision.items, first=True)
    measured = alike(blocks)
    stores = any(block.stored for block in blocks)
    uses = {block.name: sum(other.name == block.name for other in blocks) for block in blocks}
    for number, block in enumerate(blocks):
        item = decided.by_block[number]
        kept = _kept(item, number, blocks)
        seconds = measured[number].seconds + RESTART
        if isinstance(item, SavedBlock) and item.way is not None:
            seconds = item.way.seconds - measured[number].seconds
        again, part = counts.get(number, 0), part_of(item)
        call, before = calls[block.name], decided.again.get(block.name, (0, 0.0, 0.0))
        divisor = max(1, decided.forwards) * uses[block.name]
        rows.append(
            {
                "block": block.name,
                "action": _action(item, number, blocks),
                "saved_bytes": block.saved,
                "kept_bytes": kept,
                "measured_kept_bytes": None if stores else decided.held.get(number),
                "again": again,
                "measured_again": (call.again[0] - before[0]) / divisor,
                "again_seconds": again * seconds,
                "measured_again_seconds": (call.again[1] - before[1]) / divisor,
                "stored_seconds": seconds if isinstance(item, SavedBlock) and again == 0 and item.way else 0.0,
                "measured_stored_seconds": None if part is not None and part.by else (call.made - before[2]) / divisor,
            }
        )
    return rows


def _again(items: tuple[ChainItem, ...], first: bool) -> dict[int, int]:
    """How often each block is computed again; in the `first` forward none is yet."""
    counts: dict[int, int] = {}
    for item in items:
        if isinstance(item, SavedBlock):
            part = part_of(item)
            computed = part is not None and part.computed
            counts[item.block] = counts.get(item.block, 0) + (computed if first else 1)
            continue
        for number in range(item.first, item.last + 1):
            counts[number] = counts.get(number, 0) + (not first)
        for number, more in _again(item.again, first=False).items():
            counts[number] = counts.get(number, 0) + more
    return counts


def _kept(item: ChainItem, number: int, blocks: list[BlockMeasures]) -> int:
    """Bytes that a block adds between forward and backward, the input of the next block among them."""
    if isinstance(item, SavedBlock):
        return blocks[number].saved if item.way is None else item.way.held
    following = blocks[number + 1].entering if number == item.last and number + 1 < len(blocks) else 0
    return following + blocks[number].sums


def _action(item: ChainItem, number: int, blocks: list[BlockMeasures]) -> str:
    if isinstance(item, PassedBlocks):
        if item.first == item.last:
            return "computed again"
        return f"computed again from the input of {blocks[item.first].name}"
    part, block = part_of(item), blocks[number]
    if part is None:
        return "kept"
    if part.by is not None:
        return part.by.how
    if not part.computed:
        return f"kept but for results of {', '.join(sorted({recipe.rule for recipe in part.remade}))}"
    kept = sorted({each.name for each in block.operations if each.number in part.operations})
    if part.first is not None:
        calls = next(each.calls for each in block.tails if each.first == part.first)
        kept.append(f"what it saves after {calls} of {block.calls} operations")
    return "computed again" + (f" but for {', '.join(kept)}" if kept else "")
