"""`zeroshard verify` finds nothing on models of transformers under expert parallelism, and names its published bugs."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from verification.injected import around

import zeroshard as zs
from zeroshard.parts.axes import Axes, PlaceKind
from zeroshard.parts.place import Place
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.run import compared

pytest.importorskip("transformers")

from moe.families import FAMILIES, seeded, words

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-zero0": (2, {"expert_parallel": 2, "zero": 0}),
    "ep2-zero3-m2": (
        2,
        {"expert_parallel": 2, "zero": 3, "transport": "network", "microbatches": 2, "clip_norm": 0.05},
    ),
    "ep4-zero2": (4, {"expert_parallel": 4, "zero": 2}),
    "ep2x2-zero3": (4, {"expert_parallel": 2, "zero": 3, "clip_norm": 0.05}),
}
SAMPLE: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("mixtral", "stages"): (4, {"expert_parallel": 2, "pipeline_parallel": 2, "microbatches": 2}),
    ("gpt_oss", "stages"): (
        4,
        {"expert_parallel": 2, "pipeline_parallel": 2, "microbatches": 2, "recompute": "blocks"},
    ),
    ("qwen3_moe", "tensor"): (4, {"expert_parallel": 2, "tensor_parallel": 2}),
    ("deepseek_v3", "tensor"): (4, {"expert_parallel": 2, "tensor_parallel": 2}),
    ("olmoe", "offload"): (2, {"expert_parallel": 2, "zero": 3, "offload": "optimizer,parameters"}),
}
SHOWN = [("mixtral", "stages"), ("qwen3_moe", "tensor"), ("olmoe", "offload")]


def job(family: str, plan: str) -> VerificationJob:
    """Two steps of a family under a plan."""
    ranks, settings = SAMPLE.get((family, plan)) or PLANS[plan]
    functions = partial(seeded, family), zs.Plan.from_dict(settings), partial(words, rows=16), OPTIMIZER
    return VerificationJob(*functions, None, ranks, steps=2).exact()


def observe_all(mesh: zs.Mesh, jobs: list[VerificationJob]) -> list[RankRecord]:
    """What a rank sees of each job."""
    return [observe(mesh, job) for job in jobs]


@pytest.mark.parametrize("plan", by_default(PLANS, "ep2x2-zero3"))
def test_families_give_no_false_alarm(pool: Pool, plan: str, whole: bool) -> None:
    families = tuple(FAMILIES) if whole else ("mixtral",)
    jobs = [job(family, plan) for family in families]
    answers = pool.run(observe_all, PLANS[plan][0], jobs)
    for number, (family, made) in enumerate(zip(families, jobs, strict=True)):
        found = compared(made, [answer[number] for answer in answers])
        assert found.ok, f"{family}: {found}"
        assert sum(row.count for row in found.table) > 30


@pytest.mark.parametrize("ranks", by_default([2, 4], 4))
def test_a_sample_of_other_plans_gives_no_false_alarm(pool: Pool, ranks: int, whole: bool) -> None:
    jobs = [job(*name) for name in (SAMPLE if whole else SHOWN) if SAMPLE[name][0] == ranks]
    answers = pool.run(observe_all, ranks, jobs)
    for number, made in enumerate(jobs):
        found = compared(made, [answer[number] for answer in answers])
        assert found.ok, str(found)


def observe_multiplied(mesh: zs.Mesh, made: VerificationJob) -> RankRecord:
    """What a rank sees while gradients of experts are divided by the ranks that hold the same ones (pytorch#160285)."""

    def place(original: Any, self: Axes, kind: PlaceKind) -> Place:
        found: Place = original(self, kind)
        return replace(found, divisor=found.divisor // made.plan.experts.ranks) if kind.axis else found

    with around(Axes, "_place", place):
        return observe(mesh, made)


@pytest.mark.parametrize("plan", by_default(PLANS, "ep2-zero3-m2"))
@pytest.mark.parametrize("family", ["mixtral", "switch_transformers"])
def test_gradients_of_experts_that_are_multiplied_are_named(pool: Pool, family: str, plan: str) -> None:
    broken = job(family, plan)
    found = compared(broken, pool.run(observe_multiplied, broken.ranks, broken))
    assert found.first is not None and found.first.what == "gradient", str(found)
    assert ".mlp.experts" in found.first.module
    times = broken.plan.experts.ranks
    assert f"it is {times} times the mean: the sum is divided by a wrong number of ranks" in found.first.cause
