"""Muon beside torch.optim.Muon, singular values, and the equations in fp64."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from optim.equations import gradients_of, run, state_bytes, take_steps, weights_of
from torch import Tensor, nn

from zeroshard.optim import Muon, muon_groups
from zeroshard.optim.algorithms.muon import QUINTIC, _batched, orthogonalize, symmetric_product
from zeroshard.platform.accelerator import as_on_devices

SHAPES = [(6, 4), (4, 6), (5, 5), (1, 3), (3, 1)]


def paper(weights: Tensor, gradients: list[Tensor], nesterov: bool, scale: float) -> Tensor:
    """Muon with lr 0.02, momentum 0.95 and weight decay 0.1 in fp64, each polynomial applied to singular values."""
    x, momentum = weights.double(), torch.zeros_like(weights, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * momentum if nesterov else momentum
        u, s, vt = torch.linalg.svd(update, full_matrices=False)
        s = s / math.sqrt(float((s**2).sum()))
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        x = x - 0.02 * 0.1 * x - 0.02 * scale * (u * s) @ vt
    return x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", [None, "original", "none"])
def test_twenty_steps_are_those_of_the_equations(nesterov: bool, rule: str | None) -> None:
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20)
    found = run(partial(Muon, lr=0.02, nesterov=nesterov, adjust_lr_fn=rule), weights, gradients)
    for n, after in enumerate(found):
        rows, columns = weights[n].shape
        scales = {None: 0.2 * math.sqrt(max(rows, columns)), "original": math.sqrt(max(1, rows / columns)), "none": 1.0}
        expected = paper(weights[n], [step[n] for step in gradients], nesterov, scales[rule])
        torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_in_bfloat16_it_is_torchs_own(rule: str) -> None:
    """torch iterates in bfloat16 always; sums of one product differ in their last places."""
    weights, gradients = weights_of(SHAPES), gradients_of(SHAPES, 20)
    mine = run(
        lambda ps: Muon([{"params": ps, "dtype": torch.bfloat16}], lr=0.02, adjust_lr_fn=rule), weights, gradients
    )
    theirs = run(partial(torch.optim.Muon, lr=0.02, adjust_lr_fn=rule), weights, gradients)
    for a, b, before in zip(mine, theirs, weights, strict=True):
        assert (a - b).norm() < 0.02 * (b - before).norm()
    exact = run(partial(Muon, lr=0.02, adjust_lr_fn=rule), weights, gradients)
    for a, b, before in zip(exact, theirs, weights, strict=True):
        assert (a - b).norm() < 0.05 * (b - before).norm()


def test_a_rehearsal_of_other_devices_takes_their_steps() -> None:
    """In bfloat16, all matrices of a shape together; a learning rate in a tensor serves AdamW's loop over lists too."""
    shapes = [(6, 4), (6, 4), (7,)]
    weights, gradients = weights_of(shapes), gradients_of(shapes, 3)
    with as_on_devices():
        found = run(partial(Muon, lr=torch.tensor(1e-3)), weights, gradients)
    narrow = run(lambda ps: Muon([{"params": ps, "dtype": torch.bfloat16}]), weights, gradients)
    torch.testing.assert_close(found, narrow, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0], run(Muon, weights, gradients)[0])


def test_what_is_no_matrix_is_updated_by_adamw() -> None:
    shapes: list[tuple[int, ...]] = [(7,), (), (6, 4)]
    weights, gradients = weights_of(shapes), gradients_of(shapes, 20)
    (vector, scalar, table) = run(
        lambda ps: Muon([{"params": ps[:2]}, {"params": ps[2:], "orthogonalize": False}], lr=0.01), weights, gradients
    )
    theirs = run(partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1), weights, gradients)
    torch.testing.assert_close([vector, scalar, table], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (300, 280), (2, 530, 600)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stack = stack if stack.dim() == 3 else stack[None]
    result = orthogonalize(stack)
    u, s, vt = torch.linalg.svd(stack.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(result.double(), (u * s.unsqueeze(-2)) @ vt, rtol=0, atol=2e-4)
    assert 0.3 < torch.linalg.svdvals(result).median() < 1.3


def test_batches_of_products_give_the_same_as_single_ones() -> None:
    stack = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = stack / torch.linalg.matrix_norm(stack, keepdim=True)
    torch.testing.assert_close(_batched(start, QUINTIC, 5), orthogonalize(stack), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 100, 256, 257, 700])
def test_symmetric_products_are_whole_products(n: int) -> None:
    left = torch.randn(n, 33, dtype=torch.float64)
    added = left @ left.T
    out = torch.full((n, n), torch.nan, dtype=torch.float64)
    symmetric_product(left, out)
    torch.testing.assert_close(out, added)
    symmetric_product(added, out, added, -2.0, 3.0)
    torch.testing.assert_close(out, 3 * added @ added - 2 * added)


def test_zero_gradients_leave_the_weights() -> None:
    weights = weights_of([(4, 3), (3,)])
    zeros = [[torch.zeros(4, 3), torch.zeros(3)]]
    assert all(map(torch.equal, run(partial(Muon, weight_decay=0.0), weights, zeros), weights))


def test_stacks_and_convolutions_are_matrices() -> None:
    shapes: list[tuple[int, ...]] = [(3, 5, 4), (4, 3, 2, 2)]
    weights, gradients = weights_of(shapes), gradients_of(shapes, 5)
    stack, conv = run(Muon, weights, gradients)
    alone = run(Muon, list(weights[0]), [list(step[0]) for step in gradients])
    (flat,) = run(Muon, [weights[1].flatten(1)], [[step[1].flatten(1)] for step in gradients])
    torch.testing.assert_close(stack, torch.stack(alone), rtol=1e-6, atol=1e-7)
    assert torch.equal(conv.flatten(1), flat)


class Tiny(nn.Module):
    """An embedding, a layer with its norm, and an output layer over the vocabulary."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.layer, self.norm = nn.Embedding(11, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_groups_leave_embeddings_and_the_output_layer_to_adamw(tied: bool) -> None:
    model = Tiny(tied)
    optimizer = Muon(muon_groups(model))
    table = optimizer.table().splitlines()
    orthogonal = [line.split()[0] for line in table if "orthogonalised" in line]
    others = [line.split()[0] for line in table if line.endswith("AdamW")]
    assert orthogonal == ["layer.weight"]
    assert len(orthogonal + others) == len(list(model.parameters())) and "embedding.weight" in others
    assert len(Muon(model.parameters()).table().splitlines()) == 1 + len(list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_with_gradients_of_1e_6_move_as_in_fp32(dtype: torch.dtype) -> None:
    weights = [0.1 * w for w in weights_of([(32, 48)], dtype)]
    gradients = [[g.to(dtype)] for (g,) in gradients_of([(32, 48)], 10, 1e-6)]
    wide = run(partial(Muon, lr=0.02), [w.float() for w in weights], gradients)[0] - weights[0].float()
    moved = run(partial(Muon, lr=0.02), weights, gradients)[0].float() - weights[0].float()
    assert wide.norm() > 1e-2 and moved.norm().item() == pytest.approx(wide.norm().item(), rel=0.05)


def test_states_are_one_number_per_matrix_element_and_two_of_others() -> None:
    parameters = [nn.Parameter(w) for w in weights_of([(6, 4), (7,)], torch.bfloat16)]
    optimizer: Any = Muon(parameters)
    take_steps(optimizer, parameters, gradients_of([(6, 4), (7,)], 1))
    assert [state_bytes(optimizer, p) for p in parameters] == [4 * 24, 8 * 7]
