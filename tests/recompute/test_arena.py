"""M_D of ZeRO-R: checkpoints in one buffer, bit for bit, without allocations after the first step."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.memory.ledger import Category
from zeroshard.planner.predict.memory_tracker import Tracker
from zeroshard.recompute.arena import Lifetime, layout_of, lifetimes_of, most_alive
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

ROWS, TOKENS, WIDTH, LAYERS = 4, 16, 32, 4
INPUT = 4 * TOKENS * WIDTH  # bytes of a row's input of a block
BLOCKS = {"activations.recompute": "blocks", "activations.arena": True}
SQRT = {"activations.recompute": "sqrt", "activations.arena": True}
STAGES = {"pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.schedule": "1f1b",
          "pipeline_parallel.split": ("blocks.2",)}  # fmt: skip


def model(dropout: float = 0.1) -> GPT:
    torch.manual_seed(3)
    return GPT(GPTConfig(vocabulary=64, context=TOKENS, width=WIDTH, layers=LAYERS, heads=4, dropout=dropout))


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(64, (2, rows, TOKENS), generator=torch.Generator().manual_seed(step))
    return x, y


def engine_of(plan: dict[str, Any], mesh: zs.Mesh | None = None, trained: nn.Module | None = None) -> zs.Engine:
    made = zs.Plan.from_dict({"device_memory": "1GiB", **plan})
    sgd = partial(torch.optim.SGD, lr=0.1)
    example = tuple(each[:1] for each in batch(0))
    return zs.Engine(trained or model(), sgd, made, mesh=mesh or zs.Mesh(), example=example)


def train(mesh: zs.Mesh, plan: dict[str, Any], rows: tuple[int, ...] = (ROWS,) * 4) -> Any:
    """Weights after steps of so many rows, and the use of the arena."""
    torch.manual_seed(5)
    engine = engine_of(plan, mesh)
    for step, each in enumerate(rows):
        engine.train_step(batch(step, each))
    return engine.state_dict(), engine.checkpoint_arena


def without(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key != "activations.arena"}


def in_stages(schedule: str, recompute: str, **more: Any) -> dict[str, Any]:
    """A plan of two stages with an arena."""
    chosen = {"pipeline_parallel.schedule": schedule, "activations.recompute": recompute, "activations.arena": True}
    return {**STAGES, **chosen, **more}


TWO_CHUNKS = {"pipeline_parallel.virtual_stages": 2, "pipeline_parallel.split": ("blocks.1", "blocks.2", "blocks.3")}
CHUNKS = {  # whole chunks are computed again
    "gpipe": in_stages("gpipe", "schedule"),
    "1f1b": in_stages("1f1b", "blocks"),
    "interleaved": in_stages("interleaved", "blocks", **TWO_CHUNKS),
    "zb-h1": in_stages("zb-h1", "blocks"),
}
PLANS = {
    "blocks": (1, BLOCKS),
    "sqrt": (1, {**SQRT, "microbatches": 2}),
    "zero 3": (2, {**BLOCKS, "zero": 3, "transport": "network"}),
    "stages": (2, {**SQRT, **STAGES}),
    "two chunks in segments": (2, in_stages("interleaved", "sqrt", **TWO_CHUNKS)),
    "P_a": (2, {**BLOCKS, "tensor_parallel": 2, "tensor_parallel.sequence": False, "activations.partition": True}),
}


@pytest.mark.parametrize("ranks, plan", PLANS.values(), ids=PLANS)
def test_results_are_those_without_it_and_one_buffer_is_made(pool: Pool, ranks: int, plan: dict[str, Any]) -> None:
    run = (lambda plan: pool.run(train, ranks, plan)) if ranks > 1 else (lambda plan: [train(zs.Mesh(), plan)])
    for (weights, none), (weights_again, use) in zip(run(without(plan)), run(plan), strict=True):
        assert none is None
        assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
        assert (use.buffers, use.outside) == (1, 0) and use.checkpoints > 0
        assert use.live_bytes <= use.nbytes <= 1.01 * use.live_bytes


def train_chunks(mesh: zs.Mesh, plan: dict[str, Any], rows: tuple[int, ...]) -> Any:
    """Losses and weights; the use of the arena; the storages that inputs of chunks lay in, by step, with their bytes;
    and bytes of scratch and activations that the ledger counts after each step."""
    torch.manual_seed(5)
    engine, trained = engine_of(plan, mesh), []
    places: list[set[tuple[int, int]]] = []
    for name in plan["pipeline_parallel.split"][1 - mesh.rank :: 2]:
        norm = engine.model.get_submodule(f"{name}.attention_norm")
        norm.register_forward_pre_hook(lambda _, args: places[-1].add(place(args[0])))
    counted = []
    for step, each in enumerate(rows):
        places.append(set())
        trained.append(engine.train_step(batch(step, each)).loss)
        counted.append([engine.ledger.account(of).current for of in (Category.BUFFERS, Category.ACTIVATIONS)])
        places.append(set())
        with torch.no_grad():
            engine(batch(step, 1)[0])
        places.pop()
    return trained, engine.state_dict(), engine.checkpoint_arena, places, counted


def place(tensor: Tensor) -> tuple[int, int]:
    """The address and the bytes of the storage that a tensor lies in."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@pytest.mark.parametrize("plan", CHUNKS.values(), ids=CHUNKS)
