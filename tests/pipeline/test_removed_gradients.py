"""Gradients that the loop removes between two steps of a pipeline: none is left, and none is counted twice."""

from collections.abc import Callable
from typing import Any

import pytest
from engine.models import OPTIMIZERS, build, plain
from pipeline.pipelines import data
from plain_loop import follows_plain_loop
from pool import Pool
from torch import nn

import zeroshard as zs

ROWS, STEPS = 8, 3
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"microbatches": 4},
    "zb-h1": {"microbatches": 4, "pipeline_parallel.schedule": "zb-h1"},
    "each-microbatch": {"microbatches": 2, "reduce_every": "microbatch"},
}


def to_none(model: nn.Module) -> None:
    """Set every gradient to None."""
    for parameter in model.parameters():
        parameter.grad = None


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "zero_grad": nn.Module.zero_grad,
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "none": to_none,
}


def train(mesh: zs.Mesh, plan: dict[str, Any], way: str) -> Any:
    model = build("Plain")
    plan = {"pipeline_parallel": 2, "pipeline_parallel.split": ("blocks.1",), **plan}
    engine = zs.Engine(model, OPTIMIZERS["adamw"], zs.Plan.from_dict(plan), mesh=mesh, example=(data(0, 0, 1, 2), 0))
    losses = []
    for step in range(STEPS):
        losses.append(engine.train_step((data(step, 0, 1, ROWS), step)).loss.item())  # type: ignore[union-attr]
        WAYS[way](model)
    return losses, engine.state_dict()


CASES = [*(("1f1b", way) for way in WAYS), ("zb-h1", "none"), ("each-microbatch", "none")]


@pytest.mark.parametrize("name, way", CASES)
def test_gradients_removed_between_steps(pool: Pool, name: str, way: str) -> None:
    follows_plain_loop(pool.run(train, 2, PLANS[name], way), plain("Plain", "adamw", [ROWS] * STEPS))
