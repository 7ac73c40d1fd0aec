"""Bytes that a process sends in a step, counted by the kernel, beside the formulas of the papers."""

from functools import partial
from typing import Any

import pytest
import torch
from alive import sent
from pool import Pool
from promises.stacks import Stack, numel_of_block, rows

import zeroshard as zs
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

SGD = partial(torch.optim.SGD, lr=1e-3)
WIDTH, INNER, BLOCKS = 128, 512, 4
NUMEL = BLOCKS * numel_of_block(WIDTH, INNER) + 2 * (WIDTH * WIDTH + WIDTH)
VOLUMES = {0: 2, 1: 2, 2: 2, 3: 3}  # elements per parameter, times (N - 1) / N (1910.02054, section 7)


def written(mesh: zs.Mesh, plans: list[dict[str, Any]], count: int) -> list[int]:
    """Bytes that this process sends in the third step of a plan each."""
    found = []
    for settings in plans:
        torch.manual_seed(0)
        plan = zs.Plan(transport="network", **settings)
        x = rows(count, WIDTH)
        engine = zs.Engine(Stack(BLOCKS, WIDTH, INNER), SGD, plan, mesh=mesh, example=x[: count // plan.microbatches])
        for _ in range(2):
            engine.train_step(x)
        before = sent()
        engine.train_step(x)
        engine.flush()
        found.append(sent() - before)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_send_what_the_paper_says(pool: Pool, ranks: int) -> None:
    for found in pool.run(written, ranks, [{"zero": stage} for stage in VOLUMES], 4):
        for (stage, volume), nbytes in zip(VOLUMES.items(), found, strict=True):
            assert nbytes == pytest.approx(4 * NUMEL * volume * (ranks - 1) / ranks, rel=0.02), stage


def test_16_bits_send_half(pool: Pool) -> None:
    for found in pool.run(written, 2, [{"zero": stage, "precision": "bf16"} for stage in VOLUMES], 4):
        for (stage, volume), nbytes in zip(VOLUMES.items(), found, strict=True):
            assert nbytes == pytest.approx(2 * NUMEL * volume / 2, rel=0.04), stage


def test_stages_send_their_boundary_tensors(pool: Pool) -> None:
    """Each stage but the last sends the activation of each row once, and each but the first its gradient."""
    count, ranks = 512, 4
    plans = [{"pipeline_parallel": zs.Pipeline(ranks, schedule=name), "microbatches": 8} for name in ("gpipe", "1f1b")]
    for rank, found in enumerate(pool.run(written, ranks, plans, count)):
        sides = (rank > 0) + (rank < ranks - 1)
        assert found == pytest.approx([4 * count * WIDTH * sides] * 2, rel=0.05)


SEQUENCES, POSITIONS, FEATURES = 4, 32, 64


def of_split_blocks(mesh: zs.Mesh, sequence: bool) -> float:
    """Bytes that a process sends for a further block of split layers."""
    tokens = torch.randint(64, (2, SEQUENCES, POSITIONS), generator=torch.Generator().manual_seed(0))
    found = []
    for layers in (2, 6):
        plan = zs.Plan(zero=0, transport="network", tensor_parallel=zs.TensorParallel(mesh.ranks, sequence=sequence))
        engine = zs.Engine(GPT(GPTConfig(64, POSITIONS, FEATURES, 4, layers)), SGD, plan, mesh=mesh)
        for _ in range(2):
            engine.train_step((tokens[0], tokens[1]))
        before = sent()
        engine.train_step((tokens[0], tokens[1]))
        found.append(sent() - before)
    return (found[1] - found[0]) / 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_layers_send_four_sums_a_block(pool: Pool, ranks: int) -> None:
    """Two in the forward and two in the backward (1909.08053, section 3)."""
    elements = SEQUENCES * POSITIONS * FEATURES
    for nbytes in pool.run(of_split_blocks, ranks, False):
        assert nbytes == pytest.approx(4 * 4 * elements * 2 * (ranks - 1) / ranks, rel=0.05)
