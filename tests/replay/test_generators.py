"""The search for generators of random numbers that the code of modules reaches."""

import random
from types import SimpleNamespace

import torch
from torch import nn

from zeroshard.replay.generators import MOST, generators_reached

NEAR = torch.Generator()


class Draws(nn.Module):
    """Draws from a generator of its Python module, and has more values than are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.values = [SimpleNamespace(value=n) for n in range(2 * MOST)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self.values) * torch.rand((), generator=NEAR)


class Odd:
    """An object that says nothing of where its class is."""

    def __init__(self) -> None:
        self.__module__ = 3  # type: ignore[assignment]
        self.source = random.Random(0)


def test_generators_that_code_reaches_are_found_before_much_data() -> None:
    assert generators_reached([Draws(), nn.Linear(2, 2)]) == [NEAR]
    assert generators_reached([nn.Linear(2, 2), Draws()]) == [NEAR]


def test_an_object_without_the_name_of_a_module_is_looked_through() -> None:
    odd = Odd()
    assert generators_reached([odd]) == [odd.source]
