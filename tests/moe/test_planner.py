"""The planner rehearses plans that share out experts, as if tokens fell on all experts alike."""

from typing import Any

import pytest
import torch
from planner.rehearsed import punctual, wire_of
from pool import Pool
from selection import by_default
from torch import nn

import zeroshard as zs
from moe.mixed import Mixed, batch, optimizer
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.planner.search.text import short

ROWS = 6
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"expert_parallel": 2, "zero": 2, "transport": "network"}),
    "2 x 2": (4, {"expert_parallel": 2, "zero": 3, "transport": "network"}),
    "shared": (2, {"expert_parallel": 2, "zero": 1, "transport": "shared"}),
    "stages": (4, {"expert_parallel": 2, "zero": 1, "transport": "network", "pipeline_parallel": 2, "microbatches": 2,
                   "pipeline_parallel.split": ("blocks.1",)}),
    "split backward": (2, {"zero": 0, "transport": "network", "pipeline_parallel": 2, "microbatches": 2,
                           "pipeline_parallel.schedule": "zb-h1", "pipeline_parallel.split": ("blocks.1",)}),
}  # fmt: skip


def build() -> nn.Module:
    """Two mixtures whose tokens fall on all experts alike, as rows go to experts of their own."""
    with torch.device("meta"):
        return Mixed("by row")


def run(mesh: zs.Mesh, plan: dict[str, Any]) -> dict[str, Any]:
    """The ledger's bytes, and what went over the wire."""
    with punctual():
        engine = zs.Engine(build(), optimizer, zs.Plan.from_dict(plan), mesh=mesh, example=batch(0, 0, ROWS // 2))
        for step in range(3):
            engine.train_step(batch(step, engine.data_rank, ROWS))
        return {"states": engine.ledger.snapshot(), "wire": wire_of(engine)}


@pytest.mark.parametrize("case", by_default(CASES, "2 x 2"))
def test_states_and_traffic_to_the_byte(pool: Pool, case: str) -> None:
    ranks, plan = CASES[case]
    real = pool.run(run, ranks, plan)
    job = TrainingTask(build, lambda rows: batch(0, 0, rows), optimizer, ROWS, 5)
    for rank in {0, ranks - 1}:
        found = rehearse(job, zs.Plan.from_dict(plan), rank, ranks, ROWS)
        assert {**found.states, "activations": 0} == {**real[rank]["states"], "activations": 0}
        sent = {name: row for name, row in real[rank]["wire"].items() if name != "agreement" and any(row)}
        assert {name: row for name, row in found.wire.items() if name != "agreement" and any(row)} == sent


def test_a_plan_is_described() -> None:
    plan = zs.Plan(expert_parallel=zs.ExpertParallel(4, two_level=True), zero=2)
    assert short(plan, 8) == "zero 2, experts over 4 ranks, fp32, tokens in two levels"
    assert any("all experts alike" in note for choice in choices_of(plan) for note in choice.notes(""))
