"""Blocks that keep the last tensors that they save: what leads to these alone is not computed again."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from recompute.test_recompute import SGD, WIDTH, Stack, batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from zeroshard.errors import BudgetExceeded
from zeroshard.recompute.auto import decision as chain_decision
from zeroshard.recompute.auto.dropping import KeptSegment
from zeroshard.recompute.auto.meter import BlockMeasures, SavedTail
from zeroshard.recompute.auto.ways import lower_hull, parts_of


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """An MLP with dropout at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2)


BLOCKS, STEPS = 6, 4


def tails_alone(blocks: list[BlockMeasures]) -> list[BlockMeasures]:
    """The shortest tail spares half of a block's time; nothing else does any."""
    found = []
    for block in blocks:
        shortest = min(each.nbytes for each in block.tails if each.nbytes)
        tails = tuple(replace(each, seconds=0.5 if each.nbytes >= shortest else 1.0) for each in block.tails)
        found.append(replace(block, seconds=1.0, again=1.0, tails=tails, remade=()))
    return found


def train(plan: dict[str, Any], forwards: tuple[int, ...] = (1,) * STEPS) -> dict[str, Any]:
    """Weights, the most bytes of each step, the operations of each backward, and decisions."""
    torch.manual_seed(0)
    engine = zs.Engine(Stack(BLOCKS, Block), SGD, zs.Plan.from_dict(plan))
    torch.manual_seed(1)
    peaks, calls = [], []
    for step, count in enumerate(forwards):
        with engine.trace(memory=True) as trace:
            losses = [engine(batch(step, rank, 32)) for rank in range(count)]
            with Calls() as counted:
                engine.backward(torch.stack(losses).sum())
            del losses
            engine.step()
        peaks.append(max(sum(event.nbytes.values()) for event in trace.memory))
        calls.append(counted.counts)
    decisions = engine.activation_decisions
    return {"weights": engine.state_dict(), "peaks": peaks, "calls": calls, "rows": decisions}


def same(found: dict[str, Any], kept: dict[str, Any]) -> bool:
    return all(torch.equal(value, kept["weights"][name]) for name, value in found["weights"].items())


def test_a_product_before_dropout_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_decision, "alike", tails_alone)
    kept = train({"device_memory": "1GiB"})
    states = kept["peaks"][1] - sum(row["saved_bytes"] for row in train(auto("1GiB"))["rows"])
    budget = states + (kept["peaks"][1] - states) * 2 // 3
    found = train(auto(budget))
    partly = [row for row in found["rows"] if "what it saves after" in row["action"]]
    assert same(found, kept) and max(found["peaks"][1:]) <= budget
    assert len(partly) > 1 and all(row["measured_again"] == row["again"] == 1 for row in partly)
    again = sum(row["again"] for row in found["rows"])
    for few, many in zip(kept["calls"][1:], found["calls"][1:], strict=True):  # the first layer has a bias
        assert many["aten.addmm"] - few["aten.addmm"] == again
        assert many["aten.mm"] - few["aten.mm"] == again - len(partly)
    for row in found["rows"]:
        assert row["measured_kept_bytes"] is None or row["measured_kept_bytes"] <= row["kept_bytes"]


def auto(budget: int | str) -> dict[str, Any]:
    return {"recompute": "auto", "device_memory": budget}


def test_tails_are_dropped_where_more_forwards_come_before_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_decision, "alike", tails_alone)
    forwards = (1, 1, 2, 1, 2)
    kept = train({"device_memory": "1GiB"}, forwards)
    budget = int(0.8 * kept["peaks"][1])
    found = train(auto(budget), forwards)
    assert same(found, kept) and max(found["peaks"]) <= budget < kept["peaks"][2]
    assert found["calls"][2]["aten.mm"] > kept["calls"][2]["aten.mm"]


def test_ranks_that_repeat_collectives_alike_drop_no_tails() -> None:
    def refuse(tensor: Tensor) -> Any:
        raise BudgetExceeded("no room")

    class SlotOf(KeptSegment):
        def __init__(self, drops: bool) -> None:
            region: Any = _Region(refuse)
            self._regions, self._weights = [region], set()
            self.waits = (lambda _: None) if drops else None

    slot = SlotOf(True).slot(torch.ones(3))
    assert slot.held is None
    with pytest.raises(BudgetExceeded, match="no room"):
        SlotOf(False).slot(torch.ones(3))


class _Region:
    """A region that keeps all that it saves."""

    choice, samples, dropped = None, None, False

    def __init__(self, pack: Any) -> None:
        self.hooks, self.slots = (pack, None), list[Any]()

    def drop_saved(self) -> None:
        self.dropped = True


def tail(first: int, nbytes: int, seconds: float) -> SavedTail:
    return SavedTail(first, nbytes, seconds, first)


def test_the_hull_has_no_tail_above_a_line_between_two_others() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        draws = torch.rand(8, 2, generator=generator).tolist()
        tails = [tail(n, int(1000 * nbytes), seconds) for n, (nbytes, seconds) in enumerate(draws)]
        hull = lower_hull(tails)
        assert [each.nbytes for each in hull] == sorted(each.nbytes for each in hull)
        for each in tails:
            assert each.seconds >= _line(hull, each.nbytes) - 1e-12
        for before, middle, after in zip(hull, hull[1:], hull[2:], strict=False):
            assert middle.seconds < _line([before, after], middle.nbytes)


def _line(hull: list[SavedTail], nbytes: int) -> float:
    """Seconds of the hull at so many bytes; before its first tail none are known."""
    if nbytes < hull[0].nbytes:
        return 0.0
    for before, after in pairwise(hull):
        if before.nbytes <= nbytes <= after.nbytes:
            part = (nbytes - before.nbytes) / (after.nbytes - before.nbytes)
            return before.seconds + part * (after.seconds - before.seconds)
    return hull[-1].seconds


def test_ways_spare_more_seconds_for_more_bytes() -> None:
    tails = tail(9, 40, 1.0), tail(5, 400, 0.2), tail(3, 3000, 0.1)
    ways = parts_of(BlockMeasures("block", 2.0, 50, 2000, 50, 1.5, 20, tails=tails))
    for fewer, more in pairwise(ways):
        assert fewer.held < more.held < 2000 and fewer.seconds > more.seconds
    assert [way.part.first for way in ways] == [9, 5]
