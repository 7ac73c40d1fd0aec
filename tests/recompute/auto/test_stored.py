"""Blocks under recompute="auto" whose saved tensors go to the host or are compressed: chosen by times, lossless."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from inside import asked_savers_of
from offload.offloaded import EXECUTORS, executing
from planner.rehearsed import OPTIMIZERS, SHAPE, tokens
from pool import Pool
from recompute.auto import test_auto
from recompute.auto.test_auto import least_of
from recompute.test_recompute import SGD
from selection import by_default
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.errors import BudgetExceeded, PlanError
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.planner.predict.rehearse import Rehearsed, TrainingTask, rehearse
from zeroshard.recompute.auto import decision as chain_decision
from zeroshard.recompute.auto.decision import PassChain, PassDecision, Rules
from zeroshard.recompute.auto.meter import BlockMeasures, PassMeasures, alike
from zeroshard.recompute.auto.stored import DROPPABLE, BySavers, Clocks, StoredCosts, ahead_of, measured
from zeroshard.saved.savers import Savers
from zeroshard.train.gpt import GPT

WIDTH, ROWS, BLOCKS, STEPS = 16, 256, 6, 3


class Block(nn.Module):
    """An MLP with zeros behind its ReLU, dropout, and statistics of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.relu(self.up(self.norm(x)) - 1)), 0.2, self.training)


