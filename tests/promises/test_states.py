"""Model states by 1/N, and what is on the device beside them: constant in the number of parameters (1910.02054)."""

from functools import partial
from typing import Any

import pytest
import torch
from alive import Alive
from pool import Pool
from promises.stacks import Stack, numel_of_block, rows

import zeroshard as zs

ADAM = partial(torch.optim.AdamW, lr=1e-3)
FEW, MANY = 4, 8  # blocks
WIDTHS = {"small": (32, 64), "large": (96, 192)}  # of matrices up to, and above 2**14 elements
STATES = {  # bytes per parameter in fp32: those that all ranks hold, and those by 1/N (section 5)
    1: (8, 8),
    2: (4, 12),
    3: (0, 16),
}


def measured(mesh: zs.Mesh, sizes: tuple[int, int], blocks: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Bytes between a backward and its step, and the most in the whole step."""
    torch.manual_seed(0)
    with Alive() as alive:
        plan = zs.Plan(transport="network", **settings)
        engine = zs.Engine(Stack(blocks, *sizes), ADAM, plan, mesh=mesh)
        x = rows(1, sizes[0])
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        alive.restart()
        engine.backward(engine(x))
        states = alive.now()
        engine.step()
        return states, alive.most


def at_two_depths(mesh: zs.Mesh, sizes: tuple[int, int], stages: list[int]) -> list[list[tuple[int, int]]]:
    return [[measured(mesh, sizes, blocks, {"zero": stage}) for blocks in (FEW, MANY)] for stage in stages]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", WIDTHS)
def test_states_by_the_number_of_ranks(pool: Pool, ranks: int, sizes: str) -> None:
    """So beside them nothing grows with the number of parameters (C_B, section 6.2)."""
    numel = numel_of_block(*WIDTHS[sizes]) * (MANY - FEW)
    activations = 4 * 2 * sum(WIDTHS[sizes]) * (MANY - FEW)  # of one row
    for answers in pool.run(at_two_depths, ranks, WIDTHS[sizes], list(STATES)):
        for (stage, (whole, divided)), ((few, most_few), (many, most_many)) in zip(
            STATES.items(), answers, strict=True
        ):
            expected = numel * (whole + divided / ranks)
            assert many - few == pytest.approx(expected, rel=0.01), (stage, (many - few) / numel)
            growth = most_many - most_few
            assert 0.99 * expected <= growth <= 1.01 * expected + activations, (stage, growth / numel)
