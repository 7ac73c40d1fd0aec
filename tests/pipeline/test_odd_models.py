"""Models made at random, whose blocks pass values in odd ways, train in stages as in one process, or are refused."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from pipeline.chains import in_parts, on_stages, whole
from pipeline.cut.odd_models import OddModel, batch
from plain_loop import PlainRun, follows_plain_loop, plain_loop
from pool import Pool
from selection import by_default

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.chain import Chain

SGD, STEPS = partial(torch.optim.SGD, lr=0.02, momentum=0.9), 3
SEEDS = by_default(range(100), 6, 14)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "naive")
REFUSED = ("a view of memory that was overwritten", "that does not come through the layers before it")


def refused(model: OddModel, error: str) -> bool:
    """Whether a refusal is for the one kind of code whose values no stage can follow."""
    return "written_twice" in str(model) and any(said in error for said in REFUSED)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_odd_models(seed: int) -> None:
    """Each boundary alone, and all at once, also with the weights of each part alone."""
    model = OddModel(seed)
    cut, example, other = copy.deepcopy(model), batch(1, 2), batch(2, 3)
    try:
        chain = Chain(cut, lambda: cut(*example), model.units)
    except ModelError as error:
        if not refused(model, str(error)):
            raise
        return
    expected, every = whole(model, other), list(range(len(chain.layers) - 1))
    found = [in_parts(chain, other, cut, firsts) for firsts in [*([0, first] for first in every[1:]), every]]
    for loss, gradients in [*found, on_stages(model, example, other, every, blocks=model.units)]:
        torch.testing.assert_close(loss, expected[0])
        unused = {name: torch.zeros_like(gradients[name]) for name in gradients.keys() - expected[1].keys()}
        torch.testing.assert_close(gradients, expected[1] | unused, rtol=1e-4, atol=1e-5)


Trained = tuple[list[float], dict[str, Any], float]


def train(mesh: zs.Mesh, seed: int, schedule: str) -> Trained | str:
    """Losses, weights and an evaluation; or the refusal."""
    model, chunks = OddModel(seed), 2 if schedule == "interleaved" else 1
    cut = zs.Pipeline(mesh.ranks, schedule=schedule, virtual_stages=chunks, balance="parameters")  # type: ignore[arg-type]
    plan = zs.Plan(pipeline_parallel=cut, microbatches=mesh.ranks, units=tuple(model.units))
    try:
        engine = zs.Engine(model, SGD, plan, mesh=mesh, example=batch(0, 2))
    except ModelError as error:
        return str(error)
    losses = [float(engine.train_step(batch(1 + step, 2 * mesh.ranks)).loss) for step in range(STEPS)]  # type: ignore[arg-type]
    engine.eval()
    with torch.no_grad():
        return losses, engine.state_dict(), float(engine(*batch(9, 2)))


def plainly(seed: int, microbatches: int) -> tuple[PlainRun, float]:
    model = OddModel(seed)
    steps = [
        list(zip(*(each.chunk(microbatches) for each in batch(1 + step, 2 * microbatches)), strict=True))
        for step in range(STEPS)
    ]
    run = plain_loop(model, SGD, steps, lambda model, part: model(*part))
    with torch.no_grad():
        return run, float(model.eval()(*batch(9, 2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_models_train_in_stages(pool: Pool, seed: int) -> None:
    """In two or three stages under one of the schedules; a hundred seeds meet each pair ten times."""
    stages, schedule = 2 + seed % 2, SCHEDULES[seed // 2 % len(SCHEDULES)]
    model = OddModel(seed)
    answers = pool.run(train, stages, seed, schedule)
    if isinstance(answers[0], str):
        assert refused(model, answers[0]), answers[0]
        return
    run, evaluated = plainly(seed, stages)
    follows_plain_loop([each[:2] for each in answers], run)
    assert [each[2] for each in answers] == pytest.approx([evaluated] * stages, rel=1e-5)
