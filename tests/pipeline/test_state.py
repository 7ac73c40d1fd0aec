"""Checkpoints of pipelines, across layouts too; and their tables of memory and traffic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, build
from pipeline.pipelines import data
from pool import Pool

import zeroshard as zs

ROWS = 8
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "accumulating": {"microbatches": 4},
    "1f1b": {"pipeline_parallel": 2, "microbatches": 4},
    "interleaved": {
        "pipeline_parallel": 2,
        "pipeline_parallel.schedule": "interleaved",
        "pipeline_parallel.virtual_stages": 2,
        "microbatches": 4,
    },
    "three": {"pipeline_parallel": 3, "pipeline_parallel.schedule": "zb-h1", "microbatches": 4},
    "replicas": {"pipeline_parallel": 2, "microbatches": 2, "zero": 1},
    "pipedream": {"pipeline_parallel": 2, "pipeline_parallel.schedule": "pipedream", "microbatches": 4},
    "2bw": {"pipeline_parallel": 3, "pipeline_parallel.schedule": "2bw", "microbatches": 4},
}
RANKS = {"one": 1, "accumulating": 1, "three": 3, "replicas": 4, "2bw": 3}


def make(mesh: zs.Mesh, plan: dict[str, Any], name: str = "TiedFive") -> zs.Engine:
    pipelined = plan.get("pipeline_parallel", 1) > 1
    example = (data(0, 0, 1, 2), 0) if pipelined else None
    return zs.Engine(
        build(name),
        OPTIMIZERS["adamw"],
        zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan}),
        mesh=mesh,
        example=example,
    )


def steps(engine: zs.Engine, first: int, last: int) -> list[tuple[float, int]]:
    """Take some steps; the norm of each, and how many were skipped so far."""
    batches = ((data(step, engine.data_rank, engine.data_ranks, ROWS), step) for step in range(first, last))
    return [(engine.train_step(batch).grad_norm, engine.skipped) for batch in batches]


def save(mesh: zs.Mesh, plan: dict[str, Any], path: str) -> Any:
    """Three steps, a checkpoint, and two more steps."""
    engine = make(mesh, plan)
    steps(engine, 0, 3)
    engine.save(path, {"seen": 3}, wait=True)
    before = engine.state_dict()
    norms = steps(engine, 3, 5)
    return before, engine.state_dict(), norms


def load(mesh: zs.Mesh, plan: dict[str, Any], path: str) -> Any:
    """The checkpoint under some plan, and two more steps."""
    engine = make(mesh, plan)
    assert engine.load(path) == {"seen": 3}
    before = engine.state_dict()
    norms = steps(engine, 3, 5)
    return before, engine.state_dict(), norms, engine.steps


@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("one", "accumulating")])
def test_a_pipeline_goes_on_where_it_stopped(pool: Pool, tmp_path: Path, name: str) -> None:
    """Bit for bit under the same plan, norms on every rank too; a schedule that never flushes does so to save."""
    plan, ranks = PLANS[name], RANKS.get(name, 2)
    whole = pool.run(save, ranks, plan, str(tmp_path / "a"))
    resumed = pool.run(load, ranks, plan, str(tmp_path / "a"))
    for (first_before, first_after, first_norms), (before, after, norms, count) in zip(whole, resumed, strict=True):
        assert count == 5
        assert norms == first_norms and all(math.isfinite(norm) for norm, _ in norms)
        for mine, theirs in ((before, first_before), (after, first_after)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    "source, target",
    [
        ("1f1b", "one"),
        ("one", "three"),
        ("three", "replicas"),
        ("replicas", "interleaved"),
        ("interleaved", "accumulating"),
        ("pipedream", "1f1b"),
        ("one", "2bw"),
    ],
)
def test_any_layout_loads_what_any_other_saved(pool: Pool, tmp_path: Path, source: str, target: str) -> None:
    saved = pool.run(save, RANKS.get(source, 2), PLANS[source], str(tmp_path / "a"))[0]
    for before, after, norms, _ in pool.run(load, RANKS.get(target, 2), PLANS[target], str(tmp_path / "a")):
        assert all(torch.equal(before[key], saved[0][key]) for key in before)
        assert all(math.isfinite(norm) for norm, _ in norms)
        if source != "pipedream" and target != "2bw":  # of other updates, or with weights that are one update old
            for key, value in after.items():
                torch.testing.assert_close(value, saved[1][key], rtol=1e-5, atol=1e-5)


def tables(mesh: zs.Mesh, plan: dict[str, Any], name: str) -> Any:
    engine = make(mesh, plan, name)
    steps(engine, 0, 6)
    memory = {row.category: (row.planned_bytes, row.padding_bytes, row.measured_bytes) for row in engine.memory()}
    traffic = {row.purpose: (row.planned_elements, row.measured_elements) for row in engine.traffic()}
    return memory, traffic, engine.ledger.account(zs.memory.ledger.Category.BUFFERS).current


@pytest.mark.parametrize(
    "name, model",
    [
        *((name, "TiedFive") for name in PLANS if name not in ("one", "accumulating")),
        *((name, "Five") for name in ("interleaved", "2bw")),
    ],
)
def test_the_tables_agree_with_the_ledger_and_the_wire(pool: Pool, name: str, model: str) -> None:
    for memory, traffic, _ in pool.run(tables, RANKS.get(name, 2), PLANS[name], model):
        for category in ("parameters", "gradients", "master weights", "optimizer states"):
            planned, padding, measured = memory[category]
            assert planned + padding == measured, category
        for purpose, (planned, measured) in traffic.items():
            if purpose != "agreement":
                assert planned == measured, purpose


def test_shares_of_the_model_states(pool: Pool) -> None:
    """Over all ranks, every parameter, gradient and state is there once, and the borrowed weight once more."""
    psi = sum(p.numel() for p in build("TiedFive").parameters())
    lent = build("TiedFive").embed.weight.numel()
    runs = [memory for memory, _, _ in pool.run(tables, 3, PLANS["three"], "TiedFive")]
    totals = {key: sum(memory[key][2] for memory in runs) for key in runs[0]}
    assert totals["parameters"] == totals["gradients"] == 4 * (psi + lent)
    assert totals["optimizer states"] == 8 * psi


def buffers(mesh: zs.Mesh, microbatches: int) -> list[int]:
    """Bytes of scratch after every step."""
    engine = make(mesh, {"pipeline_parallel": 2, "microbatches": microbatches})
    seen = []
    for step in range(8):
        steps(engine, step, step + 1)
        seen.append(engine.ledger.account(zs.memory.ledger.Category.BUFFERS).current)
    return seen


def test_message_buffers_are_made_once_and_do_not_grow_with_the_microbatches(pool: Pool) -> None:
    few, many = (pool.run(buffers, 2, m) for m in (4, 8))
    for run in (*few, *many):
        assert run[-1] == run[-2] == run[-3]
    for run, other in zip(few, many, strict=True):
        assert other[-1] <= run[-1]  # twice as many microbatches of half the size
