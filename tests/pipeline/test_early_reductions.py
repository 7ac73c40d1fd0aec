"""Reductions of pipelines start inside of the backward that completes their gradients, and change no bit."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine.golden import digest
from engine.models import LONGER, MODELS, OPTIMIZERS, Block, Deep, Five
from pipeline.pipelines import data
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.pipeline.run.early_reductions import EarlyReductions
from zeroshard.zero.gradients import BufferedGradients

STEPS, ROWS = 3, 16
NETWORK = {"transport": "network"}
Events = list[list[str]]  # of each step: "[" and "]" around each backward, and the unit of each reduction that starts


class Spare(Block):
    """With a parameter that is used in no forward, or in those whose first activation is above zero."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.sometimes = sometimes
        self.spare = nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        used = self.sometimes and not x.is_meta and bool(x.flatten()[0] > 0)
        return super().forward(x * self.spare if used else x)


class Unused(Five):
    """One parameter of each stage is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[4] = Spare(sometimes=False), Spare(sometimes=False)


class Irregular(Five):
    """One parameter of each stage gets a gradient from some microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[4] = Spare(sometimes=True), Spare(sometimes=True)


class Scaled(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x if scale is None else x * scale)


class Ahead(Five):
    """What two blocks compute with is made of their weights before anything else."""

    def __init__(self) -> None:
        super().__init__()
        for number in (1, 4):
            self.blocks[number] = Scaled()

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        scales = {number: self.blocks[number].norm.weight * 2 for number in (1, 4)}
        x = self.embed(tokens[:, :-1])
        for number, block in enumerate(self.blocks):
            x = block(x, scales[number]) if number in scales else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Lent(Five):
    """A block in the midst of the first stage has a weight that one of the second uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].up.weight = self.blocks[1].up.weight


class Shared(Deep):
    """Blocks of two chunks on the first of two stages have a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].up.weight = self.blocks[1].up.weight


class Reentrant(Five):
    """Two blocks of each stage use the same weights, in backwards inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        for first, second in ((1, 2), (3, 4)):
            for number in (first, second):
                self.blocks[number] = Spare(sometimes=False)  # which is its own
            for name in ("norm", "up", "down"):
                setattr(self.blocks[second], name, getattr(self.blocks[first], name))
        for block in self.blocks:
            block.forward = lambda x, block=block: checkpoint(Block.forward, block, x, use_reentrant=True)


class Inner(Five):
    """The backward of each stage's first block runs one of its own, through the weights of its second."""

    def __init__(self) -> None:
        super().__init__()
        for first, second in ((0, 1), (3, 4)):
            block, later = self.blocks[first], [self.blocks[second]]  # a list, so that it is no module of the block
            block.forward = lambda x, block=block, later=later: _Inner.apply(Block.forward(block, x), later)


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, later: list[Block]) -> Tensor:
        ctx.later = later
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.later[0].up.weight.sum().backward()
        return gradients[0], None


OWN: dict[str, Any] = {kind.__name__: kind for kind in (Unused, Irregular, Ahead, Lent, Shared, Reentrant, Inner)}


def engine_of(mesh: zs.Mesh, name: str, plan: dict[str, Any]) -> zs.Engine:
    """With two stages, if the plan does not say otherwise; of five blocks, three on the first."""
    torch.manual_seed(0)
    model = {**MODELS, **LONGER, **OWN}[name]()
    plan = {
        "pipeline_parallel": 2,
        "microbatches": 4,
        **({} if "pipeline_parallel.virtual_stages" in plan else {"pipeline_parallel.split": ("blocks.3",)}),
        **plan,
    }
    make = OPTIMIZERS["adamw"]
    return zs.Engine(
        model,
        lambda ps: make([p for p in ps if p.requires_grad]),
        zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan}),
        mesh=mesh,
        example=(data(0, 0, 1, 2), 0),
    )


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], early: bool) -> tuple[list[Any], str, Events]:
    """Losses and norms, a digest of the weights, and the events of each step.

    Args:
        early: let reductions start inside of backwards.
    """
    engine = engine_of(mesh, name, plan)
    events: Events = []
    start, backward = BufferedGradients.start_reduce, torch.autograd.backward

    def noted_start(gradients: BufferedGradients) -> None:
        events[-1].append(gradients.flat.unit.label)
        start(gradients)

    def noted_backward(*args: Any, **kwargs: Any) -> None:
        outer = torch._C._current_graph_task_id() == -1
        events[-1] += ["["] * outer
        backward(*args, **kwargs)
        events[-1] += ["]"] * outer

    seen = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(BufferedGradients, "start_reduce", noted_start))
        stack.enter_context(patch.object(torch.autograd, "backward", noted_backward))
        if not early:
            stack.enter_context(patch.object(EarlyReductions, "start", lambda *_: None))
        for step in range(STEPS):
            events.append([])
            result = engine.train_step((data(step, engine.data_rank, engine.data_ranks, ROWS), step))
            seen += [None if result.loss is None else result.loss.item(), repr(result.grad_norm)]
    engine.flush()
    return seen, digest(engine.state_dict()), events


