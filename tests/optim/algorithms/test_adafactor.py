"""Adafactor beside the paper's equations in fp64, transformers and torch."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor

from zeroshard.optim import Adafactor
from zeroshard.optim.algorithms import adafactor
from zeroshard.optim.host import adafactor as host_adafactor
from zeroshard.platform.accelerator import as_on_devices

SHAPES = [(6, 4), (3, 7), (1, 5), (5, 1), (9,), (1,), ()]


def paper(weights: Tensor, gradients: list[Tensor], lr: float | None = None, d: float = 1.0) -> Tensor:
    """Algorithms 4 (matrices), 5 (vectors) and 6 (hyperparameters) of 1804.04235, number by number in fp64."""
    eps1, eps2 = 1e-30, 1e-3
    x = weights.double().reshape(-1, weights.shape[-1] if weights.dim() else 1)
    n, m = x.shape
    vector = weights.dim() < 2
    rows, columns, second = [0.0] * n, [0.0] * m, torch.zeros(n, m, dtype=torch.float64)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.reshape(n, m)
        rho = min(1e-2, 1 / math.sqrt(t)) if lr is None else lr
        alpha = max(eps2, math.sqrt(sum(float(v) ** 2 for v in x.flatten()) / (n * m))) * rho
        beta = 1 - t**-0.8
        if vector:
            second = beta * second + (1 - beta) * (g**2 + eps1)
        else:
            for i in range(n):
                rows[i] = beta * rows[i] + (1 - beta) * sum(float(v) ** 2 + eps1 for v in g[i])
            for j in range(m):
                columns[j] = beta * columns[j] + (1 - beta) * sum(float(v) ** 2 + eps1 for v in g[:, j])
            for i in range(n):
                for j in range(m):
                    second[i, j] = rows[i] * columns[j] / sum(rows)
        u = g / second.sqrt()
        u = u / max(1.0, math.sqrt(sum(float(v) ** 2 for v in u.flatten()) / (n * m)) / d)
        x = x - alpha * u
    return x.reshape(weights.shape)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("lr", [None, 0.05])
def test_twenty_steps_are_those_of_the_paper(size: float, lr: float | None) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20, size)
    found = run(partial(Adafactor, lr=lr), weights, gradients)
    for n, (before, after) in enumerate(zip(weights, found, strict=True)):
        expected = paper(before, [step[n] for step in gradients], lr)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)
        assert (expected - before.double()).abs().max() > 1e-3


def test_fp64_weights_follow_the_paper_in_fp64() -> None:
    weights, gradients = weights_of(SHAPES, torch.float64), gradients_of(SHAPES, 20)
    for n, after in enumerate(run(Adafactor, weights, gradients)):
        expected = paper(weights[n], [step[n] for step in gradients])
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_16_bit_weights_move_by_the_papers_amount(dtype: torch.dtype, size: float) -> None:
    shape = (32, 48)
    weights = [0.1 * w for w in weights_of([shape], dtype)]
    gradients = [[g.to(dtype) for g in step] for step in gradients_of([shape], 10, size)]
    (after,) = run(Adafactor, weights, gradients)
    moved = (paper(weights[0], [g.double() for (g,) in gradients]) - weights[0].double()).square().mean().sqrt().item()
    own = (after.double() - weights[0].double()).square().mean().sqrt().item()
    assert moved > 1e-3 and own == pytest.approx(moved, rel=0.05)  # rounding of the weights is the difference
    (torchs,) = run(torch.optim.Adafactor, weights, gradients)
    share = {torch.bfloat16: 0.02, torch.float16: 0.5}[dtype]  # the eps of the dtype takes eps1's place in torch
    assert (torchs.double() - weights[0].double()).square().mean().sqrt().item() < share * moved


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        ({}, {}),
        ({"lr": 1e-2}, {"lr": 1e-2, "relative_step": False}),
        ({"lr": 1e-2, "scale_parameter": False}, {"lr": 1e-2, "relative_step": False, "scale_parameter": False}),
        ({"beta1": 0.9, "weight_decay": 0.1}, {"beta1": 0.9, "weight_decay": 0.1}),
        ({"clip_threshold": 0.3, "decay_rate": -0.5}, {"clip_threshold": 0.3, "decay_rate": -0.5}),
    ],
)
def test_matches_transformers(own: dict[str, Any], theirs: dict[str, Any]) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    weights, gradients = weights_of(SHAPES[:-1]), gradients_of(SHAPES[:-1], 20)
    mine = run(partial(Adafactor, **own), weights, gradients)
    for a, b in zip(mine, run(partial(optimization.Adafactor, **theirs), weights, gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_a_convolution_with_two_leading_dimensions_matches_transformers_when_nothing_is_clipped() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    shapes = [(3, 2, 4, 5)]
    weights, gradients = weights_of(shapes), gradients_of(shapes, 20)
    mine = run(
        lambda ps: Adafactor([{"params": ps, "batch_dims": 2}], lr=1e-2, scale_parameter=False, clip_threshold=1e9),
        weights,
        gradients,
    )
    options = {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "clip_threshold": 1e9}
    theirs = run(partial(optimization.Adafactor, **options), weights, gradients)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def test_matches_torch_where_the_semantics_agree() -> None:
    """torch takes lr as a cap of the relative step, and adds no eps1: no difference in fp32 with gradients near 1."""
    shapes = SHAPES[:5]
    weights, gradients = weights_of(shapes), gradients_of(shapes, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = run(partial(torch.optim.Adafactor, lr=1e-2), weights, gradients)
    for a, b in zip(run(Adafactor, weights, gradients), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_states_are_rows_and_columns_to_the_byte() -> None:
    shapes = {(30, 20): 4 * 50, (8,): 4 * 8, (): 4, (5, 6, 7): 4 * 5 * 13, (4, 3, 2, 2): 4 * (4 + 12)}
    for dtype in (torch.float32, torch.bfloat16):
        for beta1 in (None, 0.9):
            parameters = [torch.nn.Parameter(w) for w in weights_of(list(shapes), dtype)]
            optimizer = Adafactor(parameters, beta1=beta1)
            take_steps(optimizer, parameters, gradients_of(list(shapes), 1))
            found = [state_bytes(optimizer, p) for p in parameters]
            momentum = [0 if beta1 is None else 4 * p.numel() for p in parameters]
            assert found == [a + b for a, b in zip(shapes.values(), momentum, strict=True)]


def test_each_matrix_of_a_stack_is_its_own() -> None:
    weights, gradients = weights_of([(3, 5, 4)]), gradients_of([(3, 5, 4)], 20)
    (stack,) = run(Adafactor, weights, gradients)
    alone = run(Adafactor, list(weights[0]), [list(step[0]) for step in gradients])
    torch.testing.assert_close(stack, torch.stack(alone), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("piece", [1, 12, 45])
def test_a_piece_at_a_time_is_the_same_as_all_at_once(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix, whole matrices of a stack, and the rest of either."""
    monkeypatch.setattr(host_adafactor, "library", lambda: None)  # as without a compiler
    weights, gradients = weights_of([(7, 5), (5, 5, 4)]), gradients_of([(7, 5), (5, 5, 4)], 5)
    make = partial(Adafactor, beta1=0.9, weight_decay=0.1)
    whole = run(make, weights, gradients)
    monkeypatch.setattr(adafactor, "PIECE", piece)
    torch.testing.assert_close(run(make, weights, gradients), whole, rtol=1e-6, atol=1e-7)
    with as_on_devices():
        assert all(map(torch.equal, run(make, weights, gradients), whole))


def test_a_convolution_is_one_matrix_of_output_channels() -> None:
    weights, gradients = weights_of([(4, 3, 2, 2)]), gradients_of([(4, 3, 2, 2)], 20)
    (conv,) = run(Adafactor, weights, gradients)
    (flat,) = run(Adafactor, [weights[0].flatten(1)], [[g.flatten(1) for g in step] for step in gradients])
    assert torch.equal(conv.flatten(1), flat)
