"""One order for all ranks: merged records, and gathers that match whatever each rank uses."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zeroshard.comm.collectives import Purpose
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CommError
from zeroshard.memory.ledger import Ledger
from zeroshard.parts.weights import PassKind, Residence
from zeroshard.units import Flat, Unit, find_units
from zeroshard.zero import ByPass
from zeroshard.zero.gather_order import merge
from zeroshard.zero.weights import OnDevice, Sliced

RECORDS = st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=5)
UNITS = 4
PROPERTY = settings(derandomize=True, deadline=None)


def holds(long: list[int], short: list[int]) -> bool:
    """Whether `short` is a subsequence of `long`."""
    rest = iter(long)
    return all(word in rest for word in short)


@PROPERTY
@given(RECORDS)
def test_merged_holds_every_record(records: list[list[int]]) -> None:
    merged = merge(records)
    assert all(holds(merged, record) for record in records)
    assert max(map(len, records), default=0) <= len(merged) <= sum(map(len, records))
    assert merge(records) == merged
    assert merge([merged, *records]) == merged


@PROPERTY
@given(st.lists(st.integers(0, 4), max_size=8), st.integers(1, 5))
def test_equal_records_stay_as_they_are(record: list[int], ranks: int) -> None:
    assert merge([record] * ranks) == record


@settings(derandomize=True, deadline=None, max_examples=60)
@given(*[st.lists(st.integers(0, 2), max_size=4)] * 2)
def test_two_records_are_merged_without_waste(a: list[int], b: list[int]) -> None:
    merged = merge([a, b])
    for length in range(len(merged)):
        assert not any(holds(word, a) and holds(word, b) for word in map(list, product(range(3), repeat=length)))


def test_typed_merges() -> None:
    assert merge([]) == merge([[], []]) == []
    assert merge([[0, 1, 3], [0, 2, 3]]) in ([0, 1, 2, 3], [0, 2, 1, 3])
    assert merge([[3, 0, 1, 2], [3, 0, 2], [3, 0, 1]]) == [3, 0, 1, 2]
    assert merge([[0, 0], [0]]) == [0, 0]


class Arriving:
    """A gather under way: `full` gets its values when somebody waits."""

    def __init__(self, full: Tensor, values: Tensor) -> None:
        self.full, self.values = full, values

    def wait(self) -> None:
        self.full.copy_(self.values)


class FakeComm:
    """One of two ranks, alone: it logs what it gathers, and hears from the others what the test says."""

    def __init__(self, rank: int, values: dict[str, Tensor]) -> None:
        self.mesh, self.shared = Mesh(rank, 2), None
        self.log: list[tuple[Purpose, str]] = []
        self.records: list[list[int]] = []
        self._values = values

    def gather(self, full: Tensor, own: Tensor, purpose: Purpose, label: str, padding: int, bounds: Any) -> Any:
        self.log.append((purpose, label))
        return Arriving(full, self._values[label])

    def agree(self, mine: bytes, label: str) -> list[bytes]:
        return [mine, mine]

    def agree_on(self, record: list[int], label: str) -> list[list[int]]:
        assert record in self.records
        return self.records


class Rank:
    """A gatherer of UNITS + 1 units (root last) on one rank, with real shards."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"blocks": nn.ModuleList([nn.Linear(3, 3) for _ in range(UNITS)]), "head": nn.LayerNorm(3)}
        )
        self.units: list[Unit] = find_units(model)
        self.values: dict[str, Tensor] = {}
        self.comm: Any = FakeComm(rank, self.values)
        self.shards = [[self._shard(unit)] for unit in self.units]
        self.gatherer = ByPass(self.units, self.shards, self.comm)

    def _shard(self, unit: Unit) -> Sliced:
        flat = Flat(unit, unit.parameters, torch.float32, trainable=True, ranks=2)
        values = torch.zeros(flat.index.padded_numel)
        for number, parameter in enumerate(flat.parameters):
            flat.view(values, number).copy_(parameter.detach())
        self.values[flat.label] = values
        shard = Sliced(flat, self.comm, Ledger(), OnDevice(torch.device("cpu"), Ledger()))
        shard.load(values)
        return shard

    def use(self, number: int) -> None:
        """One unit's forward: needed, looked at, done."""
        self.gatherer.need(number)
        for shard in self.shards[number]:
            assert shard.residence is Residence.GATHERED
            for place, parameter in enumerate(shard.flat.parameters):
                assert torch.equal(parameter, shard.flat.view(self.values[shard.flat.label], place))
        self.gatherer.done(number)

    def walk(self, kind: PassKind, uses: list[int], records: list[list[int]]) -> list[tuple[Purpose, str]]:
        """A whole pass, after which nothing may be left; what it gathered."""
        self.comm.records, self.comm.log = records, []
        self.gatherer.begin(kind)
        for number in uses:
            self.use(number)
        self.gatherer.end()
        assert all(shard.residence is Residence.SLICED for shards in self.shards for shard in shards)
        return self.comm.log


