"""Techniques that meet: slices in groups and offloaded states in the stages of a pipeline, and the two together."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build, plain
from inside import all_gathered, chunks_of, free_blocks_of, parts_of, shared_bytes_of
from offload.offloaded import EXECUTORS, executing, in_memory
from pool import Pool
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import BudgetExceeded, PlanError

STEPS, ROWS = 4, 16
TWO = {"pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.balance": "parameters"}
STATES = {"offload": "optimizer", "transport": "network"}
STREAMED = {"offload": "optimizer,parameters", "zero": 3, "transport": "network"}
GROUPS = {"shard_group": 2, "transport": "network"}

Case = tuple[int, str, dict[str, Any]]  # ranks, model, plan
OFFLOADED: dict[str, Case] = {
    "naive": (2, "TiedFive", {**TWO, **STATES, "pipeline_parallel.schedule": "naive", "zero": 1}),
    "gpipe": (2, "TiedFive", {**TWO, **STATES, "pipeline_parallel.schedule": "gpipe", "zero": 2}),
    "1f1b, tied, clipped": (2, "TiedFive", {**TWO, **STATES, "zero": 1, "clip_norm": 0.5}),
    "1f1b, replicas": (4, "TiedFive", {**TWO, **STATES, "zero": 2, "clip_norm": 0.5}),
    "zb-h1, replicas": (
        4,
        "Deep",
        {**TWO, **STATES, "pipeline_parallel.schedule": "zb-h1", "zero": 1, "offload.fraction": 0.5},
    ),
    "interleaved": (
        2,
        "DeepTied",
        {
            **TWO,
            **STATES,
            "pipeline_parallel.schedule": "interleaved",
            "pipeline_parallel.virtual_stages": 2,
            "zero": 2,
        },
    ),
    "bf16": (2, "TiedFive", {**TWO, **STATES, "zero": 2, "precision": "bf16"}),
    "fp16": (2, "TiedFive", {**TWO, **STATES, "zero": 2, "precision": "fp16", "loss_scale.initial": 2.0**20}),
    "uneven, tied": (3, "DeepTied", {**TWO, **STATES, "pipeline_parallel.replicas": (2, 1), "zero": 1}),
    "groups": (4, "Plain", {**STATES, **GROUPS, "zero": 2, "clip_norm": 0.5}),
    "groups, several reductions": (4, "Tied", {**STATES, **GROUPS, "zero": 1, "microbatches": 2}),
    "groups, stage 3": (4, "Plain", {**STATES, **GROUPS, "zero": 3, "microbatches": 2}),
    "groups, streamed": (4, "Tied", {**STREAMED, **GROUPS, "clip_norm": 0.5}),
}
SLICED_STAGES: dict[str, Case] = {
    "breadth first": (
        4,
        "DeepTied",
        {
            **TWO,
            "zero": 3,
            "pipeline_parallel.schedule": "gpipe",
            "pipeline_parallel.virtual_stages": 2,
            "clip_norm": 0.5,
        },
    ),
    "own parameters of the model": (
        4,
        "Framed",
        {**TWO, "zero": 3, "pipeline_parallel.schedule": "gpipe", "pipeline_parallel.virtual_stages": 2},
    ),
    "gpipe, recomputed": (4, "TiedFive", {**TWO, "zero": 3, "pipeline_parallel.schedule": "gpipe"}),
    "1f1b": (4, "TiedFive", {**TWO, "zero": 3, "clip_norm": 0.5}),
    "interleaved, bf16": (
        4,
        "DeepTied",
        {
            **TWO,
            "zero": 3,
            "pipeline_parallel.schedule": "interleaved",
            "pipeline_parallel.virtual_stages": 2,
            "precision": "bf16",
        },
    ),
    "zb-h1": (4, "Deep", {**TWO, "zero": 3, "pipeline_parallel.schedule": "zb-h1"}),
    "uneven": (3, "Deep", {**TWO, "zero": 3, "pipeline_parallel.replicas": (2, 1)}),
    "uneven, tied": (3, "DeepTied", {**TWO, "zero": 3, "pipeline_parallel.replicas": (1, 2)}),
    "activations": (4, "TiedFive", {**TWO, "zero": 3, "offload": "activations"}),
    "streamed": (2, "TiedFive", {**TWO, **STREAMED, "pipeline_parallel.schedule": "gpipe"}),
    "streamed, replicas": (4, "TiedFive", {**TWO, **STREAMED, "clip_norm": 0.5}),
}
STAGES_OF_GROUPS: dict[str, Case] = {
    "1f1b": (8, "TiedFive", {**TWO, **GROUPS, "zero": 1, "clip_norm": 0.5}),
    "zb-h1": (8, "Deep", {**TWO, **GROUPS, "zero": 2, "pipeline_parallel.schedule": "zb-h1"}),
    "offloaded": (8, "TiedFive", {**TWO, **GROUPS, **STATES, "zero": 2, "clip_norm": 0.5}),
}


@pytest.fixture(scope="module")
def cube() -> Iterator[Pool]:
    """Eight workers: two stages of two groups of two ranks."""
    workers = Pool(8, (8,), apart=0)
    yield workers
    workers.stop()


def make(mesh: zs.Mesh, model: str, plan: zs.Plan, seed: int) -> zs.Engine:
    example = (batch(0, 0, 1, 1), 0) if plan.pipelined else None
    return zs.Engine(build(model, seed), OPTIMIZERS["adamw"], plan, mesh=mesh, example=example)


def train(mesh: zs.Mesh, model: str, plan: zs.Plan, executor: str, folder: str = "") -> Any:
    """Losses, norms and final weights of four steps; a checkpoint where a folder is given. Formulas are checked."""
    with executing(executor):
        engine = make(mesh, model, plan, seed=mesh.rank)
        losses, norms = [], []
        for step in range(STEPS):
            result = engine.train_step((batch(step, engine.data_rank, engine.data_ranks, ROWS), step))
            losses.append(result.loss.item())
            norms.append(result.grad_norm)
        check_formulas(engine)
        if folder:
            engine.save(folder, wait=True)
        return losses, norms, engine.state_dict()


def check_formulas(engine: zs.Engine) -> None:
    """Raise unless the ledger and the wire have what the formulas say."""
    for row in engine.memory():
        if row.planned_bytes is not None and row.padding_bytes is not None:
            assert row.planned_bytes + row.padding_bytes == row.measured_bytes, row
    for line in engine.traffic():
        assert line.planned_elements in (None, line.measured_elements), line


def load(mesh: zs.Mesh, model: str, plan: zs.Plan, folder: str) -> dict[str, Tensor]:
    """The weights that an engine under another plan takes from a checkpoint."""
    engine = make(mesh, model, plan, seed=7)
    engine.load(folder)
    return engine.state_dict()


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


def close(run: list[Any], model: str, clip: float | None) -> None:
    """Raise unless the mean of the ranks' losses, and the weights, are those of a plain loop."""
    wanted = plain(model, "adamw", (ROWS,) * STEPS, clip)
    mean = [sum(column) / len(run) for column in zip(*(mine[0] for mine in run), strict=True)]
    assert mean == pytest.approx(wanted.losses, rel=1e-5)
    for _, _, found in run:
        for name, value in wanted.weights.items():
            assert (found[name] - value).abs().max() < 1e-5, name