class Chain(nn.Module):
    """Blocks, and a loss that the model returns."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


def batch(step: int, rank: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def quickly_stored(blocks: list[BlockMeasures]) -> list[BlockMeasures]:
    """Times in which all that stores is fast, and what is computed again slow."""
    found = []
    for block in blocks:
        stored = tuple(None if each is None else replace(each, own=1e-3, down=0.0, up=0.0) for each in block.stored)
        tails = tuple(replace(each, seconds=1.0) for each in block.tails)
        found.append(replace(block, seconds=1.0, again=1.0, tails=tails, stored=stored))
    return found


@contextmanager
def storing() -> Iterator[None]:
    """Within, decisions are made by such times."""
    with patch.object(chain_decision, "alike", quickly_stored):
        yield


def train(plan: dict[str, Any], mesh: zs.Mesh | None = None, make: Any = Chain, steps: int = STEPS) -> dict[str, Any]:
    """What a run leaves behind; or why its budget is too small."""
    torch.manual_seed(0)
    engine = zs.Engine(make(), SGD, zs.Plan.from_dict(plan), mesh=mesh, example=(batch(0),))
    torch.manual_seed(1 + (mesh.rank if mesh else 0))
    found: dict[str, Any] = {"seen": [], "peaks": []}
    try:
        for step in range(steps):
            with engine.trace(memory=True) as trace:
                result = engine.train_step((batch(step, engine.data_rank),))
            found["peaks"].append(max(sum(event.nbytes.values()) for event in trace.memory))
            found["seen"].append((None if result.loss is None else result.loss.item(), result.grad_norm))
    except BudgetExceeded as error:
        return {"refused": str(error)}
    rows = [row for row in engine.memory() if row.tier == "device" and row.category != "activations"]
    gathers_all = plan.get("transport") == "network"
    found |= {"states": sum(row.peak_bytes for row in rows), "again": engine.recomputed}
    found |= {"rows": engine.activation_decisions, "random": torch.rand(3).tolist()}
    return found | {"weights": {} if gathers_all else engine.state_dict(), "traffic": engine.traffic()}


def same(found: dict[str, Any], kept: dict[str, Any]) -> bool:
    equal = all(torch.equal(value, kept["weights"][name]) for name, value in found["weights"].items())
    return equal and (found["seen"], found["random"]) == (kept["seen"], kept["random"])


def actions(found: dict[str, Any]) -> set[str]:
    return {row["action"] for row in found["rows"]}


COMPRESS = {"recompute": "auto", "compress": ("binarize", "sparse")}
OFFLOAD: dict[str, Any] = {"recompute": "auto", "offload": "activations"}
COMPRESSED: dict[str, Any] = {"activations": COMPRESS}
BOTH: dict[str, Any] = {**COMPRESSED, "offload": "activations"}
WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "offload": (OFFLOAD, {"sent to the host"}),
    "compress": (COMPRESSED, {"compressed"}),
    "both": (BOTH, {"sent to the host", "compressed", "compressed or sent to the host"}),
}


def budgets(kept: dict[str, Any], plan: dict[str, Any], count: int) -> list[int]:
    """Budgets from the least on, below the most bytes of a run that keeps all."""
    first = train({**plan, "device_memory": kept["states"] + 2000})
    least, highest = least_of(first["refused"]), max(kept["peaks"])
    assert least < highest
    return [least + (highest - least) * n // count for n in range(count)]


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_kept_blocks_within_each_budget(way: str) -> None:
    plan, stores = WAYS[way]
    kept, done = train({"device_memory": "1GiB"}), set[str]()
    for budget in budgets(kept, plan, 5):
        with storing():
            found = train({**plan, "device_memory": budget})
            alone = train({"recompute": "auto", "device_memory": budget})
        assert same(found, kept) and max(found["peaks"]) <= budget, (budget, found["peaks"])
        done |= actions(found)
        if actions(found) & stores and "refused" not in alone:
            assert sum(row["again"] for row in found["rows"]) < sum(row["again"] for row in alone["rows"])
            assert found["again"] < alone["again"]
    assert done & stores and done <= stores | {"kept", *(each for each in done if each.startswith("computed again"))}


def test_by_measured_times_numbers_are_the_same() -> None:
    kept = train({"device_memory": "1GiB"})
    for plan, _ in WAYS.values():
        for budget in budgets(kept, plan, 2):
            found = train({**plan, "device_memory": budget})
            assert same(found, kept) and max(found["peaks"]) <= budget


def stored_budget(kept: dict[str, Any], part: float = 0.5) -> int:
    """A budget between the states and the most bytes of a run that keeps all."""
    return round(kept["states"] + (max(kept["peaks"]) - kept["states"]) * part)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_copies_may_be_made_at_any_time(executor: str) -> None:
    kept = train({"device_memory": "1GiB"})
    budget = stored_budget(kept)
    with executing(executor), storing():
        found = train({**OFFLOAD, "device_memory": budget})
    assert same(found, kept) and max(found["peaks"]) <= budget and "sent to the host" in actions(found)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_done_is_listed(way: str) -> None:
    plan, stores = WAYS[way]
    kept = train({"device_memory": "1GiB"})
    with storing():
        found = train({**plan, "device_memory": stored_budget(kept)})
    for row in found["rows"]:
        assert (row["stored_seconds"] > 0) == (row["action"] in stores)
        if row["action"] in stores:
            assert row["again"] == row["measured_again"] == row["again_seconds"] == 0
            assert row["kept_bytes"] < row["saved_bytes"]


def test_what_comes_after_the_last_block_stays_on_the_device() -> None:
    """In the first step too, where its bytes are measured."""
    kept, found = train({"recompute": "auto", "device_memory": "1GiB"}), train({**OFFLOAD, "device_memory": "1GiB"})
    assert (
        actions(found) == {"kept"} and found["peaks"][0] >= kept["peaks"][0] and found["peaks"][1:] == kept["peaks"][1:]
    )
    assert not any(row.measured_bytes for row in found["traffic"] if "activations" in str(row.purpose))


def test_the_first_forward_holds_no_block_that_was_measured() -> None:
    """Neither the ledger nor the tensors that are alive: the graph keeps the hooks of what it saves."""
    made: list[StorageWeakRef] = []
    engine = zs.Engine(Chain(), SGD, zs.Plan.from_dict({**BOTH, "device_memory": "1GiB"}), example=(batch(0),))
    for block in engine.model.blocks:
        block.down.register_forward_pre_hook(lambda _, args: made.append(StorageWeakRef(args[0].untyped_storage())))
    loss = engine(batch(0))
    assert len(made) == BLOCKS and all(each.expired() for each in made)
    engine.backward(loss)


class Sometimes(Block):
    """Computes a part of itself again, if it is told to."""

    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return super().forward(x)
        return x + checkpoint(self.down, self.up(x).relu(), use_reentrant=False)


class PartlyLeftAlone(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Sometimes() for _ in range(BLOCKS)])
        self.blocks[3].recomputes = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.enter(x).tanh())


def test_blocks_that_are_left_alone_go_to_the_host_as_without_auto() -> None:
    """Of the others, which are kept, nothing does; nor of the last part."""
    kept = train({"device_memory": "1GiB"}, make=PartlyLeftAlone)
    found = train({**OFFLOAD, "device_memory": "1GiB"}, make=PartlyLeftAlone)
    sent = {str(row.purpose): row.measured_bytes for row in found["traffic"]}
    assert same(found, kept) and actions(found) == {"kept"}
    inside, outside = 4 * ROWS * 4 * WIDTH, 4 * ROWS * WIDTH
    assert sent["activations down"] == 3 * outside + inside  # the batch, a tanh, and what the block saves


class Denser(Block):
    """Fewer zeros behind the ReLU with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + F.dropout(self.down(F.relu(self.up(self.norm(x)) - 2 + self.calls / 2)), 0.2, self.training)


class DenserChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Denser() for _ in range(8)])


def test_blocks_whose_forms_grow_are_dropped_where_room_is_short() -> None:
    kept, dropped = train({"device_memory": "1GiB"}, make=DenserChain, steps=6), 0
    for part in (0.35, 0.45, 0.55, 0.65, 0.8):
        budget = stored_budget(kept, part)
        with storing():
            found = train({**COMPRESSED, "device_memory": budget}, make=DenserChain, steps=6)
        assert "refused" not in found, found
        assert same(found, kept) and max(found["peaks"]) <= budget
        dropped += sum(row["measured_again"] > row["again"] for row in found["rows"])
    assert dropped


@pytest.mark.parametrize("part", [0.5, 0.75])
def test_blocks_for_which_the_host_has_no_room_are_computed_again(part: float) -> None:
    def steps(plan: dict[str, Any], host: int | None = None) -> tuple[list[float], dict[str, Tensor], int, set[str]]:
        torch.manual_seed(0)
        engine = zs.Engine(Chain(), SGD, zs.Plan.from_dict(plan), example=(batch(0),))
        if host is not None:
            engine.ledger.budgets["host"] = host
        torch.manual_seed(1)
        losses = [engine.train_step((batch(step),)).loss.item() for step in range(STEPS)]
        return losses, engine.state_dict(), engine.recomputed, {row["action"] for row in engine.activation_decisions}

    kept = train({"device_memory": "1GiB"})
    with storing():
        plan = {**OFFLOAD, "device_memory": stored_budget(kept, part)}
        expected, found, none = steps(plan), steps(plan, 150_000), steps(plan, 20_000)
    for losses, weights, _, _ in (found, none):
        assert losses == expected[0] and all(torch.equal(weights[name], value) for name, value in expected[1].items())
    assert expected[2] < found[2] and "sent to the host" in found[3]
    assert found[2] < none[2] and "sent to the host" not in none[3]


class Failing(Chain):
    """Raises in the middle of its third block, if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.blocks[2].up.register_forward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        if self.fails:
            raise ValueError("in a block")


def fail(engine: zs.Engine) -> None:
    engine.model.fails = True
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="in a block"):
        engine(batch(50))
    torch.set_rng_state(state)
    engine.model.fails = False
    gc.collect()  # the traceback holds its graph


@pytest.mark.parametrize("way", WAYS)
def test_errors_in_a_block_leave_the_savers_as_they_were(way: str) -> None:
    def steps(plan: dict[str, Any], fails: bool = True) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        engine = zs.Engine(Failing(), SGD, zs.Plan.from_dict(plan), example=(batch(0),))
        torch.manual_seed(1)
        losses, asked = [], asked_savers_of(engine)
        for step in range(STEPS):
            if step and fails:
                fail(engine)
            losses.append(engine.train_step((batch(step),)).loss.item())
            assert list(asked_savers_of(engine)) == list(asked)
        return losses, engine.state_dict()

    kept = train({"device_memory": "1GiB"})
    with storing():
        losses, weights = steps({**WAYS[way][0], "device_memory": stored_budget(kept, 0.7)})
    expected = steps({"device_memory": "1GiB"}, fails=False)
    assert losses == expected[0]
    names = [name for name in weights if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(weights[name], expected[1][name]) for name in names)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_from_a_checkpoint(way: str, tmp_path: Path) -> None:
    """The first step after it measures anew."""
    plan = {**WAYS[way][0], "device_memory": stored_budget(train({"device_memory": "1GiB"}), 0.6)}
    weights = []
    with storing():
        for resumes in (False, True):
            torch.manual_seed(0)
            engine = zs.Engine(Chain(), SGD, zs.Plan.from_dict(plan), example=(batch(0),))
            torch.manual_seed(1)
            for step in range(4):
                if step == 2 and resumes:
                    engine.save(tmp_path / "saved")
                    engine = zs.Engine(Chain(), SGD, zs.Plan.from_dict(plan), example=(batch(0),))
                    engine.load(tmp_path / "saved")
                engine.train_step((batch(step),))
            weights.append(engine.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


SMALL = replace(SHAPE, layers=6, width=128)


def rehearsed(link: float, **plan: Any) -> Rehearsed:
    """A GPU's step, with so many bytes a second to its host."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return GPT(SMALL)

    device = Device("made up", "cuda", 2**31, {"fp32": 2e11}, 1e12, 2e-6, host_link=link)
    machines = Machines(device, 1, 1, Link(1e9), Link(1e9), None, host_bandwidth=1e11)
    job = TrainingTask(build, lambda rows: tokens(rows, SMALL), OPTIMIZERS["adamw"], 8, SMALL.context)
    return rehearse(job, zs.Plan(**plan), 0, 1, 8, machines)