REGISTERED = [UNITS, *range(UNITS)]  # the root is used first and has the last number
SOME = st.lists(st.sampled_from(REGISTERED), unique=True).map(lambda chosen: [n for n in REGISTERED if n in chosen])


def backwards(uses: list[int]) -> list[int]:
    """The other way round, but for the root, which surrounds the others and comes first there too."""
    return sorted(uses, key=lambda n: (n != UNITS, -n))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(SOME, SOME)
def test_ranks_that_skip_different_units_gather_the_same(first: list[int], second: list[int]) -> None:
    for kind in PassKind:
        uses = [backwards(first), backwards(second)] if kind is PassKind.BACKWARD else [first, second]
        ranks = [Rank(0), Rank(1)]
        for step in range(3):
            if step == 0 and kind is not PassKind.FORWARD:
                for rank, mine in zip(ranks, (first, second), strict=True):
                    rank.walk(PassKind.FORWARD, mine, [first, second])
            logs = [rank.walk(kind, mine, uses) for rank, mine in zip(ranks, uses, strict=True)]
            assert logs[0] == logs[1]
            if step > 0:
                labels = [label for _, label in logs[0]]
                assert len(labels) == len(set(labels)) == len(set(first) | set(second))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, UNITS), max_size=8))
def test_any_order_of_use_is_learnt(uses: list[int]) -> None:
    """Units used twice, in a row too, and against the order of registration; the same on both ranks."""
    ranks = [Rank(0), Rank(1)]
    for step in range(3):
        logs = [rank.walk(PassKind.FORWARD, uses, [uses, uses]) for rank in ranks]
        assert logs[0] == logs[1]
        if step > 0:
            labels = [ranks[0].units[number].label for number in uses]
            assert [label.partition("[")[0] for _, label in logs[0]] == labels


@PROPERTY
@given(
    st.lists(st.integers(0, UNITS), max_size=8),
    st.lists(st.tuples(*[st.lists(st.booleans(), min_size=8, max_size=8)] * 2)),
)
def test_ranks_may_leave_out_parts_of_what_was_learnt(
    order: list[int], steps: list[tuple[list[bool], list[bool]]]
) -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.walk(PassKind.FORWARD, order, [order, order])
    for masks in steps:
        logs = []
        for rank, mask in zip(ranks, masks, strict=True):
            logs.append(rank.walk(PassKind.FORWARD, [n for n, kept in zip(order, mask, strict=False) if kept], []))
        assert logs[0] == logs[1] and len(logs[0]) == len(order)


def test_a_block_called_twice_in_a_row() -> None:
    rank = Rank(0)
    for _ in range(3):
        log = rank.walk(PassKind.FORWARD, [4, 0, 0, 1], [[4, 0, 0, 1]] * 2)
    assert [label.partition("[")[0] for _, label in log] == ["root", "blocks.0", "blocks.0", "blocks.1"]


def test_the_next_unit_is_under_way_while_one_is_used() -> None:
    rank = Rank(0)
    rank.walk(PassKind.FORWARD, REGISTERED, [REGISTERED] * 2)
    rank.gatherer.begin(PassKind.FORWARD)
    for place, number in enumerate(REGISTERED):
        rank.gatherer.need(number)
        states = [rank.shards[n][0].residence for n in REGISTERED]
        expected = [Residence.SLICED] * place + [Residence.GATHERED, Residence.GATHERING]
        assert states == (expected + [Residence.SLICED] * UNITS)[: UNITS + 1]
        rank.gatherer.done(number)
    rank.gatherer.end()