def starts(step: list[str]) -> tuple[list[list[str]], list[str]]:
    """The units whose reductions started inside of each backward of a step, and those that started outside."""
    inside: list[list[str]] = []
    outside: list[str] = []
    into = outside
    for event in step:
        if event == "[":
            inside.append(into := [])
        elif event == "]":
            into = outside
        else:
            into.append(event)
    return inside, outside


def both(pool: Pool, ranks: int, name: str, plan: dict[str, Any]) -> list[Events]:
    """The events of every rank, after a check that every bit is that of a run with all reductions after backwards."""
    runs = pool.run(train, ranks, name, plan, True)
    for mine, theirs in zip(runs, pool.run(train, ranks, name, plan, False), strict=True):
        assert mine[:2] == theirs[:2]
        for early, late in zip(mine[2], theirs[2], strict=True):
            assert not any(starts(late)[0])
            assert [event for event in early if event not in "[]"] == starts(late)[1]  # one order
    return [events for _, _, events in runs]


WHOLE = {  # of each stage, the units in the order in which their gradients are complete
    0: ["blocks.2", "blocks.1", "blocks.0", "prefix"],
    1: ["suffix", "blocks.4", "blocks.3"],
}
PLANS: dict[str, dict[str, Any]] = {
    **{f"zero{zero}": {"zero": zero, **NETWORK} for zero in range(4)},
    **{f"zero{zero}-shared": {"zero": zero, "transport": "shared"} for zero in (0, 1, 3)},
    "gpipe-recomputed": {"pipeline_parallel.schedule": "gpipe", "zero": 1, **NETWORK},
    "1f1b-recomputed": {"recompute": "blocks", "zero": 0, **NETWORK},
    "naive": {"pipeline_parallel.schedule": "naive", "zero": 0, **NETWORK},
    "bf16": {"precision": "bf16", "zero": 1, **NETWORK},
    "bf16-once": {"precision": "bf16", "microbatches": 1, "zero": 0, **NETWORK},
    "bf16-two-dtypes": {"precision": "bf16", "fp32_modules": ("LayerNorm",), "zero": 1, **NETWORK},
    "fp16": {"precision": "fp16", "zero": 1, "loss_scale.initial": 2.0**20, **NETWORK},
    "wire-bf16": {"reduce_dtype": "bf16", "zero": 1, **NETWORK},
    "offload": {"offload": "optimizer", "offload.speculate": False, "zero": 2, **NETWORK},
}


SHOWN = ("zero3", "zero1-shared", "gpipe-recomputed", "fp16", "offload")


