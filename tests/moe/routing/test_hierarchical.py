"""The two-level router beside appendix B of 1701.06538, and beside the flat mixture of the products of gates."""

import math

import pytest
import torch
from moe.equations import kth_excluding, phi, squared_cv
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.moe.routing.hierarchical import HierarchicalRouter
from zeroshard.moe.routing.presets import router_of

TOKENS, WIDTH, GROUPS, SIZE = 30, 6, 4, 3
K1, K2 = 2, 2


def trained() -> HierarchicalRouter:
    router = HierarchicalRouter(WIDTH, GROUPS * SIZE, GROUPS, (K1, K2))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    return router


def level(logits: Tensor, k: int) -> dict[int, float]:
    """The softmax over the k largest logits, by index."""
    kept = sorted(range(len(logits)), key=lambda i: -logits[i].item())[:k]
    total = sum(math.exp(logits[i].item()) for i in kept)
    return {i: math.exp(logits[i].item()) / total for i in kept}


def noisy(x: Tensor, weight: Tensor, scales: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    clean, scale = x @ weight.t(), torch.log1p(torch.exp(x @ scales.t()))
    return clean, clean + noise * scale, scale


def test_gates_and_losses_are_those_of_appendix_b() -> None:
    router = trained()
    torch.manual_seed(2)
    x = torch.randn(TOKENS, WIDTH)
    torch.manual_seed(5)
    outer_noise, inner_noise = torch.randn(TOKENS, GROUPS), torch.randn(TOKENS, GROUPS * SIZE)
    torch.manual_seed(5)
    routing = router(x)
    assert router.noise_weight is not None
    with torch.no_grad():
        clean1, h1, s1 = noisy(x, router.primary_weight, router.primary_noise_weight, outer_noise)
        clean2, h2, s2 = (
            part.view(TOKENS, GROUPS, SIZE) for part in noisy(x, router.weight, router.noise_weight, inner_noise)
        )
    importance = [0.0] * (GROUPS * SIZE)
    primary_load, inner_load, members = [0.0] * GROUPS, [[0.0] * SIZE for _ in range(GROUPS)], [0] * GROUPS
    for t in range(TOKENS):
        expected = {}
        outer = level(h1[t], K1)
        for i in range(GROUPS):
            primary_load[i] += phi(float((clean1[t, i] - kth_excluding(h1[t].tolist(), K1, i)) / s1[t, i]))
        for i, g in outer.items():
            members[i] += 1
            for j, inner in level(h2[t, i], K2).items():
                expected[i * SIZE + j] = g * inner
                importance[i * SIZE + j] += g * inner
            for j in range(SIZE):
                above = kth_excluding(h2[t, i].tolist(), K2, j)
                inner_load[i][j] += phi(float((clean2[t, i, j] - above) / s2[t, i, j]))
        found = dict(zip(routing.experts[t].tolist(), routing.gates[t].tolist(), strict=True))
        assert found.keys() == expected.keys()
        assert all(found[e] == pytest.approx(expected[e], rel=1e-4) for e in found)
    load = [primary_load[i] * inner_load[i][j] / members[i] for i in range(GROUPS) for j in range(SIZE)]
    assert routing.losses["importance"].item() == pytest.approx(0.1 * squared_cv(importance), rel=1e-4)
    assert routing.losses["load"].item() == pytest.approx(0.1 * squared_cv(load), rel=1e-4)


def test_two_levels_are_a_flat_mixture_of_the_products_of_gates() -> None:
    """Sum over groups of the primary gate times (sum over experts of the secondary gate times the expert)."""
    router = trained().eval()
    torch.manual_seed(3)
    x, outputs = torch.randn(TOKENS, WIDTH), torch.randn(GROUPS, SIZE, TOKENS, WIDTH)
    primary, secondary = x @ router.primary_weight.t(), (x @ router.weight.t()).view(TOKENS, GROUPS, SIZE)
    nested = torch.zeros(TOKENS, WIDTH)
    for t in range(TOKENS):
        for i, outer in level(primary[t], K1).items():
            nested[t] += outer * sum(g * outputs[i, j, t] for j, g in level(secondary[t, i], K2).items())
    routing = router(x)
    flat = outputs.flatten(0, 1)[routing.experts, torch.arange(TOKENS).unsqueeze(-1)]  # [T, k, width]
    torch.testing.assert_close((routing.gates.unsqueeze(-1) * flat).sum(1), nested)
    torch.testing.assert_close(routing.gates.sum(-1), torch.ones(TOKENS))


def test_both_levels_get_gradients_of_the_task_and_of_the_losses() -> None:
    router = trained()
    routing = router(torch.randn(TOKENS, WIDTH))
    for loss in (routing.gates[:, 0].sum(), *routing.losses.values()):
        gradients = torch.autograd.grad(loss, list(router.parameters()), retain_graph=True)
        assert all(float(gradient.abs().max()) > 1e-6 for gradient in gradients)


def test_padding_counts_nowhere() -> None:
    router = trained().eval()
    x, valid = torch.randn(TOKENS, WIDTH), torch.arange(TOKENS) % 3 > 0
    routing, alone = router(x, valid=valid), router(x[valid])
    assert routing.kept is not None and torch.equal(routing.kept[:, 0], valid)
    assert torch.equal(routing.counts, alone.counts) and torch.equal(routing.experts[valid], alone.experts)
    torch.testing.assert_close(routing.entropy, alone.entropy)


def test_the_name_takes_groups_near_the_root() -> None:
    router = router_of("hierarchical", WIDTH, 12)
    assert isinstance(router, HierarchicalRouter) and (router.groups, router.levels) == (3, (2, 2))
    assert router(torch.randn(5, WIDTH)).experts.shape == (5, 4)


@pytest.mark.parametrize(
    "experts, groups, choices, message",
    [
        (12, 5, (2, 2), "12 experts do not divide into 5 groups"),
        (12, 3, (1, 2), "no gradient"),
        (12, 6, (2, 3), "from 2 to 2"),
    ],
)
def test_levels_that_cannot_be_are_refused(experts: int, groups: int, choices: tuple[int, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        HierarchicalRouter(WIDTH, experts, groups, choices)