def test_the_backward_starts_from_the_reversed_forward() -> None:
    rank = Rank(0)
    rank.walk(PassKind.FORWARD, [4, 2, 0], [[4, 2, 0]] * 2)
    rank.walk(PassKind.BACKWARD, [0, 2, 4], [[0, 2, 4]] * 2)
    assert rank.gatherer.orders == {
        "forward": ["root", "blocks.2", "blocks.0"],
        "backward": ["blocks.0", "blocks.2", "root"],
    }


@pytest.mark.parametrize(
    "kind, purpose", [(PassKind.FORWARD, Purpose.GATHER_PARAMETERS), (PassKind.EVALUATION, Purpose.GATHER_TO_EVALUATE)]
)
def test_gathers_are_booked_by_purpose(kind: PassKind, purpose: Purpose) -> None:
    assert {booked for booked, _ in Rank(0).walk(kind, [4, 1], [[4, 1]] * 2)} == {purpose}


def test_pinned_units_stay_and_go_together() -> None:
    rank = Rank(0)
    rank.gatherer._pin()
    assert rank.gatherer.all_gathered
    rank.use(2)
    assert rank.gatherer.all_gathered and len(rank.comm.log) == UNITS + 1
    rank.gatherer._unpin()
    assert not rank.gatherer.all_gathered


def test_a_unit_that_another_rank_wants_alone_is_gathered_before_a_pass_and_learnt() -> None:
    rank = Rank(0)
    rank.walk(PassKind.FORWARD, [4, 1, 3], [[4, 1, 3]] * 2)
    rank.walk(PassKind.BACKWARD, [4, 3, 1], [[4, 3, 1]] * 2)
    answers = iter(["unit 2 forward", "unit 0 forward", None])

    def agree(mine: bytes, label: str) -> list[bytes]:
        theirs = next(answers, None)
        return [mine, mine if theirs is None else theirs.ljust(len(mine)).encode()]

    rank.walk(PassKind.FORWARD, [4, 1, 3], [])
    rank.comm.agree, rank.comm.log = agree, []
    rank.gatherer.begin(PassKind.BACKWARD)
    assert [label.partition("[")[0] for _, label in rank.comm.log] == ["blocks.2", "blocks.0"]
    assert all(shards[0].residence is Residence.SLICED for shards in rank.shards)
    rank.gatherer.end()
    rank.walk(PassKind.FORWARD, [4, 1, 3], [])
    names = {kind: " ".join(order).replace("blocks.", "") for kind, order in rank.gatherer.orders.items()}
    assert names == {"forward": "root 0 1 2 3", "backward": "root 3 2 1 0"}


def test_a_unit_that_this_rank_wants_alone_comes_after_the_rest_of_the_list() -> None:
    rank = Rank(0)
    rank.walk(PassKind.FORWARD, [4, 1, 3], [[4, 1, 3]] * 2)
    rank.comm.log = []
    rank.gatherer.begin(PassKind.FORWARD)
    rank.use(4)
    rank.comm.agree = lambda mine, label: [mine, b"backward 3".ljust(len(mine))]
    for number in (2, 1, 3):
        rank.use(number)
    assert [label.partition("[")[0] for _, label in rank.comm.log] == [
        *("root", "blocks.1", "blocks.3"),
        *("blocks.2", "blocks.1", "blocks.3"),
    ]
    rank.gatherer.end()


def test_ranks_that_begin_different_passes_are_named() -> None:
    rank = Rank(0)
    rank.comm.agree = lambda mine, label: [mine, b"evaluation 1".ljust(32)]
    rank.comm.records = [[], ["ValueError: bad"]]  # errors after which the ranks went on
    with pytest.raises(CommError, match="rank 0 begins pass 'forward 1', rank 1 pass 'evaluation 1'") as told:
        rank.gatherer.begin(PassKind.FORWARD)
    assert str(told.value).endswith("Rank 1 had gone on after an error in a pass (ValueError: bad).")