@pytest.mark.parametrize("name", by_default(PLANS, *SHOWN))
def test_all_but_the_first_unit_start_inside_of_the_last_backward(pool: Pool, name: str) -> None:
    plan = PLANS[name]
    for rank, events in enumerate(both(pool, 4, "Five", plan)):
        units = WHOLE[rank // 2]
        flats = 2 if "fp32_modules" in plan else 1  # of a block
        wanted = [unit for unit in units for _ in range(flats if "blocks" in unit else 1)]
        for step in events:
            inside, outside = starts(step)
            assert len(inside) == plan.get("microbatches", 4)
            assert not any(inside[:-1])
            assert outside == [unit for unit in wanted if unit == units[-1]]
            assert inside[-1] == wanted[: -len(outside)]


def test_one_replica_that_offloads_starts_inside_and_others_listen_to_nothing(pool: Pool) -> None:
    for events in both(pool, 2, "Five", {"zero": 2, "offload": "optimizer", "offload.speculate": False}):
        assert all(len(starts(step)[0][-1]) >= 2 for step in events)
    assert pool.run(listened, 2, {}) == [0, 0]
    assert pool.run(listened, 4, {"zero": 0}) == [9, 9, 6, 6]  # three of stage 0 and two of stage 1, in three steps
    assert pool.run(listened, 4, {"zero": 0, "pipeline_parallel.schedule": "zb-h1"}) == [0] * 4
    assert pool.run(listened, 4, {"zero": 0, "pipeline_parallel.schedule": "pipedream"}) == [0] * 4


def listened(mesh: zs.Mesh, plan: dict[str, Any]) -> int:
    """How often a hook of a backward looked for complete units."""
    engine, count = engine_of(mesh, "Five", plan), 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    with patch.object(EarlyReductions, "start", counted):
        for step in range(STEPS):
            engine.train_step((data(step, engine.data_rank, engine.data_ranks, ROWS), step))
    return count


CHUNKS: list[dict[str, Any]] = [
    {"pipeline_parallel.schedule": "interleaved"},
    {"pipeline_parallel.schedule": "gpipe", "zero": 3},
    {"pipeline_parallel.schedule": "naive"},
]


@pytest.mark.parametrize("plan", by_default(CHUNKS, CHUNKS[0]))
def test_each_of_several_chunks_has_its_own_last_backward(pool: Pool, plan: dict[str, Any]) -> None:
    plan = {"pipeline_parallel.virtual_stages": 3, "zero": 1, **plan, **NETWORK}
    for events in both(pool, 4, "Deep", plan):
        for step in events:
            inside, outside = starts(step)
            assert len(outside) == 3  # the first unit of each chunk
            full = [units for units in inside if units]
            assert len(full) == 3
            assert all(len(units) >= 1 for units in full)
            assert sum(map(len, full)) == len([event for event in step if event not in "[]"]) - 3


@pytest.mark.parametrize(
    "plan", [{"zero": 1}, {"zero": 3, "pipeline_parallel.schedule": "gpipe"}, {"zero": 0, "transport": "shared"}]
)
def test_a_unit_that_lends_waits_for_the_repayment(pool: Pool, plan: dict[str, Any]) -> None:
    for rank, events in enumerate(both(pool, 4, "TiedFive", {**NETWORK, **plan})):
        for step in events:
            inside, outside = starts(step)
            wanted = [unit for unit in WHOLE[rank // 2] if unit != "suffix"]  # which has borrowed weights alone
            assert inside[-1] == wanted[:-1]
            assert outside == wanted[-1:]


def test_units_after_one_that_lends_wait_for_it(pool: Pool) -> None:
    for rank, events in enumerate(both(pool, 4, "Lent", {"zero": 1, **NETWORK})):
        for step in events:
            inside, outside = starts(step)
            assert inside[-1] == WHOLE[rank // 2][: 2 if rank // 2 else 1]
            assert outside == WHOLE[rank // 2][2 if rank // 2 else 1 :]


def test_chunks_of_a_stage_that_share_a_weight(pool: Pool) -> None:
    for events in both(
        pool,
        4,
        "Shared",
        {"pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 3, "zero": 1, **NETWORK},
    ):
        assert all(len(starts(step)[1]) == 3 for step in events)


@pytest.mark.parametrize("transport", ["network", "shared"])
def test_weights_that_get_gradients_twice_in_a_backward(pool: Pool, transport: str) -> None:
    for rank, events in enumerate(both(pool, 4, "Reentrant", {"zero": 1, "transport": transport})):
        wanted = ["suffix", "blocks.4"] if rank // 2 else ["blocks.2", "blocks.1"]  # one Block alone is no unit
        assert all(starts(step)[0][-1] == wanted for step in events[1:])


def test_a_parameter_that_is_never_used_holds_up_the_first_step_alone(pool: Pool) -> None:
    for rank, events in enumerate(both(pool, 4, "Unused", {"zero": 1, **NETWORK})):
        wanted = WHOLE[rank // 2]
        before = wanted.index("blocks.4" if rank // 2 else "blocks.1")
        assert starts(events[0])[0][-1] == wanted[:before]  # in the fixed order, so what comes after it waits, too
        for step in events[1:]:
            assert starts(step)[0][-1] == wanted[:-1]


def test_a_parameter_that_some_microbatches_use(pool: Pool) -> None:
    both(pool, 4, "Irregular", {"zero": 0, "microbatches": 8, **NETWORK})


def test_weights_that_are_used_ahead_of_their_layer_are_of_the_layer_that_reads_them(pool: Pool) -> None:
    """The prefix has them, whose unit is the last, and its results are carried to the blocks."""
    for rank, events in enumerate(both(pool, 4, "Ahead", {"zero": 1, **NETWORK})):
        assert starts(events[-1])[0][-1] == WHOLE[rank // 2][:-1]


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)], ids=str)
def test_uneven_replicas(pool: Pool, replicas: tuple[int, int]) -> None:
    for rank, events in enumerate(
        both(pool, 3, "TiedFive", {"pipeline_parallel.replicas": replicas, "zero": 1, **NETWORK})
    ):
        stage = 0 if rank < replicas[0] else 1
        units = [["blocks.2", "blocks.1", "blocks.0"], ["blocks.4"]][stage]
        assert all(starts(step)[0][-1] == (units if replicas[stage] > 1 else []) for step in events)


@pytest.mark.parametrize("zero", [0, 2])
def test_reducing_every_microbatch(pool: Pool, zero: int) -> None:
    for rank, events in enumerate(both(pool, 4, "Five", {"zero": zero, "reduce_every": "microbatch", **NETWORK})):
        for step in events:
            assert starts(step)[0] == [WHOLE[rank // 2][:-1]] * 4


def test_a_gradient_after_those_of_its_unit_is_refused(pool: Pool) -> None:
    assert all("once more after the backward of its block" in text for text in pool.run(refused, 4))


def refused(mesh: zs.Mesh) -> str:
    engine = engine_of(mesh, "Inner", {"zero": 1, **NETWORK})
    with pytest.raises(PlanError) as caught:
        engine.train_step((data(0, engine.data_rank, engine.data_ranks, ROWS), 0))
    return str(caught.value)
