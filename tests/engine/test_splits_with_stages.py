"""A technique that splits parameters over ranks together with pipeline stages: the losses, norms and weights of a loop.

Ranks are 2 stages x data ranks x 2 ranks that split layers, the latter innermost (PTD-P, 2104.04473).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, build
from engine.pipelines import data
from engine.split_blocks import SplitBlocks
from engine.test_pipelines import plain
from pool import Pool

import zeroshard as zs
from zeroshard.engine import policies

STEPS, ROWS = 4, 8
BALANCED = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 4}
KINDS = {"replicated": SplitBlocks(2), "sequence": SplitBlocks(2, sequence=True), "whole": None}


def make(mesh: zs.Mesh, name: str, plan: Mapping[str, Any], kind: str, optimizer: str = "adamw", seed: int = 0) -> zs.Engine:
    """An engine whose layers are split as `kind` says."""
    before = policies.TECHNIQUES[:]
    policies.TECHNIQUES[:] = [] if KINDS[kind] is None else [lambda _: KINDS[kind]]
    try:
        example = (data(0, 0, 1, 2), 0)
        of = zs.Plan.from_dict({**BALANCED, **plan})
        return zs.Engine(build(name, seed), OPTIMIZERS[optimizer], of, mesh=mesh, example=example)
    finally:
        policies.TECHNIQUES[:] = before


def step(engine: zs.Engine, rows: int = ROWS) -> zs.StepResult:
    return engine.train_step((data(engine.steps, engine.data_rank, engine.data_ranks, rows), engine.steps))


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], kind: str, folder: str | None = None) -> Any:
    engine = make(mesh, name, plan, kind, seed=mesh.rank)
    losses, norms = [], []
    for _ in range(STEPS):
        result = step(engine)
        losses.append(result.loss.item())
        norms.append(result.grad_norm)
    return losses, norms


@pytest.mark.parametrize("kind", ["replicated", "sequence"])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "pipedream-flush", "interleaved", "zb-h1"])
def test_a_schedule_trains_like_a_plain_loop(pool: Pool, schedule: str, kind: str) -> None:
    plan = {"pipeline_parallel.schedule": schedule, "clip_norm": 0.5}
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    losses, norms, _ = plain("TiedFive", "adamw", (ROWS,) * STEPS, 0.5)
    for mine in pool.run(train, 4, "TiedFive", plan, kind):
        assert mine[0] == pytest.approx(losses, rel=1e-5)
        assert mine[1] == pytest.approx(norms, rel=1e-5)
