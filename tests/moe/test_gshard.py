"""GShard's router beside Algorithm 1 of 2006.16668, token by token."""

import math

import pytest
import torch
from torch import Tensor

from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.router import Router
from zeroshard.moe.routing.selection import Capacity

TOKENS, WIDTH, EXPERTS = 256, 16, 8


def algorithm_1(x: Tensor, wg: Tensor, capacity: float, rnd: Tensor) -> tuple[Tensor, Tensor]:
    """Combine weights [S, E] and the auxiliary loss, by the paper's loops over one group."""
    tokens, experts = len(x), len(wg)
    gates = torch.softmax(x @ wg.t(), -1)
    means = gates.mean(0)
    combine = torch.zeros(tokens, experts)
    counts = [0] * experts
    choices = []
    for s in range(tokens):
        e1, e2 = sorted(range(experts), key=lambda e: (-float(gates[s, e]), e))[:2]
        g1, g2 = gates[s, e1], gates[s, e2]
        choices.append((e2, g2 / (g1 + g2)))
        if counts[e1] < capacity:
            combine[s, e1] = g1 / (g1 + g2)
        counts[e1] += 1
    loss = sum(counts[e] / tokens * means[e] for e in range(experts)) / experts
    for s, (e2, g2) in enumerate(choices):
        if counts[e2] < capacity and 2 * g2 > rnd[s]:
            combine[s, e2] = g2
        counts[e2] += 1
    return combine, torch.as_tensor(loss)


def combined(router: Router, x: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Combine weights [S, E] of a router, and its balance loss without its weight."""
    routing = router(x, **options)
    gates = routing.gates if routing.kept is None else routing.gates * routing.kept
    loss = routing.losses.get("balance", torch.zeros(())) / (router.gating.losses.balance or 1)
    return torch.zeros(len(x), router.experts).scatter(-1, routing.experts, gates), loss


def skewed(tokens: int = TOKENS) -> Tensor:
    """Tokens that prefer some experts, so that capacity is exceeded."""
    torch.manual_seed(3)
    return torch.randn(tokens, WIDTH) + torch.linspace(0, 1, WIDTH)


@pytest.mark.parametrize("factor", [0.5, 0.77, 1.0, 2.0])
def test_the_router_is_algorithm_1(factor: float) -> None:
    router = router_of("gshard", WIDTH, EXPERTS, capacity=factor)
    x = skewed()
    torch.manual_seed(7)
    rnd = torch.rand(TOKENS)
    torch.manual_seed(7)
    ours, loss = combined(router, x)
    theirs, theirs_loss = algorithm_1(x, router.weight.detach(), 2 * TOKENS / EXPERTS * factor, rnd)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(loss, theirs_loss * EXPERTS**2, rtol=1e-5, atol=0)  # the paper's is 1/E² where balanced


@pytest.mark.parametrize("tokens, size", [(256, 64), (250, 64), (100, 30)])
def test_each_group_is_one_run_of_algorithm_1(tokens: int, size: int) -> None:
    router = router_of("gshard", WIDTH, EXPERTS, group="sequence")
    x = skewed(tokens)
    torch.manual_seed(7)
    rnd = torch.rand(tokens)
    torch.manual_seed(7)
    ours, loss = combined(router, x, group=size)
    starts = range(0, tokens, size)
    runs = [
        algorithm_1(x[a : a + size], router.weight.detach(), 2 * len(x[a : a + size]) / EXPERTS, rnd[a : a + size])
        for a in starts
    ]
    torch.testing.assert_close(ours, torch.cat([combine for combine, _ in runs]), rtol=1e-6, atol=1e-7)
    mean = sum(own * len(combine) for combine, own in runs) / tokens
    torch.testing.assert_close(loss, mean * EXPERTS**2, rtol=1e-5, atol=0)


def test_a_skipped_second_choice_takes_a_place() -> None:
    """Two tokens prefer expert 1 second; the first loses its coin, and the second finds the only place taken."""
    router = router_of("gshard", 2, 4, capacity=Capacity(train=1.0, formula="constant"))
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[5.0, 0.0], [1.0, 1.0], [0.0, 5.0], [-9.0, -9.0]]))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    seed = next(s for s in range(9999) if _coin(s)[0] > 0.1 and _coin(s)[1] < 0.03)
    torch.manual_seed(seed)
    routing = router(x)
    assert routing.experts.tolist() == [[0, 1], [2, 1]]
    assert routing.kept is not None and routing.kept.tolist() == [[True, False], [True, False]]
    assert routing.counts.tolist() == [1, 2, 1, 0]


def _coin(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.rand(2)


def test_evaluation_has_no_capacity_and_no_coin() -> None:
    router = router_of("gshard", WIDTH, EXPERTS).eval()
    routing = router(skewed())
    assert routing.kept is None and not routing.losses
    torch.testing.assert_close(routing.gates.sum(-1), torch.ones(TOKENS))


def test_a_capacity_that_is_not_whole_is_rounded_up() -> None:
    assert Capacity(train=1.0).limit(10, 8, 2, training=True) == math.ceil(2.5)
