"""recompute="auto": the run keeps within its budget at every feasible one, and the numbers are those of kept blocks."""

import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from engine.zoo import ZOO
from moe import mixed
from pipeline import pipelines
from pool import Pool
from recompute.test_recompute import Stack, batch, train_zoo
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import BudgetExceeded, PlanError
from zeroshard.recompute.auto import decision as chain_decision
from zeroshard.recompute.auto.meter import BlockMeasures
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Mixed(Stack):
    """Blocks, some of which are several times as large as others, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__(5)
        self.blocks.append(Stack(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number in (0, 1, 2, 1, 3, 4):
            x = self.blocks[number](x)
        return self.leave(x).square().mean() + self.blocks[5](x)


def gpt() -> torch.nn.Module:
    return GPT(GPTConfig(32, 6, 16, 2, 7, 0.1))


MODELS: dict[str, Any] = {"stack": partial(Stack, 9), "mixed": Mixed, "gpt": gpt}


def batch_of(name: str, step: int, rank: int, rows: int = 4) -> tuple[Any, ...]:
    if name != "gpt":
        return (batch(step, rank, rows),)
    tokens = torch.randint(32, (rows, 7), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], steps: int = 3, rows: tuple[int, ...] = (4,)) -> Any:
    """Losses, norms and weights, the most bytes of each step, recomputed blocks; or why the budget is too small."""
    torch.manual_seed(0)
    peaks, seen = [], []
    try:
        engine = zs.Engine(MODELS[name](), SGD, zs.Plan.from_dict(plan), mesh=mesh, example=batch_of(name, 0, 0))
        torch.manual_seed(1 + mesh.rank)
        for step in range(steps):
            with engine.trace(memory=True) as trace:
                result = engine.train_step(batch_of(name, step, engine.data_rank, rows[step % len(rows)]))
            peaks.append(max(sum(event.nbytes.values()) for event in trace.memory))
            seen.append((None if result.loss is None else result.loss.item(), result.grad_norm))
    except BudgetExceeded as error:
        return str(error)
    rest = sum(row.peak_bytes for row in engine.memory() if row.tier == "device" and row.category != "activations")
    weights = {} if sliced(plan) else engine.state_dict()  # which gathers all, beyond the budget
    return seen, weights, peaks, engine.recomputed, rest, engine.activation_decisions


def sliced(plan: dict[str, Any]) -> bool:
    """Whether weights come and go."""
    return plan["zero"] == 3 and plan.get("transport") == "network"


def run_all(mesh: zs.Mesh, name: str, plans: list[dict[str, Any]], rows: tuple[int, ...] = (4,)) -> list[Any]:
    return [train(mesh, name, plan, rows=rows) for plan in plans]


def least_of(error: str) -> int:
    """The figure that an error gives."""
    found = re.search(r"Set device_memory=(\d+)", error)
    assert found is not None, error
    return int(found[1])


def same(found: Any, kept: Any) -> bool:
    return found[0] == kept[0] and all(torch.equal(value, kept[1][key]) for key, value in found[1].items())


STAGES: list[dict[str, Any]] = [{"zero": 0}, {"zero": 1, "microbatches": 2}, {"zero": 2, "rng": "exact"}, {"zero": 3},
                                {"zero": 3, "transport": "network"}]  # fmt: skip


CASES = [*(("stack", plan) for plan in STAGES), ("mixed", STAGES[1]), ("gpt", STAGES[0]), ("gpt", STAGES[4])]


@pytest.mark.parametrize("case", by_default(CASES, CASES[-1]), ids=str)
def test_the_run_keeps_within_each_feasible_budget(pool: Pool, case: tuple[str, dict[str, Any]]) -> None:
    name, plan = case
    auto = {**plan, "recompute": "auto"}
    kept = pool.run(run_all, 2, name, [{**plan, "recompute": "off"}])
    highest = max(max(answer[0][2]) for answer in kept)
    refused = pool.run(run_all, 2, name, [{**auto, "device_memory": budget_of_states(kept)}])
    lowest = least_of(refused[0][0])
    assert refused[0] == refused[1] and lowest < highest
    budgets = [lowest + (highest - lowest) * n // 4 for n in range(5)]
    answers = pool.run(run_all, 2, name, [{**auto, "device_memory": budget} for budget in budgets])
    for rank in range(2):
        again, bytes_kept = [], []
        for budget, found in zip(budgets, answers[rank], strict=True):
            assert not isinstance(found, str), (budget, found)
            assert same(found, kept[rank][0]) and max(found[2]) <= budget, (budget, found[2])
            again.append(found[3])
            bytes_kept.append(sum(row["kept_bytes"] for row in found[5]))
        assert again[0] == max(again) and bytes_kept[0] == min(bytes_kept) < bytes_kept[-1]


def budget_of_states(kept: list[Any]) -> int:
    """A budget that holds all but activations, and few of those."""
    return max(int(answer[0][4]) for answer in kept) + 2000


def test_below_the_least_it_is_refused(pool: Pool) -> None:
    plan = {"zero": 0, "recompute": "auto"}
    kept = pool.run(run_all, 1, "gpt", [{"zero": 0}])
    first = pool.run(run_all, 1, "gpt", [{**plan, "device_memory": budget_of_states(kept)}])[0][0]
    lowest = least_of(first)
    below, at = pool.run(run_all, 1, "gpt", [{**plan, "device_memory": lowest - 1}, {**plan, "device_memory": lowest}])[
        0
    ]
    assert least_of(below) == lowest and not isinstance(at, str)
    assert max(at[2]) <= lowest


def test_shapes_that_were_not_planned_are_decided_anew(pool: Pool) -> None:
    plan = {"zero": 2}
    rows = (2, 8, 4)
    kept = pool.run(run_all, 2, "stack", [plan], rows)
    highest = max(max(answer[0][2]) for answer in kept)
    found = pool.run(run_all, 2, "stack", [{**plan, "recompute": "auto", "device_memory": int(highest * 0.8)}], rows)
    for rank in range(2):
        assert same(found[rank][0], kept[rank][0]) and max(found[rank][0][2]) <= highest * 0.8
        assert found[rank][0][3] > 0


@pytest.mark.parametrize("name", by_default(ZOO, "recurrent", "fickle", "thrifty-reentrant", "convolutions"))
def test_models_as_people_write_them(pool: Pool, name: str) -> None:
    plan: dict[str, Any] = {"zero": 1} | ({"units": ()} if name == "fickle" else {})
    plans = [{**plan, "recompute": "off"}, {**plan, "recompute": "auto", "device_memory": "1GiB"}]
    for kept, found in pool.run(train_zoo, 2, name, plans):
        assert found[0] == kept[0] and all(torch.equal(value, kept[1][key]) for key, value in found[1].items())


SCHEDULES = ["1f1b", "gpipe", "zb-h1", "2bw", "interleaved"]


@pytest.mark.parametrize("schedule", by_default(SCHEDULES, "1f1b", "2bw"))
def test_stages_of_a_pipeline(pool: Pool, schedule: str) -> None:
    plan = {"zero": 1, "pipeline_parallel": 2, "microbatches": 4, "pipeline_parallel.schedule": schedule}
    plan |= {"pipeline_parallel.virtual_stages": 2} if schedule == "interleaved" else {}
    kept = pool.run(pipelines.train, 2, "TiedFive", {**plan, "recompute": "off"}, 3, 16)
    found = pool.run(pipelines.train, 2, "TiedFive", {**plan, "recompute": "auto", "device_memory": "1GiB"}, 3, 16)
    for answer, expected in zip(found, kept, strict=True):
        assert answer[0] == expected[0]
        assert all(torch.equal(value, expected[1][name]) for name, value in answer[1].items())


@pytest.mark.parametrize("seed", by_default(range(4), 0))
def test_any_ways_that_times_may_ask_for_keep_within_the_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured seconds are replaced by random ones, so that all ways to keep a block occur."""
    draw = random.Random(seed)

    def drawn(blocks: list[BlockMeasures]) -> list[BlockMeasures]:
        found = []
        for block in blocks:
            shorter = sorted((8 * draw.random() for _ in block.tails), reverse=True)
            tails = tuple(replace(each, seconds=until) for each, until in zip(block.tails, shorter, strict=True))
            times = {"seconds": 8 + draw.random(), "again": 8 + draw.random()}
            found.append(replace(block, tails=tails, **times))
        return found

    monkeypatch.setattr(chain_decision, "alike", drawn)
    mesh = zs.Mesh(0, 1)
    kept = train(mesh, "gpt", {"zero": 0})
    states, highest = int(kept[4]), max(kept[2])
    actions = set()
    for part in (0.35, 0.5, 0.65, 0.8):
        found = train(
            mesh, "gpt", {"zero": 0, "recompute": "auto", "device_memory": round(states + (highest - states) * part)}
        )
        assert not isinstance(found, str) and same(found, kept)
        assert max(found[2]) <= states + (highest - states) * part
        rows = found[5]
        actions |= {re.sub(r"[0-9]+", "n", row["action"]) for row in rows}
        for row in rows:
            assert row["measured_again"] == row["again"]
            assert row["measured_kept_bytes"] is None or row["measured_kept_bytes"] <= row["kept_bytes"] + 64
    assert len(actions) > 2


