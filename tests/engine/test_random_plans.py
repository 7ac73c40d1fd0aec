"""Any plan that can be made is right: drawn at random, it is refused with the way out, or trains like the plain loop.

More cases than these: `python benchmarks/random_plans.py --count 1000`.
"""

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.random_plans import USUAL, Case, Refusal, Step, draw, drawn_fields, message_of, refusal_of
from engine.random_runs import perform
from engine.random_verdicts import judge, refused
from pool import Pool
from selection import by_default

SEEDS = range(60)
SHOWN = SEEDS[:30]


@pytest.mark.parametrize("seed", by_default(SEEDS, *SHOWN))
@pytest.mark.filterwarnings("ignore:.*are frozen:UserWarning")
def test_a_drawn_plan_is_refused_or_trains_like_the_plain_loop(pool: Pool, seed: int, tmp_path: Path) -> None:
    case = draw(seed)
    verdict = refused(case)
    if verdict is None:
        verdict = judge(case, [answers[0] for answers in pool.run(perform, case.ranks, [case], str(tmp_path))])
    assert not verdict.complaints, (case, *verdict.complaints)


def test_every_field_of_a_plan_is_drawn() -> None:
    assert drawn_fields() == USUAL.keys()


def test_a_seed_gives_one_case_that_can_be_read_back() -> None:
    for seed in SEEDS:
        case = draw(seed)
        assert eval(repr(case), {"Case": Case, "Step": Step, "inf": float("inf")}) == case == draw(seed)


def test_a_good_part_of_what_is_drawn_can_be_made_and_of_all_kinds() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(300):
        case = draw(seed)
        if message_of(case.plan) is None:
            kinds[
                "pipelines"
                if "pipeline_parallel" in case.plan
                else "offload"
                if "offload" in case.plan
                else "one stage"
            ] += 1
    assert kinds.total() > 100 and len(kinds) == 3 and min(kinds.values()) > 30 and kinds.total() < 270


@pytest.mark.parametrize(
    "message, needed, complaint",
    [
        ("zero=3 and pipeline_parallel=2 do not combine. Use zero=1.", ("zero", "pipeline_parallel"), None),
        ("zero=3 and pipeline_parallel=2 do not combine.", ("zero", "pipeline_parallel"), "way out"),
        ("zero=3 does not do. Use zero=1.", ("zero", "pipeline_parallel"), "names zero"),
        ("This plan does not do. Use another.", ("zero",), "none of them"),
        ("seed is 'x'; it must be a whole number.", ("seed", "pipeline_parallel"), None),
    ],
)
def test_a_refusal_needs_both_settings_and_the_way_out(
    message: str, needed: tuple[str, ...], complaint: str | None
) -> None:
    found = Refusal(message, needed).complaint
    assert found is None if complaint is None else found is not None and complaint in found


def test_the_fields_of_a_refusal_are_those_that_matter() -> None:
    settings = {"clip_norm": 1.0, "shard_group": 2, "seed": 3, "zero": 0, "precision": "bf16"}
    refusal = refusal_of(settings)
    assert refusal is not None and set(refusal.needed) == {"shard_group", "zero"}
    assert refusal_of({"zero": 0}) is None


TWICE = (Step(), Step(after=("evaluate",)), Step())
PLAIN = Case(-1, 2, {"zero": 2, "clip_norm": 0.5}, {}, "Plain", "adamw", steps=TWICE)
CASES = {
    "a plain loop": PLAIN,
    "the papers' equations": dataclasses.replace(
        PLAIN,
        plan={
            "pipeline_parallel": 2,
            "pipeline_parallel.schedule": "2bw",
            "microbatches": 4,
            "pipeline_parallel.balance": "parameters",
        },
        model="Five",
        rows=48,
    ),
    "itself": dataclasses.replace(
        PLAIN, plan={"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters"}, model="Dropped"
    ),
}


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What two ranks saw of each case."""
    folder = str(tmp_path_factory.mktemp("runs"))
    found = pool.run(perform, 2, list(CASES.values()), folder)
    return {name: [answers[place] for answers in found] for place, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_went_otherwise_is_noticed(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    """On all ranks alike, as a wrong engine would."""
    case, answers = CASES[name], runs[name]
    right = judge(case, answers)
    assert (right.kind, right.compared, right.complaints) == ("trained", name, [])
    for word in ("loss", "evaluation", "weights"):
        wrong = copy.deepcopy(answers)
        for answer in wrong:
            place = max(n for n, (found, _) in enumerate(answer["log"]) if found == word)
            value = answer["log"][place][1]
            if word == "weights":
                value["blocks.0.up.weight"][0, 0] += 1e-3
            elif value[1] is not None:
                answer["log"][place] = (word, (value[0], value[1] * 1.001))
        assert judge(case, wrong).kind == "failed", word


def test_ranks_that_differ_and_formulas_that_are_not_met_are_noticed(runs: dict[str, list[dict[str, Any]]]) -> None:
    answers = copy.deepcopy(runs["a plain loop"])
    answers[1]["log"][-1][1]["head.weight"][0, 0] += 1e-6
    assert "unlike head.weight" in judge(PLAIN, answers).complaints[0]
    answers = copy.deepcopy(runs["a plain loop"])
    answers[0]["wrong"] = ["gradients on the device after step 1: planned 1, measured 2"]
    assert judge(PLAIN, answers).complaints == [f"rank 0: {answers[0]['wrong'][0]}"]
    refusal = {"refused": "PlanError", "message": "3 ranks do not divide; start 4."}
    assert judge(PLAIN, [refusal, refusal]).kind == "refused by the engine"
    assert judge(PLAIN, [refusal, answers[1]]).kind == "failed"
    assert judge(PLAIN, [{**refusal, "message": "No."}] * 2).kind == "failed"
