"""Activations by √l, by 1/t and by the schedule, and their codes: storages alive beside the formulas of the papers."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from alive import Alive
from pool import Pool
from promises.stacks import Stack, rows
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

SGD = partial(torch.optim.SGD, lr=1e-3)
DEPTHS = (4, 9, 16)  # squares, of 2 to 4 segments
SEQUENCES, POSITIONS, WIDTH = 16, 64, 64
STAGES, COUNTS = 4, (4, 8)  # and microbatches
TRIES = 8


def peak(engine: zs.Engine, batch: Any, alive: Alive) -> int:
    """The most bytes in a step, beside those that are there before it.

    A thread of gloo may hold operands of a collective a little after its end, so the least of several steps counts;
    one rank has no collectives.
    """
    for _ in range(2):
        engine.train_step(batch)
    found = []
    for _ in range(TRIES if engine.ranks > 1 else 1):
        gc.collect()  # a cycle that is freed within the step would hide as many bytes of it
        before = alive.restart()
        engine.train_step(batch)
        found.append(alive.most - before)
    return min(found)


def of_depths(mesh: zs.Mesh, recompute: Any) -> list[int]:
    found = []
    for blocks in DEPTHS:
        with Alive() as alive:
            engine = zs.Engine(Stack(blocks), SGD, zs.Plan(zero=0, recompute=recompute), mesh=mesh)
            found.append(peak(engine, rows(256), alive))
    return found


def test_activations_by_the_root_of_the_depth(pool: Pool) -> None:
    """Segments of √l blocks, from √l inputs (1604.06174, section 4)."""
    for recompute, growth in (("off", 7 / 5), ("blocks", 7 / 5), ("sqrt", 1.0)):
        ((few, more, most),) = pool.run(of_depths, 1, recompute)
        assert (most - more) / (more - few) == pytest.approx(growth, rel=0.02), recompute


def of_a_split_block(mesh: zs.Mesh, plans: list[dict[str, Any]]) -> list[float]:
    """Bytes that a further block takes in a step."""
    found = []
    tokens = torch.randint(64, (2, SEQUENCES, POSITIONS), generator=torch.Generator().manual_seed(0))
    for settings in plans:
        peaks = []
        for layers in (2, 4):
            plan = zs.Plan(zero=0, transport="network", **settings)
            with Alive() as alive:
                engine = zs.Engine(GPT(GPTConfig(64, POSITIONS, WIDTH, 8, layers)), SGD, plan, mesh=mesh)
                peaks.append(peak(engine, (tokens[0], tokens[1]), alive))
        found.append((peaks[1] - peaks[0]) / 2)
    return found


def test_activations_by_the_number_of_tensor_ranks(pool: Pool) -> None:
    """With sequence parallelism all of a block's are divided (2205.05198, section 4.2)."""
    whole, two = (pool.run(of_a_split_block, t, [{"tensor_parallel": t}])[0][0] for t in (1, 2))
    assert whole / two == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("ranks", [2])
def test_checkpoints_by_the_number_of_tensor_ranks(pool: Pool, ranks: int) -> None:
    """Of the input of each block a rank keeps all, or with P_a a part (1910.02054, section 6.1)."""
    split = {"tensor_parallel": zs.TensorParallel(ranks, sequence=False)}
    kept = [zs.Activations("blocks", save_sums=False), zs.Activations("blocks", partition=True)]
    inputs = 4 * SEQUENCES * POSITIONS * WIDTH
    for found in pool.run(of_a_split_block, ranks, [{**split, "activations": each} for each in kept]):
        assert found == pytest.approx([inputs, inputs / ranks], rel=0.01)


def staged(mesh: zs.Mesh, schedule: Any, count: int, inner: int, each: int) -> int:
    """Bytes of a step with so many microbatches of `each` rows, beside those that are there before it."""
    pipeline = zs.Pipeline(STAGES, schedule=schedule, balance="parameters")
    plan = zs.Plan(zero=0, transport="network", pipeline_parallel=pipeline, microbatches=count, recompute="off")
    x = rows(each * count)
    with Alive() as alive:
        engine = zs.Engine(Stack(2 * STAGES, inner=inner), SGD, plan, mesh=mesh, example=x[:each])
        return peak(engine, x, alive)


def of_schedules(mesh: zs.Mesh) -> list[list[int]]:
    return [[staged(mesh, schedule, count, 64, 256) for count in COUNTS] for schedule in ("gpipe", "1f1b")]


def test_microbatches_in_flight(pool: Pool) -> None:
    """GPipe keeps all of them, 1F1B as many as there are stages from here on (2104.04473, section 2.2)."""
    few, many = COUNTS
    for stage, (filled, alternated) in enumerate(pool.run(of_schedules, STAGES)):
        each = (filled[1] - filled[0]) / (many - few)
        other = filled[0] - few * each
        assert 0 < other < each
        assert alternated == pytest.approx([(STAGES - stage) * each + other] * 2, rel=0.01)


class Pooled(nn.Module):
    """A convolution, a ReLU and a max-pool, and a layer that needs the values."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 8, 3, padding=1), nn.Linear(8 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.max_pool2d(F.relu(self.convolution(x)), 2).flatten(1)).square().mean()


def of_images(mesh: zs.Mesh, ways: list[tuple[str, ...]]) -> list[float]:
    """Bytes that each image more keeps between forward and backward."""
    found = []
    for way in ways:
        kept = []
        for count in (8, 24):
            x = torch.randn(count, 2, 16, 16)
            with Alive() as alive:
                engine = zs.Engine(Pooled(), SGD, zs.Plan(zero=0, activations=zs.Activations(compress=way)), mesh=mesh)
                engine.train_step(x)
                before = alive.restart()
                loss = engine(x)
                kept.append(alive.now() - before)
                engine.backward(loss)
        found.append((kept[1] - kept[0]) / 16)
    return found


def test_codes_of_activations(pool: Pool) -> None:
    """Gist, section 3: a ReLU before a max-pool keeps 1 bit of an element, the max-pool 4 bits."""
    numel, outputs = 8 * 16 * 16, 4
    values = 4 * numel // 4 + 4 * outputs  # of the max-pool and of the last layer, which others read
    (found,) = pool.run(of_images, 1, [(), ("binarize",)])
    assert found == [4 * numel + 8 * numel / 4 + values, numel / 8 + numel / 4 / 2 + values]
