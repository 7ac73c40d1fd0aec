"""Models whose values pass over stages, in three stages with two replicas each, whose optimizer states ZeRO splits."""

from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from pipeline.cut.test_carried import MODELS, SETTINGS, data_of
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool

import zeroshard as zs

STAGES, REPLICAS, ROWS, STEPS = 3, 2, 2, 3
CASES = [("u-net", "1f1b", 1), ("u-net", "gpipe", 2), ("far", "zb-h1", 1), ("supervised", "1f1b", 2)]


def parts(name: str, step: int) -> list[Any]:
    """The microbatches of a step, two for each replica."""
    first, *rest = data_of(name, step, 2 * REPLICAS * ROWS)
    return [(part, *rest) for part in first.split(ROWS)]


def train(mesh: zs.Mesh, name: str, setting: str, zero: int) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(1)
    chosen = {"pipeline_parallel": STAGES, "pipeline_parallel.balance": "parameters", "microbatches": 2, "zero": zero}
    plan = zs.Plan.from_dict(chosen | SETTINGS[setting])
    engine = zs.Engine(MODELS[name][0](), OPTIMIZERS["adamw"], plan, mesh=mesh, example=parts(name, 9)[0])
    assert engine.data_ranks == REPLICAS and engine.pipeline is not None and engine.pipeline.skips
    losses = []
    for step in range(STEPS):
        own = parts(name, step)[2 * engine.data_rank :][:2]
        losses.append(float(engine.train_step(zs.Microbatches(own)).loss))  # type: ignore[arg-type]
    return losses, engine.state_dict()


def plainly(name: str) -> PlainRun:
    steps = [parts(name, step) for step in range(STEPS)]
    torch.manual_seed(1)
    return plain_loop(MODELS[name][0](), OPTIMIZERS["adamw"], steps, lambda model, part: model(*part))


@pytest.mark.whole
@pytest.mark.parametrize("name, setting, zero", CASES)
def test_replicas_of_stages_follow_a_plain_loop(wide_pool: Pool, name: str, setting: str, zero: int) -> None:
    follows_plain_loop(wide_pool.run(train, STAGES * REPLICAS, name, setting, zero), plainly(name))
