"""Ranks that do not divide are refused with every setting that divides them, and with settings that do."""

from typing import Any

import pytest

import zeroshard as zs
from zeroshard.engine.techniques import data_ranks_of
from zeroshard.errors import PlanError
from zeroshard.validation.rank_count import check_ranks

LAYERS, STAGES, EXPERTS = "tensor_parallel", "pipeline_parallel", "expert_parallel"


@pytest.mark.parametrize(
    "ranks, plan, said",
    [
        (
            4,
            {STAGES: 3, LAYERS: 2},
            "4 ranks do not divide among pipeline_parallel=3 times tensor_parallel=2; start a multiple of 6 ranks, or "
            "set pipeline_parallel to 2.",
        ),
        (
            1,
            {LAYERS: 2},
            "1 rank does not divide among tensor_parallel=2; start a multiple of 2 ranks, or leave tensor_parallel "
            "out.",
        ),
        (
            3,
            {STAGES: 2},
            "3 ranks do not divide among pipeline_parallel=2; start a multiple of 2 ranks, or set pipeline_parallel to "
            "3, or say how many each stage gets, such as replicas=(2, 1).",
        ),
        (
            5,
            {STAGES: 2, LAYERS: 2},
            "5 ranks do not divide among pipeline_parallel=2 times tensor_parallel=2; start a multiple of 4 ranks, or "
            "leave pipeline_parallel and tensor_parallel out.",
        ),
        (
            4,
            {STAGES: 2, EXPERTS: 4},
            "4 ranks do not divide among pipeline_parallel=2 times expert_parallel=4; start a multiple of 8 ranks, or "
            "leave pipeline_parallel out, or set expert_parallel to 2.",
        ),
        (
            6,
            {"shard_group": 4},
            "6 ranks do not divide among shard_group=4; start a multiple of 4 ranks, or set shard_group to 3.",
        ),
        (
            4,
            {STAGES: zs.Pipeline(2, replicas=(3, 1)), LAYERS: 2, "microbatches": 3},
            "replicas=(3, 1) times tensor_parallel=2 needs 8 ranks and there are 4; start as many.",
        ),
    ],
)
def test_the_refusal_names_what_divides(ranks: int, plan: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        data_ranks_of(zs.Plan(**plan), ranks)
    assert str(caught.value) == said


def test_what_is_said_to_fit_does() -> None:
    """Ranks and settings of each kind: where none of them is refused, the engine's own layout agrees."""
    fits = 0
    for ranks in range(1, 9):
        for stages in (1, 2, 3):
            for layers in (1, 2, 3):
                for experts in (1, 2, 3):
                    plan = zs.Plan(pipeline_parallel=stages, tensor_parallel=layers, expert_parallel=experts)
                    try:
                        check_ranks(plan, ranks)
                    except PlanError:
                        continue
                    fits += 1
                    assert data_ranks_of(plan, ranks) * stages * layers == ranks
    assert fits > 20
