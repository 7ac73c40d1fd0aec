"""Traffic inside of layers as `engine.traffic()` shows it."""

import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from engine import models
from pool import Pool
from reproduce.block_formulas import block_messages
from split_models import training
from split_models.small_models import LAYERS
from split_models.training import Run, Seen, batch, between, make_engine, take_steps

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.reproduce.block_times import BlockShape
from zeroshard.tensor.split.planned_messages import Pair

INSIDE = ("sum activations", "gather activations")
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
        (3, (("tensor_parallel", 2),), "3 ranks do not divide among tensor_parallel=2; start a multiple of 2"),
        (2, (("tensor_parallel", 4),), "2 ranks do not divide among tensor_parallel=4; .* set tensor_parallel to 2"),
        (
            4,
            (("tensor_parallel", 4), *STAGED),
            "4 ranks do not divide among pipeline_parallel=2 times tensor_parallel=4",
        ),
        (
            4,
            (("tensor_parallel", 2), ("shard_group", 4)),
            "4 ranks do not divide among tensor_parallel=2 times shard_group=4; start a multiple of 8",
        ),
    ],
)
def test_ranks_that_do_not_divide(pool: Pool, ranks: int, plan: tuple[Any, ...], words: str) -> None:
    for message in pool.run(refused, ranks, plan):
        assert re.search(words, message), message


def counted(mesh: zs.Mesh, runs: list[Run]) -> list[dict[str, tuple[int | None, int]]]:
    """Planned and measured elements of what is sent inside of layers in a step of each run."""
    found = []
    for run in runs:
        engine = make_engine(mesh, run)
        take_steps(engine, run, Seen(), 1)
        rows = {row.purpose: row for row in engine.traffic()}
        inside = [rows[name] for name in INSIDE if name in rows]
        found.append({row.purpose: (row.planned_elements, row.measured_elements) for row in inside})
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("positions", [12, 13])
def test_a_step_sends_what_the_papers_say(pool: Pool, ranks: int, positions: int) -> None:
    """Blocks by their formula; the embedding and the output layer a sum each; the stack its ends."""
    microbatches = 2
    runs = [
        Run(
            "gpt",
            (("tensor_parallel", ranks), ("tensor_parallel.sequence", sequence), ("microbatches", microbatches)),
            microbatches,
            1,
            positions,
        )
        for sequence in (True, False)
    ]
    shape = BlockShape(rows=2, positions=positions, width=32, heads=4)
    for answer in pool.run(counted, ranks, runs):
        for sequence, found in zip((True, False), answer, strict=True):
            block = block_messages(sequence).wire_elements(shape)
            ends = {"sum activations": 4 * shape.elements, "gather activations": 2 * sequence * shape.elements}
            wanted = {name: microbatches * (LAYERS * block[name] + ends[name]) for name in block}
            assert found == {name: (n, n) for name, n in wanted.items() if n}


def test_formulas_of_all_families_but_those_of_several_stacks(pool: Pool, whole: bool) -> None:
    """Also with key heads that several ranks hold; a T5 has two stacks, and cross attention."""
    pytest.importorskip("transformers")
    names = training.MODELS if whole else ("gpt2", "llama-1", "t5")
    runs = [Run(name, (("tensor_parallel", 4),), positions=12) for name in names]
    for answer in pool.run(counted, 4, runs):
        for run, found in zip(runs, answer, strict=True):
            assert len(found) == 2
            assert all((planned is None) == (run.name == "t5") for planned, _ in found.values())
            assert all(planned in (None, measured) for planned, measured in found.values()), (run.name, found)


def test_the_pairs_of_a_block_make_its_formula() -> None:
    shape, pair = BlockShape(3, 5, 16, 4), Pair(16, 16)
    for sequence in (True, False):
        found: Counter[str] = Counter()
        for elements in 2 * [pair.forward(sequence), pair.backward(sequence)]:
            found.update({str(purpose): each * 15 for purpose, each in elements.items()})
        assert found == {k: v for k, v in block_messages(sequence).wire_elements(shape).items() if v}


def without(mesh: zs.Mesh, plan: tuple[tuple[str, Any], ...], kind: str) -> list[int | None]:
    """The formulas of a model that has none, or of a step in which something else is sent."""
    model: Any = training.build("gpt2")
    if kind == "frozen":
        model.transformer.wte.weight.requires_grad_(False)
    elif kind == "recomputed":
        model.gradient_checkpointing_enable()
    loss = (lambda output, rows: output.logits.square().mean()) if kind == "whole logits" else None
    engine = zs.Engine(model, training.ADAMW, zs.Plan.from_dict(dict(plan)), mesh=mesh, loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            rows = batch("gpt2", step, 2)
            engine.train_step({"input_ids": rows["input_ids"]} if loss else rows)
    return [row.planned_elements for row in engine.traffic() if row.purpose in INSIDE]


@pytest.mark.parametrize("kind", ["frozen", "recomputed", "whole logits"])
def test_where_there_is_no_formula(pool: Pool, kind: str) -> None:
    pytest.importorskip("transformers")
    assert pool.run(without, 2, (("tensor_parallel", 2),), kind) == [[None] * 2] * 2


def rounded(mesh: zs.Mesh, ranks: int) -> str:
    settings = {"tensor_parallel": ranks, "offload": "optimizer", "offload.moments": "8bit"}
    try:
        engine = zs.Engine(models.build("Attending"), training.ADAMW, zs.Plan.from_dict(settings), mesh=mesh)
    except PlanError as error:
        return str(error)
    for number in range(2):
        engine.train_step((models.batch(number, 0, 1), number))
        engine.check_replicas()
    return ""


def test_copies_of_heads_have_no_moments_that_are_rounded_by_blocks(pool: Pool) -> None:
    """Two key heads: on two ranks each has one, on four two ranks have one of them."""
    assert pool.run(rounded, 2, 2) == ["", ""]
    for message in pool.run(rounded, 4, 4):
        assert "has features that several ranks hold" in message
