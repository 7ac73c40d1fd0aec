"""No false alarm: a sample of the zoo under a sample of the plans that `make verify` goes through."""

import pytest
from pool import Pool
from verification.zoo_jobs import MODELS, PLANS, RANKS, WIDE, job

import zeroshard as zs
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.run import compared

SAMPLE = [
    *(("Tied", "zero3-network-m2-clip"), ("Sometimes", "zero2-m2"), ("Twice", "zero1-network"), ("Tiny", "zero2-host")),
    *(("Frozen", "zero3-host-all"), ("CheckpointedReentrant", "zero2-clip"), ("TwoDtypes", "zero1-overlap")),
    *(("TiedFive", "zb-h1"), ("DeepTied", "interleaved"), ("Nested", "group2-zero3"), ("Five", "replicas-zero3-again")),
    *(("convolutions", "zero2"), ("records-recomputed", "zero3-network"), ("adapted", "zero2-late")),
    *(("gpt2", "1f1b"), ("t5", "zero3-one-unit"), ("mixtral", "zero2-scaled"), ("vit", "replicas-zero0")),
]


def observe_all(mesh: zs.Mesh, jobs: list[VerificationJob]) -> list[RankRecord]:
    """What a rank sees of each job."""
    return [observe(mesh, job) for job in jobs]


def test_there_are_forty_plans() -> None:
    assert len(PLANS) + len(WIDE) == 40 and len(MODELS) >= 25


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_zoo_gives_no_false_alarm(pool: Pool, ranks: int) -> None:
    jobs = [job(model, plan) for model, plan in SAMPLE if RANKS[plan] == ranks and model in MODELS]
    answers = pool.run(observe_all, ranks, jobs)
    for number, made in enumerate(jobs):
        found = compared(made, [answer[number] for answer in answers])
        assert found.ok, str(found)
        assert sum(row.count for row in found.table) > 30
