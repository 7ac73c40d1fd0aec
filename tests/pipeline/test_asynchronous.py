"""PipeDream and 2BW follow their papers' update equations: a single process does the same with a history of weights."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline.emulation import Case, Emulation
from pipeline.pipelines import follow, train_gpt
from pool import Pool

from zeroshard.schedule import Action, Kind

TIED = {"model": "TiedFive", "optimizer": "sgd"}
ALL = [
    Case("", (3, 2)),
    Case("", (2, 2, 1), **TIED, script="ssfsesffs"),
    Case("", (2, 2, 1), model="TiedFive", more={"clip_norm": 1.0}),
    Case("", (2, 2, 1), model="Spiked", rows=16, more={"nonfinite": "skip"}),
]
CASES = [
    *(replace(case, schedule=schedule) for schedule in ("pipedream", "vertical", "2bw") for case in ALL),
    *(Case(schedule, (1, 2, 1, 1), **TIED) for schedule in ("pipedream", "vertical")),
    Case("2bw", (2, 2, 1), **TIED),
    *(Case(schedule, (2, 2, 1), model="Skipping", script="ssfses") for schedule in ("pipedream", "vertical", "2bw")),
    Case("pipedream", (2, 1, 1, 1), model="Skipping", more={"recompute": "blocks"}),
    Case("pipedream", (1, 2, 1, 1), more={"recompute": "blocks"}),
    Case("2bw", (2, 1, 2), model="TiedFive", more={"recompute": "blocks"}),
    Case("vertical", (2, 2, 1), model="Thrifty"),  # the model's own recomputation
    Case("pipedream", (3, 2), more={"precision": "bf16"}),
    Case("pipedream", (2, 2, 1), 1, script="sfssfsssssss"),
    Case("vertical", (1, 2, 1, 1), 2, model="TiedFive", script="sfsssss", rows=7),
    Case("2bw", (2, 2, 1), 3, model="TiedFive", optimizer="adagrad", rows=11, script="sesf"),
    Case("2bw", (2, 2, 1), 3, rows=11),
    Case("2bw", (1, 2, 1, 1), 5, rows=12),
    Case("pipedream", (3, 2), replicas=(2, 2), rows=16, model="TiedFive", more={"zero": 0}),
    Case("vertical", (3, 2), replicas=(2, 2), rows=16, more={"zero": 1}),
    Case("2bw", (3, 2), 3, replicas=(2, 2), rows=16, model="TiedFive", more={"zero": 2}),
    *(Case("pipedream", (3, 2), replicas=replicas) for replicas in ((2, 1), (1, 2))),
    Case("pipedream", (2, 2, 1), replicas=(1, 2, 1), rows=12),
]
STRAIGHT = [case for case in CASES if not case.replicas and set(case.script) == {"s"} and case.microbatches == 4]
_runs: dict[str, tuple[Emulation, list[list[float]], list[dict[str, Any]]]] = {}


def run(pool: Pool, case: Case) -> tuple[Emulation, list[list[float]], list[dict[str, Any]]]:
    """The emulation, its evaluations, and what each rank saw."""
    if str(case) not in _runs:
        emulation = Emulation(case)
        evaluations = emulation.play()
        seen = pool.run(follow, len(case.ranks), case.model, case.plan, case.script, case.rows, case.optimizer)
        _runs[str(case)] = emulation, evaluations, seen
    return _runs[str(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_follow_the_papers_equations(pool: Pool, case: Case) -> None:
    emulation, evaluations, seen = run(pool, case)
    for rank, mine in enumerate(seen):
        stage = case.ranks[rank]
        assert mine["skips"] == ([(0, case.stages - 1)] if case.model == "Skipping" else [])
        blocks = range(case.firsts[stage], case.firsts[stage] + case.sizes[stage])
        ends = (["prefix"] if stage == 0 else [], ["suffix"] if stage == case.stages - 1 else [])
        assert mine["layers"] == [*ends[0], *(f"blocks.{block}" for block in blocks), *ends[1]]
        if stage < case.stages - 1:
            assert mine["losses"] == [None] * case.script.count("s")
        else:
            expected = [emulation.mean_loss(number, rank) for number in range(case.script.count("s"))]
            torch.testing.assert_close(mine["losses"], expected, rtol=1e-5, atol=0)
        expected = [values[mine["data_rank"]] for values in evaluations]
        torch.testing.assert_close(mine["evaluations"], expected, rtol=1e-5, atol=0)
        for name, value in emulation.weights().items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if set(case.script) == {"s"}], ids=str)
def test_the_trace_tells_the_promised_versions(pool: Pool, case: Case) -> None:
    """Of each forward and backward as it ran; and the lists that were verified are what ran."""
    _, _, seen = run(pool, case)
    for rank, mine in enumerate(seen):
        assert mine["actions"] == mine["promised"]
        stage, replicas = case.ranks[rank], case.per_stage[case.ranks[rank]]
        actions = [Action.parse(text) for text in mine["actions"]]
        fed = range(len(case.script) * case.microbatches // (1 if case.data_ranks > 1 else replicas))
        own = [rank - case.ranks.index(stage) + replicas * k for k in fed]
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            versions = [(a.microbatch, a.version) for a in actions if a.kind is kind]
            assert versions == [(j, case.version(stage, j)) for j in own]
        made = [action.version for action in actions if action.kind is Kind.UPDATE]
        assert made == list(range(len(fed) // case.every))


@pytest.mark.parametrize("case", STRAIGHT, ids=str)
def test_each_stage_judges_its_own_updates(pool: Pool, case: Case) -> None:
    """The norm is that of the last update of a step, before it is clipped; a stage skips without asking the others."""
    emulation, _, seen = run(pool, case)
    tolerance = 0.02 if "precision" in case.more else 1e-4
    for stage, mine in enumerate(seen):
        for step, (norm, skipped) in enumerate(zip(mine["norms"], mine["skipped"], strict=True)):
            done = ((step + 1) * case.microbatches - case.held(stage)) // case.every
            expected = emulation.norms[stage][done - 1] if done else math.nan
            assert skipped == (done > 0 and not math.isfinite(expected))
            torch.testing.assert_close(norm, expected, rtol=tolerance, atol=0, equal_nan=True)
    assert bool(emulation.clipped) == ("clip_norm" in case.more)
    assert all(map(math.isfinite, emulation.norms[0])) == ("nonfinite" not in case.more)
    assert all(math.isfinite(norm) for norms in emulation.norms[1:] for norm in norms)


@pytest.mark.parametrize("case", STRAIGHT, ids=str)
def test_as_many_versions_as_the_papers_say(pool: Pool, case: Case) -> None:
    """Stashing d - s, vertical sync d, 2BW two; a tied weight is on the last stage twice: in use, and coming."""
    emulation, _, seen = run(pool, case)
    size = emulation.dtype.itemsize
    for stage, mine in enumerate(seen):
        own = sum(parameter.numel() for parameter in emulation.parameters[stage].values()) * size
        versions = {"pipedream": case.stages - stage, "vertical": case.stages, "2bw": 2}[case.schedule]
        borrowed = 13 * 10 * size if stage == case.stages - 1 and case.model == "TiedFive" else 0
        assert mine["parameter bytes"] == (versions * own + 2 * borrowed,) * 2


def test_the_rules_lead_apart() -> None:
    """The comparison above would not mistake one rule for another, nor for no delay at all."""
    found = {}
    for schedule in ("pipedream", "vertical", "2bw"):
        emulation = Emulation(Case(schedule, (2, 2, 1)))
        emulation.play()
        found[schedule] = emulation.weights()
    prompt = Emulation(Case("pipedream", (5,)))
    prompt.play()
    found["prompt"] = prompt.weights()
    for one in found:
        for other in found:
            apart = max((found[one][name] - value).abs().max().item() for name, value in found[other].items())
            assert apart > 1e-2 or one == other


# Of the synchronous run: 32 updates, each of 16 rows in 4 microbatches, at the main job's learning rate.
GPT_BASE = ({"pipeline_parallel.schedule": "1f1b", "microbatches": 4}, 32, 16, 6e-3)
# As many rows by other schedules: updates, rows in each, learning rate, and the largest ratio of the final losses.
GPT_RUNS = {
    "stashing": ({"pipeline_parallel.schedule": "pipedream", "microbatches": 4}, 128, 4, 4e-3, 1.02),
    "vertical-sync": (
        {"pipeline_parallel.schedule": "pipedream", "pipeline_parallel.vertical_sync": True, "microbatches": 4},
        128,
        4,
        2e-3,
        1.02,
    ),
    "2bw-half-the-batch": ({"pipeline_parallel.schedule": "2bw", "microbatches": 2}, 64, 8, 6e-3, 1.05),
    "2bw-same-settings": ({"pipeline_parallel.schedule": "2bw", "microbatches": 4}, 32, 16, 6e-3, 1.10),
}


@pytest.fixture(scope="module")
def synchronous(pool: Pool) -> float:
    """The final validation loss of the synchronous run."""
    return pool.run(train_gpt, 2, *GPT_BASE)[0]


@pytest.mark.whole
@pytest.mark.parametrize("name", GPT_RUNS)
def test_the_loss_on_real_text_ends_near_the_synchronous_one(pool: Pool, synchronous: float, name: str) -> None:
    """After the same number of rows. A gradient that is one update old bears a lower rate, or wants smaller updates."""
    *job, largest = GPT_RUNS[name]
    losses = pool.run(train_gpt, 2, *job)
    assert losses[0] == losses[1]
    assert synchronous < 0.6 * math.log(256)
    assert losses[0] < largest * synchronous
