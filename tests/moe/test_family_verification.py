"""`zeroshard verify` finds nothing on models of transformers under expert parallelism, and names its published bugs."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool

import zeroshard as zs
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.run import compared

pytest.importorskip("transformers")

from moe.families import FAMILIES, seeded, words

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-zero0": (2, {"expert_parallel": 2, "zero": 0}),
    "ep2-zero3-m2": (2, {"expert_parallel": 2, "zero": 3, "transport": "network", "microbatches": 2}),
    "ep4-zero2-clip": (4, {"expert_parallel": 4, "zero": 2, "clip_norm": 0.05}),
    "ep2x2-zero3": (4, {"expert_parallel": 2, "zero": 3}),
}


def job(family: str, plan: str) -> VerificationJob:
    """Two steps of a family under a plan."""
    ranks, settings = PLANS[plan]
    functions = partial(seeded, family), zs.Plan.from_dict(settings), partial(words, rows=16), OPTIMIZER
    return VerificationJob(*functions, None, ranks, steps=2).exact()


def observe_all(mesh: zs.Mesh, jobs: list[VerificationJob]) -> list[RankRecord]:
    """What a rank sees of each job."""
    return [observe(mesh, job) for job in jobs]


@pytest.mark.parametrize("plan", PLANS)
def test_families_give_no_false_alarm(pool: Pool, plan: str) -> None:
    jobs = [job(family, plan) for family in FAMILIES]
    answers = pool.run(observe_all, PLANS[plan][0], jobs)
    for number, (family, made) in enumerate(zip(FAMILIES, jobs, strict=True)):
        found = compared(made, [answer[number] for answer in answers])
        assert found.ok, f"{family}: {found}"
        assert sum(row.count for row in found.table) > 30