BELOW = ("zb-h1, replicas", "fp16", "uneven, tied", "groups, streamed")


@pytest.mark.parametrize("name", by_default(OFFLOADED, *BELOW))
def test_offloaded_states_change_no_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks, model, options = OFFLOADED[name]
    plan = zs.Plan.from_dict(options)
    executor = list(EXECUTORS)[list(OFFLOADED).index(name) % len(EXECUTORS)]
    found = pool.run(train, ranks, model, plan, executor, str(tmp_path / "a"))
    wanted = pool.run(train, ranks, model, in_memory(plan), "eager")
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[0] == theirs[0]
        assert [repr(norm) for norm in mine[1]] == [repr(norm) for norm in theirs[1]]
        assert same(mine[2], theirs[2])
    if plan.precision == "fp32":
        close(found, model, plan.clip_norm)
    for others, other in ((1, zs.Plan(zero=0)), (2, zs.Plan.from_dict(STREAMED))):
        for weights in pool.run(load, others, model, other, str(tmp_path / "a")):
            assert all(
                weights[key].equal(value) for key, value in found[0][2].items() if value.dtype == weights[key].dtype
            )


SHOWN = ("breadth first", "own parameters of the model", "streamed")


@pytest.mark.parametrize("name", by_default(SLICED_STAGES, *SHOWN))
def test_sliced_parameters_in_stages_change_no_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    """Over the network, as whole parameters do; and over shared memory, where ranks of a stage have one copy."""
    ranks, model, options = SLICED_STAGES[name]
    plan = zs.Plan.from_dict({"transport": "network", **options})
    found = pool.run(train, ranks, model, plan, "latest", str(tmp_path / "a"))
    whole = replace(in_memory(plan), zero=2)
    ways = [whole, replace(whole, transport="auto")]
    for wanted in (pool.run(train, ranks, model, way, "eager") for way in ways):
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine[0] == theirs[0] and mine[1] == theirs[1]
            assert same(mine[2], theirs[2])
    if plan.precision == "fp32":
        close(found, model, plan.clip_norm)
    for others, other in ((1, zs.Plan(zero=0)), (2, zs.Plan.from_dict(STREAMED))):
        for weights in pool.run(load, others, model, other, str(tmp_path / "a")):
            pairs = [(weights[key], value) for key, value in found[0][2].items()]
            assert all(here.equal(value) for here, value in pairs if value.dtype == here.dtype)


