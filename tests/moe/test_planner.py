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
from zeroshard.doctor.hardware import Machines
from zeroshard.moe.experts import experts
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


@pytest.mark.parametrize("gpu, at_once", [("A100-80", True), (None, False)])
def test_experts_are_rehearsed_as_the_device_computes_them(
    gpu: str | None, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, GPUs multiply the rows of all experts in one product, of a mixture of any size."""
    called: list[int] = []
    grouped = experts.grouped_rows
    monkeypatch.setattr(experts, "grouped_rows", lambda rows, *given: called.append(len(rows)) or grouped(rows, *given))
    job = TrainingTask(whole_strides, lambda rows: torch.ones(rows, 8, 16), torch.optim.SGD, 2)
    rehearse(job, zs.Plan(precision="bf16", zero=0), 0, 1, 2, gpu and Machines.of(gpu, 1))
    assert len(called) == (2 if at_once else 0)  # of two steps


def whole_strides() -> nn.Module:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = zs.moe.MoE(16, 32, experts=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean: torch.Tensor = self.mixture(x).square().mean()
            return mean

    return Mean()


def test_a_plan_is_described() -> None:
    plan = zs.Plan(expert_parallel=zs.ExpertParallel(4, two_level=True), zero=2)
    assert short(plan, 8) == "zero 2, experts over 4 ranks, fp32, tokens in two levels"
    assert any("all experts alike" in note for choice in choices_of(plan) for note in choice.notes(""))
