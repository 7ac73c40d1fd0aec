"""Each storage counts once: inputs of a pipeline's chunks lie in scratch, and masks are buffers of the model."""

from functools import partial
from typing import Any

import pytest
import torch
from planner.rehearsed import peak_of, punctual
from pool import Pool
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.memory.ledger import Category
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse

ROWS, WIDTH, MICROBATCHES = 256, 64, 4
INPUT = 4 * ROWS * WIDTH  # bytes of what one microbatch hands from chunk to chunk
SGD = partial(torch.optim.SGD, lr=1e-5)


class Chain(nn.Module):
    """Blocks that save their inputs and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).sum()


def data(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))}


TASK = TrainingTask(Chain, data, SGD, MICROBATCHES * ROWS, 1)
SPLITS = {"1f1b": ("blocks.4",), "gpipe": ("blocks.4",), "interleaved": ("blocks.2", "blocks.4", "blocks.6")}
CASES = [  # with the inputs of blocks that the second stage saves at once, but for those of chunks
    ("gpipe", "schedule", 3),  # of one microbatch, which is computed again
    ("gpipe", "off", 3 * MICROBATCHES),
    ("1f1b", "off", 3),
    ("1f1b", "blocks", 3),
    ("1f1b", "sqrt", 2),  # of the second segment, and in it
    ("interleaved", "blocks", 1),
    ("interleaved", "off", 3),  # chunks in flight
]


def plan_of(schedule: str, recompute: str) -> dict[str, Any]:
    chunks = len(SPLITS[schedule]) + 1
    cut = {"pipeline_parallel": 2, "pipeline_parallel.virtual_stages": chunks // 2, "microbatches": MICROBATCHES}
    settings = {"pipeline_parallel.schedule": schedule, "activations.recompute": recompute, "device_memory": "1GiB"}
    return {**cut, **settings, "pipeline_parallel.split": SPLITS[schedule]}


def train(mesh: zs.Mesh, plan: dict[str, Any]) -> tuple[int, int, int]:
    """The most bytes of activations; and by which the ledger and torch's allocations rise in a step."""
    batch = data(MICROBATCHES * ROWS)
    engine = zs.Engine(Chain(), SGD, zs.Plan.from_dict(plan), mesh=mesh, example=data(ROWS))
    for _ in range(3):
        engine.train_step(batch)
    before = engine.ledger.total()
    watching = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with punctual(), watching as watched, engine.trace(memory=True) as trace:
        engine.train_step(batch)
    highest = max(sum(event.nbytes.values()) for event in trace.memory)
    activations = engine.ledger.account(Category.ACTIVATIONS).peak
    own = batch["x"].nbytes if mesh.rank == 0 else 0  # the first stage saves the batch, which was there before
    return activations, highest - before - own, peak_of(watched)


@pytest.mark.parametrize(("schedule", "recompute", "inputs"), CASES)
def test_inputs_of_chunks_count_once(pool: Pool, schedule: str, recompute: str, inputs: int) -> None:
    plan = plan_of(schedule, recompute)
    found = pool.run(train, 2, plan)
    assert found[1][0] == inputs * INPUT
    for rank, (activations, rise, allocated) in enumerate(found):
        assert 0 < rise <= allocated  # the rest are temporaries
        rehearsed = rehearse(TASK, zs.Plan.from_dict(plan), rank, 2, MICROBATCHES * ROWS)
        assert max(event.nbytes[Category.ACTIVATIONS] for event in rehearsed.events) == activations


class Masked(nn.Module):
    """A block that saves a mask, which is a buffer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


@pytest.mark.parametrize("recompute", ["off", "blocks", "auto"])
def test_buffers_of_the_model_are_no_activations(recompute: str) -> None:
    model = nn.Sequential(*(Masked() for _ in range(4)))
    plan = zs.Plan.from_dict({"device_memory": "1GiB", "activations.recompute": recompute})
    engine = zs.Engine(model, SGD, plan)
    for _ in range(3):
        out = engine(data(ROWS)["x"])
        held = engine.ledger.account(Category.ACTIVATIONS).current
        engine.backward(out.sum())
        engine.step()
    assert held == 4 * INPUT  # what enters the blocks; what enters the product with the mask is not saved
    for row in engine.activation_decisions:
        assert row["measured_kept_bytes"] in (row["kept_bytes"], None)
