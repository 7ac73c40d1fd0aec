"""SM3-II beside the paper's cover in fp64, number by number, and optax where it is installed."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor

from zeroshard.optim import SM3

SHAPES = [(6, 4), (3, 1, 4), (2, 3, 4, 5), (7,), (1,), ()]


def covering_all(params: list[Any], **options: Any) -> SM3:
    """SM3 that covers tensors of three dimensions along all of them too."""
    return SM3([{"params": params, "batch_dims": 0}], **options)


def paper(weights: Tensor, gradients: list[Tensor], lr: float, momentum: float) -> Tensor:
    """SM3-II of 1901.11150 over sets of indices in fp64: S_r holds all elements with one index along one dimension."""
    places = list(itertools.product(*map(range, weights.shape)))
    dims = range(weights.dim()) if weights.dim() else [0]
    sets_of = {i: [(d, i[d] if i else 0) for d in dims] for i in places}
    cover = {r: [i for i in places if r in sets_of[i]] for r in {r for rs in sets_of.values() for r in rs}}
    mu = dict.fromkeys(cover, 0.0)
    w, m = {i: float(weights[i]) for i in places}, dict.fromkeys(places, 0.0)
    for gradient in gradients:
        g = {i: float(gradient[i]) for i in places}
        nu = {i: min(mu[r] for r in sets_of[i]) + g[i] ** 2 for i in places}
        mu = {r: max(nu[i] for i in members) for r, members in cover.items()}
        for i in places:
            u = g[i] / math.sqrt(nu[i]) if nu[i] else 0.0
            m[i] = momentum * m[i] + (1 - momentum) * u
            w[i] -= lr * m[i]
    return torch.tensor([w[i] for i in places], dtype=torch.float64).reshape(weights.shape)


@pytest.mark.parametrize("size", [1.0, 1e-6])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_twenty_steps_are_those_of_the_paper(size: float, momentum: float) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20, size)
    gradients[0][0][2] = gradients[3][1][1] = 0.0  # 0/0 in the first step
    found = run(partial(covering_all, lr=0.1, momentum=momentum), weights, gradients)
    for n, after in enumerate(found):
        expected = paper(weights[n], [step[n] for step in gradients], 0.1, momentum)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_row_without_gradients_stays_as_it_is() -> None:
    weights = weights_of([(4, 3)])
    zeros = [[torch.zeros(4, 3)] for _ in range(3)]
    assert torch.equal(run(SM3, weights, zeros)[0], weights[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_move_by_the_papers_amount(dtype: torch.dtype) -> None:
    weights = [0.1 * w for w in weights_of([(32, 48)], dtype)]
    gradients = [[g.to(dtype) for g in step] for step in gradients_of([(32, 48)], 5, 1e-6)]
    expected = paper(weights[0], [g.double() for (g,) in gradients], 0.01, 0.9) - weights[0].double()
    moved = run(partial(SM3, lr=0.01), weights, gradients)[0].double() - weights[0].double()
    assert moved.norm().item() == pytest.approx(expected.norm().item(), rel=0.05)


def test_momentum_in_16_bits_stays_near_that_in_fp32() -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20)
    exact = run(SM3, weights, gradients)
    rounded = run(partial(SM3, momentum_dtype=torch.bfloat16), weights, gradients)
    for n, (a, b) in enumerate(zip(exact, rounded, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2)
        assert n or not torch.equal(a, b)


def test_states_are_one_number_per_slice_to_the_byte() -> None:
    shapes = [(30, 20), (2, 3, 4, 5), (8,), ()]
    slices = [50, 14, 8, 1]
    for momentum, dtype, each in ((0.0, None, 0), (0.9, None, 4), (0.9, torch.bfloat16, 2)):
        parameters = [torch.nn.Parameter(w) for w in weights_of(shapes, torch.bfloat16)]
        optimizer = SM3(parameters, momentum=momentum, momentum_dtype=dtype)
        take_steps(optimizer, parameters, gradients_of(shapes, 1))
        found = [state_bytes(optimizer, p) for p in parameters]
        assert found == [4 * n + each * p.numel() for n, p in zip(slices, parameters, strict=True)]


def test_each_matrix_of_a_stack_is_its_own() -> None:
    weights, gradients = weights_of([(3, 5, 4)]), gradients_of([(3, 5, 4)], 20)
    (stack,) = run(SM3, weights, gradients)
    alone = run(SM3, list(weights[0]), [list(step[0]) for step in gradients])
    assert torch.equal(stack, torch.stack(alone))


def test_matches_optax() -> None:
    optax = pytest.importorskip("optax")
    weights, gradients = weights_of(SHAPES[:4]), gradients_of(SHAPES[:4], 20)
    transform = optax.sm3(0.1)
    values: Any = [w.numpy() for w in weights]
    state = transform.init(values)
    for step in gradients:
        updates, state = transform.update([g.float().numpy() for g in step], state)
        values = optax.apply_updates(values, updates)
    for a, b in zip(run(partial(covering_all, lr=0.1), weights, gradients), values, strict=True):
        torch.testing.assert_close(a, torch.tensor(b.tolist()), rtol=1e-4, atol=1e-5)
