"""LAMB beside Algorithm 2 of the paper in fp64, number by number."""

import math
from functools import partial

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor

from zeroshard.optim import LAMB

SHAPES = [(6, 4), (9,), (1,), ()]


def paper(weights: Tensor, gradients: list[Tensor], bounds: tuple[float, float] = (0.0, math.inf)) -> Tensor:
    """Algorithm 2 of 1904.00962 with lr 0.01, betas 0.9 and 0.999, eps 1e-6 and weight decay 0.01."""
    x = [float(v) for v in weights.flatten()]
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, gradient in enumerate(gradients, 1):
        g = [float(value) for value in gradient.flatten()]
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        ratios = [
            a / (1 - 0.9**t) / (math.sqrt(b / (1 - 0.999**t)) + 1e-6) + 0.01 * w
            for a, b, w in zip(m, v, x, strict=True)
        ]
        size, change = math.hypot(*x), math.hypot(*ratios)
        trust = min(max(size, bounds[0]), bounds[1]) / change if size and change else 1.0
        x = [w - 0.01 * trust * r for w, r in zip(x, ratios, strict=True)]
    return torch.tensor(x, dtype=torch.float64).reshape(weights.shape)


@pytest.mark.parametrize("bounds", [(0.0, math.inf), (0.5, 2.0)])
def test_twenty_steps_are_those_of_the_paper(bounds: tuple[float, float]) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20)
    found = run(partial(LAMB, lr=0.01, bounds=bounds), weights, gradients)
    for n, after in enumerate(found):
        expected = paper(weights[n], [step[n] for step in gradients], bounds)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)


def test_without_trust_ratio_it_is_adamw() -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20)
    found = run(partial(LAMB, adapt=False, eps=1e-8), weights, gradients)
    theirs = run(partial(torch.optim.AdamW, weight_decay=0.01), weights, gradients)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


def test_weights_of_zero_and_gradients_of_zero_have_a_ratio_of_one() -> None:
    weights = [torch.zeros(3, 2), torch.ones(3, 2)]
    gradients = [[torch.ones(3, 2), torch.zeros(3, 2)]]
    moved = run(partial(LAMB, lr=0.1, weight_decay=0.0), weights, gradients)
    torch.testing.assert_close(moved[0], torch.full((3, 2), -0.1))
    assert torch.equal(moved[1], weights[1])


def test_16_bit_weights_move_by_the_papers_amount() -> None:
    weights = [0.1 * w for w in weights_of([(32, 48)], torch.bfloat16)]
    gradients = [[g.to(torch.bfloat16)] for (g,) in gradients_of([(32, 48)], 10, 1e-4)]
    expected = paper(weights[0], [g.double() for (g,) in gradients]) - weights[0].double()
    moved = run(partial(LAMB, lr=0.01), weights, gradients)[0].double() - weights[0].double()
    assert moved.norm().item() == pytest.approx(expected.norm().item(), rel=0.05)


def test_each_matrix_of_a_stack_has_its_own_ratio_and_states_take_eight_bytes() -> None:
    weights, gradients = weights_of([(3, 5, 4)]), gradients_of([(3, 5, 4)], 20)
    weights[0][1] *= 10
    (stack,) = run(LAMB, weights, gradients)
    alone = run(LAMB, list(weights[0]), [list(step[0]) for step in gradients])
    torch.testing.assert_close(stack, torch.stack(alone), rtol=1e-6, atol=1e-7)
    parameter = torch.nn.Parameter(weights[0].bfloat16())
    optimizer = LAMB([parameter])
    take_steps(optimizer, [parameter], gradients[:1])
    assert state_bytes(optimizer, parameter) == 8 * 60
