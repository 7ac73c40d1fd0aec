"""No false alarm: a sample of the zoo under a sample of the plans that `make verify` goes through."""

import pytest
from pool import Pool
from selection import by_default
from verification.zoo_jobs import MODELS, PLANS, RANKS, SPLIT, SPLITS, WIDE, job, plans_of

import zeroshard as zs
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.run import compared

SAMPLE = [
    *(("Tied", "zero3-network-m2-clip"), ("Sometimes", "zero2-m2"), ("Twice", "zero1-network"), ("Tiny", "zero2-host")),
    *(("Frozen", "zero3-host-all"), ("CheckpointedReentrant", "zero2-clip"), ("TwoDtypes", "zero1-overlap")),
    *(("TiedFive", "zb-h1"), ("DeepTied", "interleaved"), ("Nested", "group2-zero3"), ("Five", "replicas-zero3-again")),
    *(("convolutions", "zero2"), ("records-recomputed", "zero3-network"), ("adapted", "zero2-late")),
    *(("split-gpt", "tensor2-whole"), ("split-gpt2", "tensor2-1f1b"), ("split-llama-1", "tensor4-network-m2")),
    *(
        ("split-qwen3", "tensor2-whole-zb-h1"),
        ("split-opt", "tensor2-zero2-host"),
        ("split-t5", "tensor2-zero3-network"),
    ),
    *(("gpt2", "1f1b"), ("t5", "zero3-one-unit"), ("mixtral", "zero2-scaled"), ("vit", "replicas-zero0")),
]


def observe_all(mesh: zs.Mesh, jobs: list[VerificationJob]) -> list[RankRecord]:
    """What a rank sees of each job."""
    return [observe(mesh, job) for job in jobs]


def test_there_are_forty_plans_and_others_that_split_layers() -> None:
    assert len(PLANS) + len(WIDE) == 40 and len(MODELS) - len(SPLITS) >= 25
    assert len(plans_of("split-gpt")) == sum(map(len, SPLIT.values())) >= 35
    assert not {*plans_of("Five")} & {*plans_of("split-gpt")}


@pytest.mark.parametrize("ranks", by_default([2, 4], 2))
def test_the_zoo_gives_no_false_alarm(pool: Pool, ranks: int, whole: bool) -> None:
    sample = SAMPLE if whole else SAMPLE[1::3]
    jobs = [job(model, plan) for model, plan in sample if RANKS[plan] == ranks and model in MODELS]
    answers = pool.run(observe_all, ranks, jobs)
    for number, made in enumerate(jobs):
        found = compared(made, [answer[number] for answer in answers])
        assert found.ok, str(found)
        assert sum(row.count for row in found.table) > 30
