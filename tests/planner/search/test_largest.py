"""The largest model that fits: against looking at every member, the paper's formulas, and published sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.pipeline.policy import Pipeline
from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.search import largest as module
from zeroshard.planner.search.largest import (
    Family,
    Largest,
    Rung,
    largest,
    parameters_of,
    state_bytes_of,
    states_along,
)
from zeroshard.train.family import LADDER, default_plans, gpt_family, gpt_parameters, gpt_task, largest_table, people
from zeroshard.train.sizes import GPTConfig

ROOMY = 10**9


def gpt(width: int, layers: int) -> TrainingTask:
    return gpt_task(GPTConfig(vocabulary=33, context=8, width=width, heads=2, layers=layers))


def machines(count: int, memory: int) -> Machines:
    device = Device("toy", "cpu", memory, {"fp32": 1e12}, memory_bandwidth=1e11, launch_seconds=1e-6)
    link = Link(1e9)
    return Machines(device, count, count, link, link)


FAMILY = Family("toy", "", (Rung("16", 1, 2, partial(gpt, 16)), Rung("24", 2, 4, partial(gpt, 24))))
MEMBERS = [(rung.name, layers) for rung in FAMILY.rungs for layers in range(rung.fewest, rung.most + 1)]


def found_name(found: Largest) -> tuple[str, int] | None:
    return None if found.member is None else (found.member.name.split(" x ")[1], found.member.layers)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainingTask, Plan, int, int], int]:
    """Every rehearsal only once."""
    seen: dict[tuple[str, Plan], int] = {}

    def cached(task: TrainingTask, plan: Plan, ranks: int, rows: int) -> int:
        if (task.name, plan) not in seen:
            seen[task.name, plan] = state_bytes_of(task, plan, ranks, rows)
        return seen[task.name, plan]

    monkeypatch.setattr(module, "state_bytes_of", cached)
    return cached


def test_the_largest_by_states_is_that_of_looking_at_every_member(
    once: Callable[[TrainingTask, Plan, int, int], int],
) -> None:
    plan = Plan(zero=2, transport="network")
    needed = [once(gpt(int(width), layers), plan, 3, 1) for width, layers in MEMBERS]
    assert needed == sorted(set(needed))
    for at in range(len(MEMBERS) - 1):
        for room, expected in ((needed[at], at), (needed[at] - 1, at - 1)):
            found = largest(FAMILY, plan, machines(3, room), counts="states")
            assert found_name(found) == (None if expected < 0 else MEMBERS[expected])
            assert found.member is None or found.member.needed_bytes == needed[expected]
            assert found.beyond is not None and found.beyond.needed_bytes == needed[expected + 1]
    roomy = largest(FAMILY, plan, machines(3, ROOMY), counts="states")
    assert found_name(roomy) == MEMBERS[-1] and roomy.beyond is None and roomy.limit is None


def test_the_largest_by_a_step_fits_and_the_next_does_not() -> None:
    plan, family = Plan(zero=3), replace(FAMILY, rungs=FAMILY.rungs[1:])
    needed = predict(gpt(24, 3), plan, machines(2, ROOMY), 1, deep=True).peak_bytes
    found = largest(family, plan, machines(2, int(needed / 0.97) + 1))
    assert found_name(found) == ("24", 3)
    assert found.member is not None and found.member.prediction is not None
    assert found.beyond is not None and found.beyond.prediction is not None
    assert found.member.prediction.fits and found.member.prediction.peak_bytes == found.member.needed_bytes == needed
    assert not found.beyond.prediction.fits and found.beyond.needed_bytes > needed
    assert found.as_dict()["member"]["prediction"]["fits"] is True


def test_states_of_stages_are_those_of_the_fullest() -> None:
    """Mixed-precision Adam has 16 bytes per parameter, and the stages share the parameters unevenly."""
    task = gpt(24, 3)
    fullest = state_bytes_of(
        task,
        Plan(zero=0, pipeline_parallel=Pipeline(2, balance="parameters"), microbatches=2),
        2,
        2,
    )
    whole = 16 * parameters_of(task)
    assert whole / 2 < fullest < whole


@pytest.mark.parametrize("zero", [1, 3])
def test_states_along_the_layers_are_those_of_the_whole_to_the_byte(zero: int) -> None:
    """Seven ranks divide no unit, so that each is padded."""
    plan = Plan(zero=zero, precision="fp16", transport="network")  # type: ignore[arg-type]
    assert states_along(partial(gpt, 16), plan, 7, 4) == state_bytes_of(gpt(16, 4), plan, 7)


def test_the_limit_by_states_is_that_of_the_papers_formula() -> None:
    room, family = 150_000, replace(FAMILY, rungs=FAMILY.rungs[1:])
    found = largest(family, Plan(zero=1, precision="fp16", transport="network"), machines(4, room), counts="states")
    assert found.limit == pytest.approx(room / (4 + 12 / 4), rel=1e-4)  # padding is the rest


def test_nothing_fits_where_nothing_can() -> None:
    none = largest(replace(FAMILY, rungs=FAMILY.rungs[:1]), Plan(zero=3), machines(2, 1000), counts="states")
    assert none.member is None and none.limit is None and none.as_dict()["member"] is None
    assert none.beyond is not None and none.beyond.layers == 1


def test_the_ladder_has_the_published_sizes() -> None:
    """PTD-P (2104.04473), table 1, whose models have 51,200 tokens, and biases and positions beside ours."""
    published = (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0)
    for (width, _, layers), billions in zip(LADDER[-10:], published, strict=True):
        assert gpt_parameters(width, layers, 51200) == pytest.approx(1e9 * billions, rel=0.035)


def test_every_member_is_larger_than_the_one_before() -> None:
    below = 0
    for rung, (width, heads, _) in zip(gpt_family().rungs, LADDER, strict=True):
        assert width % (2 * heads) == 0 and rung.fewest <= rung.most
        assert gpt_parameters(width, rung.fewest) > below
        assert rung.fewest == 1 or gpt_parameters(width, rung.fewest - 1) <= below
        below = gpt_parameters(width, rung.most)
    task = gpt_family().rungs[3].of(12)
    assert parameters_of(task) == gpt_parameters(768, 12)
    assert task.name == "124 M: 12 x 768"


def test_the_table_has_every_plan_by_states_and_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("zeroshard.train.family.largest", lambda *args: asked.append(args[:-1]))
    four = machines(4, ROOMY)
    largest_table(four, rows=2, sequence=64)
    assert [(plan.zero, counts) for _, plan, _, _, counts in asked] == [
        (zero, counts) for zero in range(4) for counts in ("states", "step")
    ]
    for family, plan, at, rows, _ in asked:
        task = family.rungs[3].of(2)
        assert (at, rows, plan.microbatches, task.rows, task.sequence) == (four, 2, 2, 8, 64)
        assert task.batch(3)["tokens"].shape == (3, 64)


def test_plans_compute_in_16_bits_where_the_device_does() -> None:
    precisions = {name: default_plans(Machines.of(name, 8))[0].precision for name in ("V100-32", "A100-80")}
    assert precisions == {"V100-32": "fp16", "A100-80": "bf16"}
    plans = default_plans(machines(2, ROOMY), rows=4)
    assert [(plan.zero, plan.precision, plan.microbatches) for plan in plans] == [(z, "fp32", 4) for z in range(4)]


@pytest.mark.parametrize(
    "number, words", [(999, "999"), (7.22e6, "7.22 M"), (7.5e9, "7.50 B"), (127.6e9, "128 B"), (999.9e9, "1.00 T")]
)
def test_parameters_as_people_read_them(number: float, words: str) -> None:
    assert people(number) == words
