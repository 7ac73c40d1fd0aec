"""The states of a parameter's gradient, from its arrival to the update."""

from functools import partial
from typing import Any

import pytest
import torch
from inside import gradients_of
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.zero.gradients import BufferedGradients, GradientState, state_of

EMPTY, ARRIVED, SUMMED = GradientState.EMPTY, GradientState.ARRIVED, GradientState.SUMMED


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def states(mesh: Any, zero: int) -> list[tuple[set[GradientState], ...]]:
    """Of used and unused parameters: at first, after a local backward, after one with reductions, and after a step."""
    torch.manual_seed(0)
    engine = zs.Engine(Net(), partial(torch.optim.SGD, lr=0.1), zs.Plan(zero=zero, transport="network"), mesh=mesh)

    def now() -> tuple[set[GradientState], ...]:
        found: dict[bool, set[GradientState]] = {True: set(), False: set()}
        for gradients in gradients_of(engine):
            assert isinstance(gradients, BufferedGradients)
            for number, entry in enumerate(gradients.flat.index.entries):
                found[entry.name.startswith("used")].add(state_of(gradients, number))
        return found[True], found[False]

    seen = [now()]
    with engine.no_sync():
        engine.backward(engine(torch.ones(2, 4)).sum())
        seen.append(now())
    engine.backward(engine(torch.ones(2, 4)).sum())
    seen.append(now())
    engine.step()
    return [*seen, now()]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_states_follow_each_other(pool: Pool, zero: int) -> None:
    expected = [({EMPTY}, {EMPTY}), ({ARRIVED}, {EMPTY}), ({SUMMED}, {EMPTY}), ({EMPTY}, {EMPTY})]
    assert pool.run(states, 2, zero) == [expected] * 2


def test_on_one_rank_the_buffer_is_the_sum() -> None:
    assert states(None, 0)[2] == ({ARRIVED}, {EMPTY})