def test_a_rehearsal_decides_by_the_link() -> None:
    """A fast one takes no time; with a slow one blocks are computed again, as if there were no host."""
    kept = rehearsed(1e10)
    states = sum(nbytes for name, nbytes in kept.states.items() if name != "activations")
    auto: dict[str, Any] = {"recompute": "auto", "device_memory": states + (kept.peak_bytes - states) // 2}
    seconds = {link: sum(rehearsed(link, **auto, offload="activations").spent.values()) for link in (5e8, 3e10)}
    again, all_kept = sum(rehearsed(1e10, **auto).spent.values()), sum(kept.spent.values())
    assert all_kept <= seconds[3e10] < all_kept + 0.1 * (again - all_kept)
    assert again <= seconds[5e8] < 1.02 * again


class Recorded:
    """A saver that keeps every other tensor as it is, and takes the rest; its clock runs with each copy."""

    moves, how, varies = True, "recorded", False

    def __init__(self, refuses: bool = False) -> None:
        self.ledger, self.seconds, self.refuses, self.alive = Ledger(), 0.0, refuses, 0

    def pack(self, tensor: Tensor) -> Any:
        if self.refuses:
            raise BudgetExceeded("no room on the host")
        if tensor.numel() % 2:
            return None
        self.seconds += 2.0
        self.ledger.take(Category.ACTIVATIONS, tensor.nbytes // 4, "a form")
        self.alive += 1
        return [self, tensor.clone()]

    def unpack(self, saved: Any) -> Tensor:
        self.ledger.give(Category.ACTIVATIONS, saved[1].nbytes // 4, "a form")
        self.alive -= 1
        self.seconds += 1.0
        return saved[1]

    def settle(self) -> None:
        """Nothing is under way."""


def clocks(saver: Recorded, known: tuple[int, ...] = ()) -> Clocks:
    held = lambda: saver.ledger.account(Category.ACTIVATIONS).current  # noqa: E731

    def ready() -> float:
        saver.seconds += 0.25  # of what is under way on the device
        return saver.seconds

    return Clocks(lambda: saver.seconds, ready, held, known)


def test_storing_is_measured_storage_by_storage() -> None:
    saver = Recorded()
    savers = Savers([saver])
    savers.asked = ()
    taken, stays, whole = torch.zeros(64), torch.zeros(33), torch.zeros(128)
    found = measured(savers, 0, [taken, stays, whole[:64], whole[64:]], clocks(saver))
    assert found is not None and savers.asked == () and not saver.alive
    assert found.held == (taken.nbytes + whole.nbytes) // 4 + stays.nbytes
    assert found.own == 3 * 2.0 + 3 * 1.0 and found.down == 3 * 0.25 and found.up == 2 * 0.25
    known = (stays.untyped_storage()._cdata,)
    again = measured(savers, 0, [taken, stays], clocks(saver, known))
    assert again is not None and again.held == taken.nbytes // 4


def test_copies_under_way_of_others_do_not_count() -> None:
    class Sends(Recorded):
        sent = 1000

        def settle(self) -> None:
            self.ledger.give(Category.ACTIVATIONS, self.sent, "a source")
            self.sent = 0

    saver, tensor = Sends(), torch.zeros(64)
    saver.ledger.take(Category.ACTIVATIONS, saver.sent, "a source")
    found = measured(Savers([saver]), 0, [tensor], clocks(saver))
    assert found is not None and found.held == tensor.nbytes // 4


def test_what_is_not_stored_has_no_costs() -> None:
    saver = Recorded()
    savers = Savers([saver])
    assert measured(savers, 0, [torch.zeros(33)], clocks(saver)) is None
    assert measured(savers, 0, [], clocks(saver)) is None
    saver.refuses = True
    savers.asked = ()
    assert measured(savers, 0, [torch.zeros(64)], clocks(saver)) is None and savers.asked == ()


def test_seconds_beside_the_computation() -> None:
    costs = StoredCosts(100, 1.0, 5.0, 3.0)
    found = [costs.seconds(ahead) - DROPPABLE for ahead in (0.0, 3.0, 4.9, 5.0)]
    assert found == pytest.approx([9.0, 9.0, 9.0, 1.0])
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [ahead_of(seconds, number, 1) for number in range(5)] == [2.0, 3.0, 4.0, 5.0, 0]
    assert [ahead_of(seconds, number, 2) for number in range(5)] == [5.0, None, 9.0, None, None]
    assert [ahead_of(seconds, number, 3) for number in range(5)] == [None, 12.0, None, None, None]


MIB = 2**20


def decided(blocks: list[BlockMeasures], budget: int) -> PassDecision:
    stores = tuple(BySavers(number, "stored") for number in range(len(blocks[0].stored)))
    found = PassChain(PassMeasures(blocks), Rules(False, stores)).decide(budget)
    assert found is not None
    return found


def stored_blocks(decision: PassDecision) -> dict[int, int]:
    """By the number of a block that savers store, the number of their choice."""
    by = {number: way.part.by for number, way in enumerate(decision.ways)}
    return {number: each.number for number, each in by.items() if each is not None}


def chain(costs: StoredCosts, count: int = 12, seconds: float = 1.0) -> list[BlockMeasures]:
    """Blocks that save 10 MiB, of which 1 MiB are their output."""
    return [BlockMeasures("", seconds, MIB, 10 * MIB, MIB, seconds, 10, stored=(costs,)) for _ in range(count)]


def test_a_fast_link_takes_all_that_has_no_room() -> None:
    blocks = chain(StoredCosts(0, 0.01, 0.5, 0.5))  # beside the second of the next block
    found = decided(blocks, 40 * MIB)
    assert len(stored_blocks(found)) >= 9 and found.peak <= 40 * MIB
    assert found.seconds == pytest.approx(
        (0.01 + DROPPABLE) * len(stored_blocks(found)) + 0.5
    )  # the last is read by itself


@pytest.mark.parametrize("copies, spacing, budget", [(1.9, 2, 90), (2.9, 3, 96)])
def test_a_slow_link_takes_one_of_several_blocks(copies: float, spacing: int, budget: int) -> None:
    blocks = chain(StoredCosts(0, 0.01, copies, copies))
    found = decided(blocks, budget * MIB)
    stored = stored_blocks(found)
    assert stored and all(n < 11 and (11 - n) % spacing == 0 for n in stored)
    assert found.seconds == pytest.approx((0.01 + DROPPABLE) * len(stored) + copies)  # the last is read by itself


def test_a_link_slower_than_the_computation_takes_nothing() -> None:
    blocks = chain(StoredCosts(0, 0.01, 20.0, 20.0))
    found = decided(blocks, 60 * MIB)
    assert not stored_blocks(found) and found.seconds > 4
    assert not stored_blocks(decided(chain(StoredCosts(0, 3.0, 0.0, 0.0)), 60 * MIB))  # in the thread, as on a CPU


def test_each_block_gets_the_choice_that_is_the_best_for_it() -> None:
    """Compressed forms stay on the device; where that leaves too little room, the host has the rest."""
    forms, host = StoredCosts(5 * MIB, 0.01, 0.0, 0.0), StoredCosts(0, 0.1, 0.0, 0.0)
    blocks = [replace(each, stored=(forms, host, None)) for each in chain(host)]
    for budget, chosen in ((110, {0}), (60, {0, 1}), (22, {1})):
        assert set(stored_blocks(decided(blocks, budget * MIB)).values()) == chosen, budget


def test_what_stores_too_little_is_no_choice() -> None:
    blocks = chain(StoredCosts(9 * MIB, 0.0, 0.0, 0.0))
    assert not stored_blocks(decided(blocks, 60 * MIB))


def test_ranks_agree_on_the_larger_bytes() -> None:
    ours, theirs = StoredCosts(5, 1.0, 2.0, 3.0), StoredCosts(7, 4.0, 4.0, 4.0)
    block = chain(ours, 1)[0]
    first = replace(block, stored=(ours, ours, None))
    assert first.highest(replace(block, stored=(theirs, None, theirs))).stored == (replace(ours, held=7), None, None)


def test_the_fastest_of_a_kind_counts() -> None:
    first, second = (chain(StoredCosts(n, 4.0 - n, n, 1.0), 1)[0] for n in (1, 2))
    assert [each.stored for each in alike([first, second])] == [
        (StoredCosts(1, 2.0, 1.0, 1.0),), (StoredCosts(2, 2.0, 1.0, 1.0),)
    ]  # fmt: skip


def test_lossy_codes_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        zs.Plan(activations=zs.Activations("auto", compress=("binarize", "fp8")), device_memory="1GiB")
    assert str(caught.value) == (
        "activations.recompute='auto' and activations.compress='fp8' do not combine: times decide what is stored, so "
        "runs would round other tensors. Use 'binarize', 'sparse' and 'inplace', or activations.recompute='off', "
        "'blocks', 'sqrt' or 'selective'."
    )


def run_all(mesh: zs.Mesh, plans: list[dict[str, Any]], make: Any = Chain) -> list[dict[str, Any]]:
    with storing():
        return [train(plan, mesh, make) for plan in plans]


SPLIT: list[dict[str, Any]] = [
    {"zero": 1}, {"zero": 3, "transport": "network"},
    {"zero": 1, "pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.schedule": "1f1b",
     "pipeline_parallel.split": ("blocks.3",)},
]  # fmt: skip


@pytest.mark.parametrize("case", by_default(SPLIT, *SPLIT), ids=str)
def test_on_two_ranks(pool: Pool, case: dict[str, Any]) -> None:
    kept = [each[0] for each in pool.run(run_all, 2, [{**case, "device_memory": "1GiB"}])]
    states, highest = max(each["states"] for each in kept), max(max(each["peaks"]) for each in kept)
    parts = [states + (highest - states) * part // 16 for part in (10, 12)]
    plans = [{**case, **plan, "device_memory": budget} for plan in (OFFLOAD, BOTH) for budget in parts]
    done = set[str]()
    for answers, expected in zip(pool.run(run_all, 2, plans), kept, strict=True):
        for found, plan in zip(answers, plans, strict=True):
            assert "refused" not in found, found
            assert same(found, expected) and max(found["peaks"]) <= plan["device_memory"]
            done |= actions(found)
    assert "sent to the host" in done


def run_gpt(mesh: zs.Mesh, plans: list[dict[str, Any]]) -> list[Any]:
    with storing():
        return test_auto.run_all(mesh, "gpt", plans, (64,))


def test_with_layers_split_over_ranks(pool: Pool) -> None:
    case = {"zero": 1, "tensor_parallel": 2}
    kept = [each[0] for each in pool.run(run_gpt, 2, [{**case}])]
    states, highest = max(int(each[4]) for each in kept), max(max(each[2]) for each in kept)
    budget = (states + highest) // 2
    found = pool.run(run_gpt, 2, [{**case, **OFFLOAD, "device_memory": budget}])
    for answers, expected in zip(found, kept, strict=True):
        assert not isinstance(answers[0], str), answers
        assert test_auto.same(answers[0], expected) and max(answers[0][2]) <= budget
        assert "sent to the host" in {row["action"] for row in answers[0][5]}