@pytest.mark.parametrize("zero", by_default([1, 3], 3))
def test_mixtures_route_as_in_their_forward(pool: Pool, zero: int) -> None:
    plan = {"zero": zero, "transport": "network", "expert_parallel": 2}
    plans = [{**plan, "activations": "auto", "device_memory": budget} for budget in (82_000, 90_000, 100_000, "1GiB")]
    runs = [({"blocks": 4}, each) for each in ({**plan, "activations": "off"}, *plans)]
    for kept, *others in pool.run(mixed.follow_all, 2, runs, 2):
        for found in others:
            assert (found["losses"], found["norms"]) == (kept["losses"], kept["norms"])
            assert all(torch.equal(value, kept["weights"][name]) for name, value in found["weights"].items())


WRITTEN: list[tuple[dict[str, Any], str]] = [
    ({"recompute": "auto"}, "recompute"),
    ({"activations": "auto"}, "activations"),
    ({"activations": zs.Activations("auto")}, "activations"),
    ({"activations": zs.Activations("auto", save_sums=False)}, "activations.recompute"),
]


@pytest.mark.parametrize("plan, name", WRITTEN, ids=["recompute", "activations", "a group", "settings of a group"])
def test_it_needs_a_budget(plan: dict[str, Any], name: str) -> None:
    with pytest.raises(PlanError) as caught:
        zs.Plan(**plan)
    assert str(caught.value) == (
        f"{name}='auto' decides within device_memory, and that is not set. Set it, such as device_memory='8GiB', or "
        f"use {name}='off', 'blocks', 'sqrt' or 'selective'."
    )


SPLIT: list[dict[str, Any]] = [{"tensor_parallel": 2}, {"tensor_parallel": 2, "tensor_parallel.sequence": False}]


@pytest.mark.parametrize("plan", by_default(SPLIT, SPLIT[0]), ids=str)
def test_ranks_that_split_layers_repeat_the_same_collectives(pool: Pool, plan: dict[str, Any]) -> None:
    kept = pool.run(run_all, 2, "gpt", [{"zero": 1, **plan}])
    states, highest = (max(int(answer[0][4]) for answer in kept), max(max(answer[0][2]) for answer in kept))
    budgets = [states + (highest - states) * part // 8 for part in (4, 6)]
    auto = [{"zero": 1, **plan, "recompute": "auto", "device_memory": budget} for budget in budgets]
    for found, expected in zip(pool.run(run_all, 2, "gpt", auto), kept, strict=True):
        for answer, budget in zip(found, budgets, strict=True):
            assert not isinstance(answer, str), answer
            assert same(answer, expected[0]) and max(answer[2]) <= budget and answer[3] > 7