def test_inputs_of_chunks_arrive_in_one_buffer(pool: Pool, plan: dict[str, Any]) -> None:
    rows = (ROWS,) * 4
    plain, planned = (pool.run(train_chunks, 2, each, rows) for each in (without(plan), plan))
    for rank, (mine, other) in enumerate(zip(planned, plain, strict=True)):
        assert mine[0] == other[0] and all(torch.equal(mine[1][key], other[1][key]) for key in other[1])
        use, places, counted = mine[2:]
        chunks = len(plan["pipeline_parallel.split"]) // 2 + rank  # the first takes the batch
        assert (use.checkpoints, use.outside) == (4 * chunks, 0)
        assert use.nbytes == use.live_bytes and use.nbytes % INPUT == 0  # of one row; nothing is wasted
        assert use.buffers == (chunks > 0)
        assert all(step == places[1] and len(step) == use.buffers for step in places[1:])
        assert all(nbytes == use.nbytes for _, nbytes in places[1])
        assert counted == [[counted[0][0], use.nbytes]] * 4  # the buffer is made at the end of the first step
        saved = other[4][0][0] - counted[0][0]
        assert saved >= use.nbytes if chunks else saved == 0  # they took as much among the messages


def test_chunks_of_other_shapes_are_planned_anew(pool: Pool) -> None:
    rows = (4, 4, 8, 8, 4)
    plain, planned = (pool.run(train_chunks, 2, each, rows) for each in (without(CHUNKS["gpipe"]), CHUNKS["gpipe"]))
    for mine, other in zip(planned, plain, strict=True):
        assert mine[0] == other[0] and all(torch.equal(mine[1][key], other[1][key]) for key in other[1])
    use, places = planned[1][2:4]
    assert (use.nbytes, use.live_bytes, use.buffers, use.outside) == (8 * INPUT, 4 * INPUT, 2, 8)
    assert [len(step) for step in places] == [4, 1, 4, 1, 4] and places[3] == {(next(iter(places[3]))[0], 8 * INPUT)}


def left_after_forward(engine: zs.Engine, step: int) -> tuple[int, int]:
    """Bytes that a forward allocates and that live on; and those of activations that the ledger counts."""
    with Tracker() as tracker:
        loss = engine(*batch(step))
        use = engine.checkpoint_arena
        left = tracker.current - (use.nbytes if use else 0)  # which the tracker meets in its first view
    counted = engine.ledger.account(Category.ACTIVATIONS).current
    engine.backward(loss)
    engine.step()
    return left, counted


def test_no_checkpoint_is_allocated_after_the_first_step() -> None:
    plain, engine = engine_of(without(BLOCKS), trained=model(0.0)), engine_of(BLOCKS, trained=model(0.0))
    first = left_after_forward(engine, 0)
    assert first == left_after_forward(plain, 0)
    for step in (1, 2):
        left, counted = left_after_forward(engine, step)
        assert left == first[0] - LAYERS * ROWS * INPUT
        assert counted == first[1]  # the buffer's bytes are those of the checkpoints
    use = engine.checkpoint_arena
    assert use is not None and use.nbytes == use.live_bytes == LAYERS * ROWS * INPUT
    assert engine.ledger.account(Category.ACTIVATIONS).current == use.nbytes


def test_other_shapes_are_planned_anew() -> None:
    rows = (2, 2, 4, 4, 2, 1, 4, 4)
    weights, _ = train(zs.Mesh(), without(BLOCKS), rows)
    weights_again, use = train(zs.Mesh(), BLOCKS, rows)
    assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
    assert (use.buffers, use.nbytes, use.live_bytes) == (2, 4 * LAYERS * INPUT, 4 * LAYERS * INPUT)
    assert use.outside == 4 * LAYERS  # in the steps of other rows than the one before


def after_three_steps(plan: zs.Plan) -> zs.Engine:
    torch.manual_seed(5)
    engine = engine_of(plan)
    for step in range(3):
        engine.train_step(batch(step))
    return engine


def two_graphs_of_one_step(engine: zs.Engine) -> None:
    kept = engine(*batch(3))
    engine.backward(engine(*batch(4)))
    engine.backward(kept)
    engine.step()


def a_graph_that_outlives_its_step(engine: zs.Engine) -> None:
    kept = engine(*batch(3))
    engine.train_step(batch(4))
    with pytest.raises(zs.PlanError, match="1 update"):
        engine.backward(kept)