def gathers(mesh: zs.Mesh, plan: zs.Plan) -> tuple[list[str], bool, float]:
    """This rank's gathers and frees in a step, whether units are here between, and the loss of an evaluation."""
    engine = make(mesh, "Deep", plan, seed=mesh.rank)
    first, _ = (engine.train_step((batch(step, engine.data_rank, engine.data_ranks, ROWS), step)) for step in range(2))
    here = all_gathered(engine)
    assert first.loss is not None
    with torch.no_grad():
        loss = float(engine(batch(5, engine.data_rank, engine.data_ranks, ROWS), 5))
    return [str(action) for action in engine.schedule if action.kind in ("GATHER", "FREE")], here, loss


def test_a_breadth_first_schedule_gathers_a_chunk_once_per_pass(pool: Pool) -> None:
    plan = zs.Plan.from_dict(
        {
            **TWO,
            "zero": 3,
            "pipeline_parallel.schedule": "gpipe",
            "pipeline_parallel.virtual_stages": 2,
            "transport": "network",
        }
    )
    wanted = pool.run(gathers, 4, replace(plan, zero=2))
    for rank, (listed, here, loss) in enumerate(pool.run(gathers, 4, plan)):
        own = [rank // 2, rank // 2 + 2]
        assert listed == [f"{kind}{chunk}@0" for chunk in (*own, *own[::-1]) for kind in ("GATHER", "FREE")]
        assert not here and loss == wanted[rank][2]


def test_1f1b_gathers_for_each_microbatch(pool: Pool) -> None:
    for rank, (listed, here, _) in enumerate(
        pool.run(gathers, 4, zs.Plan.from_dict({**TWO, "zero": 3, "transport": "network"}))
    ):
        assert len(listed) == 2 * (6 if rank < 2 else 8) and not here


@pytest.mark.parametrize("name", STAGES_OF_GROUPS)
def test_groups_of_ranks_in_stages(cube: Pool, pool: Pool, tmp_path: Path, name: str) -> None:
    ranks, model, options = STAGES_OF_GROUPS[name]
    plan = zs.Plan.from_dict(options)
    found = cube.run(train, ranks, model, plan, "latest", str(tmp_path / "a"))
    close(found, model, plan.clip_norm)
    for _, _, weights in found[1:]:
        assert same(weights, found[0][2])
    (weights,) = pool.run(load, 1, model, zs.Plan(zero=0), str(tmp_path / "a"))
    assert same(weights, found[0][2])


def stream(mesh: zs.Mesh, plan: zs.Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses that this rank knows, and the weights at the end, of a schedule that never flushes."""
    engine, losses = make(mesh, "Deep", plan, seed=mesh.rank), []
    for step in range(STEPS):
        result = engine.train_step((batch(step, engine.data_rank, engine.data_ranks, ROWS), step))
        losses += [] if result.loss is None else [result.loss.item()]
    check_formulas(engine)
    return losses, engine.state_dict()


def test_groups_of_ranks_in_stages_that_never_flush(cube: Pool) -> None:
    one = zs.Plan.from_dict({**TWO, "zero": 1, "pipeline_parallel.schedule": "pipedream", "clip_norm": 0.5})
    groups = cube.run(stream, 8, replace(one, shard_group=2))
    for (losses, weights), (wanted_losses, wanted) in zip(groups, cube.run(stream, 8, one), strict=True):
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert all((weights[name] - wanted[name]).abs().max() < 1e-5 for name in wanted)


def test_an_evaluation_gathers_on_replicas_that_have_no_part_in_it(pool: Pool) -> None:
    plan = zs.Plan.from_dict({**TWO, "zero": 3, "pipeline_parallel.replicas": (2, 1), "transport": "network"})
    wanted = pool.run(gathers, 3, replace(plan, zero=2))
    for rank, (_, here, loss) in enumerate(pool.run(gathers, 3, plan)):
        assert here == (rank == 2) and loss == wanted[rank][2]


def least(mesh: zs.Mesh, plan: zs.Plan) -> tuple[int, list[int], int]:
    """Bytes that a budget of one byte is said to lack, bytes of this rank's chunks, and bytes of its slices."""
    with pytest.raises(BudgetExceeded) as caught:
        make(mesh, "Deep", replace(plan, device_memory=1), seed=0)
    engine = make(mesh, "Deep", plan, seed=0)
    chunks: dict[int, int] = {}
    for unit, chunk in zip(parts_of(engine).units, chunks_of(engine), strict=True):
        chunks[chunk] = chunks.get(chunk, 0) + sum(p.numel() * 4 for p in unit.parameters.values())
    said = re.findall(r"the largest of its chunks take ([\d,]+)", str(caught.value))
    return int(said[0].replace(",", "")), list(chunks.values()), sum(chunks.values()) // 2


def test_the_least_that_sliced_stages_need_has_a_whole_chunk(pool: Pool) -> None:
    plan = zs.Plan.from_dict(
        {
            **TWO,
            "zero": 3,
            "pipeline_parallel.schedule": "gpipe",
            "pipeline_parallel.virtual_stages": 2,
            "transport": "network",
        }
    )
    for found, chunks, slices in pool.run(least, 4, plan):
        assert len(chunks) == 2 and found == slices + max(chunks)


def in_shared_memory(mesh: zs.Mesh, plan: zs.Plan) -> tuple[bool, list[bool]]:
    """Whether this rank's gradients are read by others in place, and the same of what it sends to other stages."""
    engine = make(mesh, "TiedFive", plan, seed=0)
    for step in range(2):
        engine.train_step((batch(step, engine.data_rank, engine.data_ranks, ROWS), step))
    parts, mapped = parts_of(engine), shared_bytes_of(engine)
    first, end = mapped.data_ptr(), mapped.data_ptr() + mapped.numel()
    gradients, messages = ([first <= block.data_ptr() < end for block in free_blocks_of(arena)]
                           for arena in (parts.arena, parts.messages))  # fmt: skip
    return all(gradients) and bool(gradients), messages


def test_messages_take_no_shared_memory(pool: Pool) -> None:
    for gradients, messages in pool.run(
        in_shared_memory, 4, zs.Plan.from_dict({**TWO, "zero": 2, "transport": "shared"})
    ):
        assert gradients and messages and not any(messages)


def test_groups_that_do_not_divide_a_stage_are_refused(pool: Pool) -> None:
    for error in pool.run(refused, 4, zs.Plan.from_dict({**TWO, "zero": 1, "shard_group": 3})):
        assert error == (
            "4 ranks do not divide among pipeline_parallel=2 times shard_group=3; start a multiple of 6 ranks, or set "
            "shard_group to 2."
        )


def refused(mesh: zs.Mesh, plan: zs.Plan) -> str:
    with pytest.raises(PlanError) as caught:
        make(mesh, "Five", plan, seed=0)
    return str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pipeline_parallel.schedule": "2bw"}, "schedule='2bw' do not combine"),
        ({"offload.delayed_update": True}, "delayed_update=True and pipeline_parallel=2 do not combine"),
    ],
)
def test_what_has_no_end_of_a_step_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        zs.Plan.from_dict({**TWO, "zero": 1, "offload": "optimizer", **options})


