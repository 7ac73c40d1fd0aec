"""Traffic inside of layers as `engine.traffic()` shows it."""

import re
from typing import Any

import pytest
import torch
from pool import Pool
from split_models.training import Run, batch, between, make_engine

import zeroshard as zs
from zeroshard.errors import PlanError

STAGED = (("pipeline_parallel", 2), ("pipeline_parallel.balance", "parameters"), ("microbatches", 2))


def rows_of(engine: zs.Engine) -> dict[str, tuple[int, int]]:
    return {row.purpose: (row.measured_elements, row.calls) for row in engine.traffic()}


def step(engine: zs.Engine, number: int) -> dict[str, tuple[int, int]]:
    rows = batch("gpt", number, 4 * engine.data_ranks)
    engine.train_step(between(rows, 4 * engine.data_rank, 4 * engine.data_rank + 4))
    return rows_of(engine)


def evaluated(mesh: zs.Mesh, plan: tuple[tuple[str, Any], ...]) -> list[dict[str, tuple[int, int]]]:
    """The traffic of a step, and of another with an evaluation before it."""
    engine = make_engine(mesh, Run("gpt", plan))
    first = step(engine, 0)
    with torch.no_grad():
        engine(**batch("gpt", 7, 2))
    return [first, step(engine, 1)]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("ranks, more", [(2, ()), (4, STAGED)], ids=["one-stage", "two-stages"])
def test_evaluations_are_counted_apart(pool: Pool, ranks: int, more: tuple[Any, ...], sequence: bool) -> None:
    plan = (("tensor_parallel", 2), ("tensor_parallel.sequence", sequence), *more)
    for alone, after in pool.run(evaluated, ranks, plan):
        assert "sum to evaluate" not in alone and after.pop("sum to evaluate")[0] > 0
        gathered = after.pop("gather to evaluate", None)
        assert "gather to evaluate" not in alone and (gathered is not None or not sequence)
        after.pop("send to evaluate", None)
        for purpose in ("agreement", "set-up"):
            alone.pop(purpose, None), after.pop(purpose, None)
        assert alone == after


def refused(mesh: zs.Mesh, plan: tuple[tuple[str, Any], ...]) -> str:
    with pytest.raises(PlanError) as error:
        make_engine(mesh, Run("gpt", plan))
    return str(error.value)


@pytest.mark.parametrize(
    "ranks, plan, words",
    [
        (3, (("tensor_parallel", 2),), "3 ranks of a stage do not divide .*tensor_parallel=2; start a multiple of 2"),
        (2, (("tensor_parallel", 4),), "2 ranks of a stage do not divide .*tensor_parallel=4; .* a divisor of 2"),
        (4, (("tensor_parallel", 4), *STAGED), "2 ranks of a stage do not divide .*tensor_parallel=4"),
        (4, (("tensor_parallel", 2), ("shard_group", 4)), "2 ranks do not divide .*shard_group=4"),
    ],
)
def test_ranks_that_do_not_divide(pool: Pool, ranks: int, plan: tuple[Any, ...], words: str) -> None:
    for message in pool.run(refused, ranks, plan):
        assert re.search(words, message), message
