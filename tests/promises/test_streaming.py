"""Device bytes under offloaded parameters: constant in the depth of the model."""

from functools import partial

import pytest
import torch
from alive import Alive
from pool import Pool
from promises.stacks import Stack, rows

import zeroshard as zs

DEPTHS = (4, 8, 16)
INPUTS = 4 * 32  # bytes that a block keeps for its recomputation, of one row
ENTRIES = 32  # and of placeholders for absent values and gradients


def most_on_the_device(mesh: zs.Mesh) -> list[int]:
    """The most bytes in a step at each depth."""
    found = []
    for blocks in DEPTHS:
        plan = zs.Plan(zero=3, transport="network", offload="optimizer,parameters", recompute="blocks")
        with Alive() as alive:
            engine = zs.Engine(Stack(blocks), partial(torch.optim.AdamW, lr=1e-3), plan, mesh=mesh)
            for step in range(3):
                if step == 2:
                    alive.restart()
                engine.train_step(rows(1))
            engine.flush()
            found.append(alive.most)
    return found


@pytest.mark.parametrize("ranks", [1])
def test_bytes_do_not_grow_with_the_depth(pool: Pool, ranks: int) -> None:
    for most in pool.run(most_on_the_device, ranks):
        for blocks, found in zip(DEPTHS, most, strict=True):
            assert 0 <= found - most[0] <= (blocks - DEPTHS[0]) * (INPUTS + ENTRIES)