@pytest.mark.parametrize("act", [two_graphs_of_one_step, a_graph_that_outlives_its_step])
def test_graphs_kept_for_longer_change_no_values(act: Callable[[zs.Engine], None]) -> None:
    found = []
    for plan in (without(BLOCKS), BLOCKS):
        engine = after_three_steps(plan)
        act(engine)
        for step in (5, 6):
            engine.train_step(batch(step))
        found.append(engine.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


class Remembers(nn.Module):
    """A block that holds its last input."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """A linear map."""
        self.last = x
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Four such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.Sequential(*(Remembers() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the last block's output."""
        return self.blocks(self.first(x)).mean()


def test_inputs_that_a_module_holds_stay_what_they_were() -> None:
    trained = Chain()
    plan = zs.Plan.from_dict(BLOCKS)
    engine = zs.Engine(trained, partial(torch.optim.SGD, lr=0.1), plan)
    for step in range(3):
        engine.train_step(torch.full((64, 32), float(step)))
    held = [block.last.clone() for block in trained.blocks]  # type: ignore[union-attr,operator]
    lasts = [block.last for block in trained.blocks]
    engine.train_step(torch.full((64, 32), 9.0))
    assert all(torch.equal(mine, last) for mine, last in zip(held, lasts, strict=True))  # type: ignore[arg-type]


class Tagged(Tensor):
    """A class of its own."""


class Scaled(nn.Module):
    """A block that takes a weight of the model, and an input of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, scale: Tensor, tagged: Tensor) -> Tensor:
        """A linear map, scaled."""
        assert type(tagged) is Tagged
        return torch.tanh(self.linear(x) * scale) + tagged.as_subclass(Tensor)


class Sharing(Chain):
    """All blocks take one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Scaled() for _ in range(4)))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the last block's output."""
        x = self.first(x)
        tagged = (x + 1).as_subclass(Tagged)
        for block in self.blocks:
            x = block(x, self.scale, tagged)
        return x.mean()


def test_weights_and_tensors_of_other_classes_stay_where_they_are() -> None:
    found = []
    for plan in (without(BLOCKS), BLOCKS):
        engine = zs.Engine(Sharing(), partial(torch.optim.SGD, lr=0.1), zs.Plan.from_dict(plan))
        for step in range(3):
            engine.train_step(torch.full((64, 32), float(step)))
        found.append(engine.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    use = engine.checkpoint_arena
    assert use is not None and (use.checkpoints, use.nbytes, use.outside) == (4, 4 * 64 * 32 * 4, 0)


def disjoint(lives: list[Lifetime], offsets: list[int], nbytes: int) -> bool:
    """Whether no two that live at one moment share a byte, and all lie within."""
    for n, (life, start) in enumerate(zip(lives, offsets, strict=True)):
        if start < 0 or start + life.nbytes > nbytes:
            return False
        for other, at in zip(lives[:n], offsets[:n], strict=True):
            together = life.first < other.last and other.first < life.last
            if together and start < at + other.nbytes and at < start + life.nbytes:
                return False
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_no_two_checkpoints_share_bytes(seed: int, count: int) -> None:
    rng = random.Random(seed)
    moments = rng.sample(range(2 * count), 2 * count)
    pairs = [sorted(moments[2 * n : 2 * n + 2]) for n in range(count)]
    lives = [Lifetime(first, last, 64 * rng.randint(1, 9)) for first, last in pairs]
    offsets, nbytes = layout_of(lives)
    assert disjoint(lives, offsets, nbytes) and nbytes >= most_alive(lives)


@pytest.mark.parametrize("warm_up", [1, 2, 4])
def test_schedules_waste_at_most_one_percent(warm_up: int) -> None:
    rng, events, alive, number = random.Random(warm_up), [], [], 0
    sizes = [64 * rng.randint(10, 1000) for _ in range(6)]
    for microbatch in range(8):
        mine = []
        for nbytes in sizes:
            events.append((number, nbytes))
            mine.append(number)
            number += 1
        alive.append(mine)
        if len(alive) == warm_up or microbatch == 7:
            events += [(each, 0) for each in reversed(alive.pop(0))]
    while alive:
        events += [(each, 0) for each in reversed(alive.pop(0))]
    lives = lifetimes_of(events)
    offsets, nbytes = layout_of(lives)
    assert disjoint(lives, offsets, nbytes) and nbytes <= 1.01 * most_alive(lives)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activations.arena": True}, "recompute='schedule' has none"),
    (in_stages("1f1b", "schedule"), "recompute='schedule' with stages has none"),
    ({**SQRT, **STAGES, "pipeline_parallel.schedule": "2bw"}, "steps overlap"),
    (in_stages("pipedream", "blocks"), "steps overlap"),
    ({**BLOCKS, "offload": "activations"}, "Leave one of them out"),
]


NAMES = ["no inputs", "no chunks", "streams", "chunks that stream", "offload"]


@pytest.mark.parametrize("plan, said", REFUSED, ids=NAMES)
def test_what_does_not_combine_is_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(zs.PlanError, match=r"activations\.arena=True") as caught:
        zs.Plan.from_dict(plan)
    assert said in str(caught.value)
