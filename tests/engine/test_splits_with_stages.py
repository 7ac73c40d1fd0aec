"""A technique that splits parameters over ranks together with pipeline stages: the losses, norms and weights of a loop.

Ranks are 2 stages x data ranks x 2 ranks that split layers, the latter innermost (PTD-P, 2104.04473). "replicated"
layers have equal activations on both, of which each sends half between stages; "sequence" ones have positions of their
own, which are sent as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, build
from engine.pipelines import data
from engine.split_blocks import POSITIONS, SplitBlocks
from engine.test_pipelines import plain
from pool import Pool
from torch import Tensor

import zeroshard as zs
from zeroshard.engine import policies

STEPS, ROWS, WIDTH = 4, 8, 10
TWO = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 4}
KINDS = {"replicated": SplitBlocks(2), "sequence": SplitBlocks(2, sequence=True), "whole": None}
SCHEDULES = ("naive", "gpipe", "1f1b", "pipedream-flush", "interleaved", "zb-h1")
MESSAGES = ("send activations", "send their gradients", "gather messages", "lend weights", "repay their gradients")


def make(
    mesh: zs.Mesh, name: str, plan: Mapping[str, Any], kind: str, optimizer: str = "adamw", seed: int = 0
) -> zs.Engine:
    """An engine whose layers are split as `kind` says."""
    before = policies.TECHNIQUES[:]
    technique = KINDS[kind]
    policies.TECHNIQUES[:] = [] if technique is None else [lambda _: technique]
    try:
        example, of = (data(0, 0, 1, 2), 0), zs.Plan.from_dict({**TWO, **plan})
        return zs.Engine(build(name, seed), OPTIMIZERS[optimizer], of, mesh=mesh, example=example)
    finally:
        policies.TECHNIQUES[:] = before


def step(engine: zs.Engine, rows: int = ROWS) -> zs.StepResult:
    batch = data(engine.steps, engine.data_rank, engine.data_ranks, rows)
    return engine.train_step((batch, engine.steps))


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], kind: str, optimizer: str = "adamw") -> dict[str, Any]:
    """What one rank sees of a few steps."""
    engine = make(mesh, name, plan, kind, optimizer, seed=mesh.rank)
    results = [step(engine) for _ in range(STEPS)]
    seen: dict[str, Any] = {"data": (engine.data_rank, engine.data_ranks)}
    seen["losses"] = [None if each.loss is None else each.loss.item() for each in results]
    seen["norms"] = [each.grad_norm for each in results]
    seen["wire"] = {
        row.purpose: (row.planned_elements, row.measured_elements)
        for row in engine.traffic()
        if row.planned_elements is not None
    }
    engine.flush()
    engine.check_replicas()
    seen["memory"] = {
        row.category: (row.planned_bytes + row.padding_bytes, row.measured_bytes)
        for row in engine.memory()
        if row.planned_bytes is not None
    }
    seen["weights"] = engine.state_dict()
    return seen


def same(seen: list[dict[str, Any]], name: str, optimizer: str = "adamw", clip: float | None = None) -> None:
    """Every rank knows the losses and norms of a plain loop, takes out its weights, and met its formulas."""
    losses, norms, weights = plain(name, optimizer, (ROWS,) * STEPS, clip)
    for mine in seen:
        assert mine["losses"] == pytest.approx(losses, rel=1e-5)
        assert mine["norms"] == pytest.approx(norms, rel=1e-5)
        assert mine["weights"].keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(mine["weights"][key], value, rtol=1e-5, atol=1e-5)
        for table in ("wire", "memory"):
            assert {k: p for k, (p, _) in mine[table].items()} == {k: m for k, (_, m) in mine[table].items()}


@pytest.mark.parametrize("kind", ["replicated", "sequence"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_trains_like_a_plain_loop(pool: Pool, schedule: str, kind: str) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "clip_norm": 0.5}
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    seen = pool.run(train, 4, "TiedFive", plan, kind)
    same(seen, "TiedFive", clip=0.5)
    assert [mine["data"] for mine in seen] == [(0, 1)] * 4


def wires(seen: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What each rank sent and gathered of messages, elements."""
    return [{k: measured for k, (_, measured) in mine["wire"].items() if k in MESSAGES} for mine in seen]


def test_messages_carry_parts_of_what_ranks_hold_alike(pool: Pool) -> None:
    """By hand: 4 microbatches of 2 x 5 x 10 elements, halves of which are gathered; the tied matrix, 7 or 6 x 10."""
    plan = {"pipeline_parallel.split": ("blocks.2",)}
    whole, tied = ROWS * POSITIONS * WIDTH, (7 * WIDTH, 6 * WIDTH)
    first = [
        {"send activations": whole // 2, "gather messages": whole, "lend weights": each} for each in tied
    ]
    last = [
        {"send their gradients": whole // 2, "gather messages": whole, "repay their gradients": each} for each in tied
    ]
    assert wires(pool.run(train, 4, "TiedFive", plan, "replicated")) == first + last
    rows = [ROWS * positions * WIDTH for positions in (3, 2)]  # under sequence parallelism they are not gathered
    first = [{"send activations": n, "lend weights": each} for n, each in zip(rows, tied, strict=True)]
    last = [{"send their gradients": n, "repay their gradients": each} for n, each in zip(rows, tied, strict=True)]
    assert wires(pool.run(train, 4, "TiedFive", plan, "sequence")) == first + last


def test_messages_that_do_not_divide(pool: Pool) -> None:
    """One row of 5 x 10 elements... three ranks: parts of 17, the last with one of padding."""
