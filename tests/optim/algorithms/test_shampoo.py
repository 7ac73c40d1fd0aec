"""Shampoo and SOAP beside the papers' algorithms in fp64."""

from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor, nn

from zeroshard.optim import SOAP, Shampoo
from zeroshard.optim.algorithms.shampoo import inverse_root

SHAPES: list[tuple[int, ...]] = [(6, 4), (3, 7), (5, 5), (1, 4), (9,), ()]


def square_root(matrix: Tensor) -> Tensor:
    """The root of a positive matrix by the iteration of Denman and Beavers, without eigenvalues."""
    root, inverse = matrix, torch.eye(len(matrix), dtype=matrix.dtype)
    for _ in range(60):
        root, inverse = (root + inverse.inverse()) / 2, (inverse + root.inverse()) / 2
    return root


def shampoo(weights: Tensor, gradients: list[Tensor], interval: int = 1) -> Tensor:
    """Algorithm 1 of 1802.09568 with lr 0.1 and eps 1e-2; Adagrad for vectors."""
    x = weights.double().clone()
    if x.dim() < 2:
        total = torch.full_like(x, 1e-2)
        for g in gradients:
            total = total + g * g
            x = x - 0.1 * g / total.sqrt()
        return x
    left, right = (1e-2 * torch.eye(n, dtype=torch.float64) for n in x.shape)
    roots: Any = None
    for t, g in enumerate(gradients):
        left, right = left + g @ g.T, right + g.T @ g
        if t % interval == 0:
            roots = [square_root(square_root(side)).inverse() for side in (left, right)]
        x = x - 0.1 * roots[0] @ g @ roots[1]
    return x


@pytest.mark.parametrize("interval", [1, 4])
def test_twenty_steps_of_shampoo_are_those_of_the_paper(interval: int) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20)
    found = run(partial(Shampoo, lr=0.1, eps=1e-2, interval=interval), weights, gradients)
    for n, after in enumerate(found):
        expected = shampoo(weights[n], [step[n] for step in gradients], interval)
        torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-4)


def test_long_sides_of_shampoo_keep_a_diagonal() -> None:
    weights, gradients = weights_of([(3, 7)]), gradients_of([(3, 7)], 20)
    (found,) = run(partial(Shampoo, eps=1e-2, max_side=5), weights, gradients)
    x, left = weights[0].double(), 1e-2 * torch.eye(3, dtype=torch.float64)
    right = torch.full((7,), 1e-2, dtype=torch.float64)
    for (g,) in gradients:
        left, right = left + g @ g.T, right + (g * g).sum(0)
        x = x - 0.1 * square_root(square_root(left)).inverse() @ g / right**0.25
    torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-4)


def test_inverse_roots() -> None:
    a = torch.randn(2, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moment = a @ a.mT
    root = inverse_root(moment, 4)
    torch.testing.assert_close(root @ root @ root @ root @ moment, torch.eye(6).double().expand(2, 6, 6))
    assert not inverse_root(torch.zeros(1, 3, 3), 4).any() and not inverse_root(torch.zeros(1, 3), 4).any()
    singular = inverse_root(torch.ones(1, 3, 3), 4)
    assert singular.isfinite().all()


def orthonormal(matrix: Tensor) -> Tensor:
    """The columns of a matrix made orthonormal, each against those before it (Gram and Schmidt)."""
    columns: list[Tensor] = []
    for column in matrix.T:
        for _ in range(2):
            column = column - sum((c * (c @ column) for c in columns), torch.zeros_like(column))
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def soap(weights: Tensor, gradients: list[Tensor], interval: int) -> Tensor:
    """Algorithms 3 and 4 of 2409.11321 with lr 0.01, decays of 0.95 and weight decay 0.01."""
    x = weights.double().clone()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    sides = [torch.zeros(n, n, dtype=torch.float64) for n in x.shape]
    bases: Any = None
    for t, g in enumerate(gradients, 1):
        if t == 1:
            sides = [0.05 * g @ g.T, 0.05 * g.T @ g]
            bases = [torch.linalg.svd(side)[0] for side in sides]
        m = 0.95 * m + 0.05 * g
        own, average = bases[0].T @ g @ bases[1], bases[0].T @ m @ bases[1]
        v = 0.95 * v + 0.05 * own**2
        n = average / (1 - 0.95**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        x = x - 0.01 * 0.01 * x - 0.01 * bases[0] @ n @ bases[1].T
        if t > 1:
            sides = [0.95 * sides[0] + 0.05 * g @ g.T, 0.95 * sides[1] + 0.05 * g.T @ g]
            if t % interval == 0:
                bases = [orthonormal(side @ basis) for side, basis in zip(sides, bases, strict=True)]
    return x


@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (3, 7)])
@pytest.mark.parametrize("interval", [1, 5])
def test_steps_of_soap_are_those_of_the_paper(shape: tuple[int, int], interval: int) -> None:
    weights, gradients = weights_of([shape], torch.float64), gradients_of([shape], 20)
    (found,) = run(partial(SOAP, lr=0.01, interval=interval), weights, gradients)
    expected = soap(weights[0], [g for (g,) in gradients], interval)
    if min(shape) == max(shape):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    else:  # the first gradient has fewer columns than rows: its null space has no order until other gradients come
        assert (found - expected).norm() < 0.2 * (expected - weights[0]).norm()


def test_vectors_of_soap_are_adamw() -> None:
    weights, gradients = weights_of([(9,), ()]), gradients_of([(9,), ()], 20)
    theirs = run(partial(torch.optim.AdamW, lr=3e-3, betas=(0.95, 0.95), weight_decay=0.01), weights, gradients)
    torch.testing.assert_close(run(SOAP, weights, gradients), theirs, rtol=1e-5, atol=1e-6)


def test_sides_of_soap_that_are_too_long_are_not_turned() -> None:
    weights, gradients = weights_of([(3, 7)]), gradients_of([(3, 7)], 5)
    theirs = run(partial(torch.optim.AdamW, lr=3e-3, betas=(0.95, 0.95), weight_decay=0.01), weights, gradients)
    torch.testing.assert_close(run(partial(SOAP, max_side=2), weights, gradients), theirs, rtol=1e-5, atol=1e-6)


def test_state_bytes() -> None:
    for kind, bytes_of in (
        (Shampoo, lambda n, m: 4 * 2 * (n * n + m * m)),
        (partial(Shampoo, momentum=0.9), lambda n, m: 4 * (2 * (n * n + m * m) + n * m)),
        (SOAP, lambda n, m: 4 * (2 * (n * n + m * m) + 2 * n * m)),
    ):
        parameter = nn.Parameter(torch.ones(6, 4, dtype=torch.bfloat16))
        optimizer: Any = kind([parameter])
        take_steps(optimizer, [parameter], gradients_of([(6, 4)], 1))
        assert state_bytes(optimizer, parameter) == bytes_of(6, 4)


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_each_matrix_of_a_stack_is_its_own(kind: Any) -> None:
    weights, gradients = weights_of([(3, 5, 4)], torch.float64), gradients_of([(3, 5, 4)], 5)
    (stack,) = run(partial(kind, interval=2), weights, gradients)
    alone = run(partial(kind, interval=2), list(weights[0]), [list(step[0]) for step in gradients])
    assert (stack - torch.stack(alone)).norm() < 1e-3 * (stack - weights[0]).norm()
