"""Bytes of optimizer states beside the formulas of their papers: whole, by blocks of 8 bits, by rows and columns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from alive import Alive
from torch import nn

from zeroshard.optim import SM3, Adafactor, Adam8bit

ROWS, COLUMNS, BLOCK = 128, 256, 256
NUMEL, SUM = ROWS * COLUMNS, ROWS + COLUMNS
STEP = 4  # the count of steps
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {  # and bytes for one matrix
    "Adam": (torch.optim.Adam, 8 * NUMEL),
    "Adam in 8 bits": (Adam8bit, 2 * NUMEL + 2 * 4 * NUMEL // BLOCK),  # codes, and a scale for each block
    "SM3": (partial(SM3, lr=0.1, momentum=0.0), 4 * SUM),
    "SM3 with momentum": (partial(SM3, lr=0.1, momentum=0.9), 4 * SUM + 4 * NUMEL),
    "Adafactor": (Adafactor, 4 * SUM),
}


def kept(make: Callable[[Any], torch.optim.Optimizer], matrices: int) -> int:
    """Bytes of some matrices and of the states after two steps."""
    with Alive() as alive:
        parameters = [nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(matrices)]
        optimizer = make(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        return alive.now()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_a_matrix(name: str) -> None:
    make, states = OPTIMIZERS[name]
    kept(make, 1)  # which makes tables that all share
    assert (kept(make, 5) - kept(make, 1)) / 4 == 4 * NUMEL + states + STEP
