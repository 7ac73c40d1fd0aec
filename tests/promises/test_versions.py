"""Versions of weights in a pipeline that never flushes, counted by what a parameter more takes."""

from functools import partial
from typing import Any

import pytest
import torch
from alive import Alive
from pool import Pool
from promises.stacks import Stack, numel_of_block, rows

import zeroshard as zs

STAGES, STEPS, MICROBATCHES = 4, 2, 4  # which fill the pipeline
TRIES = 4
INNER = (64, 256)
SCHEDULES = ("1f1b", "pipedream", "2bw")


def per_parameter(mesh: zs.Mesh, schedule: Any) -> float:
    """The most bytes in steps of the pipeline once it is full, for each parameter of this stage.

    A thread of gloo may hold a message a little after its end, so the least of several tries counts.
    """
    pipeline = zs.Pipeline(STAGES, schedule=schedule, balance="parameters")
    plan = zs.Plan(zero=0, transport="network", pipeline_parallel=pipeline, microbatches=MICROBATCHES, recompute="off")
    most = []
    for inner in INNER:
        with Alive() as alive:
            model = Stack(2 * STAGES, inner=inner)
            engine = zs.Engine(model, partial(torch.optim.SGD, lr=1e-3), plan, mesh=mesh, example=rows(1))
            for _ in range(STEPS):
                engine.train_step(rows(MICROBATCHES))
            found = []
            for _ in range(TRIES):
                alive.restart()
                for _ in range(STEPS):
                    engine.train_step(rows(MICROBATCHES))
                found.append(alive.most)
            engine.flush()
            most.append(min(found))
    return (most[1] - most[0]) / 2 / (numel_of_block(inner=INNER[1]) - numel_of_block(inner=INNER[0]))


def of_schedules(mesh: zs.Mesh) -> list[float]:
    return [per_parameter(mesh, schedule) for schedule in SCHEDULES]


def test_versions(pool: Pool) -> None:
    """A flush needs one; PipeDream one for each microbatch in flight (section 3.3), 2BW two (2006.09503)."""
    for stage, found in enumerate(pool.run(of_schedules, STAGES)):
        flushed, stashed, double = found
        held = 0.2  # bytes for each parameter, of messages that gloo holds late; a version has 4
        assert [stashed - flushed, double - flushed] == pytest.approx([4 * (STAGES - stage - 1), 4], abs=held)