@pytest.mark.parametrize("options", [{"zero": 3}, {"transport": "shared"}])
def test_older_versions_of_weights_are_whole_and_a_ranks_own(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="schedule='pipedream' do not combine"):
        zs.Plan.from_dict({**TWO, "pipeline_parallel.schedule": "pipedream", **options})


def reshaped(mesh: zs.Mesh, model: str, plan: zs.Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of steps whose batches have other rows and other columns each time."""
    engine, losses = make(mesh, model, plan, seed=0), []
    for step, (rows, columns) in enumerate([(16, 5), (24, 3), (8, 4), (16, 5)]):
        tokens = batch(step, engine.data_rank, engine.data_ranks, rows)[:, :columns]
        losses.append(engine.train_step((tokens, step)).loss.item())
    check_formulas(engine)
    return losses, engine.state_dict()


@pytest.mark.parametrize(
    "ranks, like, options",
    [
        (2, 2, {"zero": 3, "transport": "network", "microbatches": 2}),
        (2, 1, {**TWO}),
        (2, 1, {**TWO, "pipeline_parallel.schedule": "zb-h1", "recompute": "blocks"}),
        (2, 1, {**TWO, **STREAMED, "pipeline_parallel.schedule": "gpipe"}),
        (1, 1, {"offload": "optimizer,activations", "microbatches": 4}),
    ],
    ids=["stage 3", "1f1b", "zb-h1", "streamed gpipe", "activations"],
)
def test_batches_may_change_their_shapes_from_step_to_step(
    pool: Pool, ranks: int, like: int, options: dict[str, Any]
) -> None:
    plan = zs.Plan.from_dict(options)
    wanted = pool.run(reshaped, like, "Five", zs.Plan(zero=0, microbatches=plan.microbatches))
    for rank, (losses, weights) in enumerate(pool.run(reshaped, ranks, "Five", plan)):
        theirs, expected = wanted[rank % like]
        assert losses == pytest.approx(theirs, rel=1e-5)
        assert all((weights[name] - values).abs().max() < 1e-5 for name, values in expected.items())
