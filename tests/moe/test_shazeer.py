"""The noisy top-k router beside the equations of 1701.06538, number by number."""

import math

import pytest
import torch
from torch import Tensor

from moe.equations import kth_excluding, phi, squared_cv
from zeroshard.moe.routing.balance import chances, squared_variation
from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.router import Router

TOKENS, WIDTH, EXPERTS, K = 40, 6, 8, 3


def trained(name: str = "shazeer2017", k: int = K) -> Router:
    router = router_of(name, WIDTH, EXPERTS, k=k)
    torch.manual_seed(1)
    with torch.no_grad():
        router.weight.normal_()
        assert router.noise_weight is not None
        router.noise_weight.normal_()
    return router


def tokens() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(TOKENS, WIDTH)


def equations(router: Router, x: Tensor, noise: Tensor, floor: float) -> tuple[list[list[float]], float, float]:
    """G(x) [T][E], and CV² of importance and of load, by equations 3 to 11."""
    assert router.noise_weight is not None
    gates, load = [], [0.0] * EXPERTS
    for t in range(len(x)):
        clean = [(x[t] @ router.weight[i]).item() for i in range(EXPERTS)]
        spread = [math.log1p(math.exp((x[t] @ router.noise_weight[i]).item())) + floor for i in range(EXPERTS)]
        h = [clean[i] + float(noise[t, i]) * spread[i] for i in range(EXPERTS)]
        kept = sorted(range(EXPERTS), key=lambda i: -h[i])[:K]
        total = sum(math.exp(h[i]) for i in kept)
        gates.append([math.exp(h[i]) / total if i in kept else 0.0 for i in range(EXPERTS)])
        for i in range(EXPERTS):
            load[i] += phi((clean[i] - kth_excluding(h, K, i)) / spread[i])
    return gates, squared_cv([sum(row[i] for row in gates) for i in range(EXPERTS)]), squared_cv(load)


@pytest.mark.parametrize("name, floor", [("shazeer2017", 0.0), ("tensor2tensor", 1e-2)])
def test_gates_and_losses_are_those_of_the_equations(name: str, floor: float) -> None:
    router, x = trained(name), tokens()
    torch.manual_seed(5)
    noise = torch.randn(TOKENS, EXPERTS)
    torch.manual_seed(5)
    routing = router(x)
    gates, importance, load = equations(router, x, noise, floor)
    dense = torch.zeros(TOKENS, EXPERTS).scatter(-1, routing.experts, routing.gates)
    torch.testing.assert_close(dense, torch.tensor(gates), rtol=1e-5, atol=1e-6)
    assert routing.losses["importance"].item() == pytest.approx(0.1 * importance, rel=1e-4)
    assert routing.losses["load"].item() == pytest.approx(0.1 * load, rel=1e-4)
    assert routing.kept is None and int(routing.counts.sum()) == K * TOKENS


def test_the_chance_is_how_often_new_noise_chooses_the_expert() -> None:
    """Equation 8: all other noise stays, and the expert's own is drawn again."""
    torch.manual_seed(0)
    clean, scale = torch.randn(EXPERTS), torch.rand(EXPERTS) + 0.2
    noisy = clean + torch.randn(EXPERTS) * scale
    expected = chances(clean, noisy, scale, K)
    for i in range(EXPERTS):
        again = noisy.repeat(40_000, 1)
        again[:, i] = clean[i] + torch.randn(40_000) * scale[i]
        chosen = (again.topk(K).indices == i).any(-1).float().mean()
        assert float(expected[i]) == pytest.approx(float(chosen), abs=0.01)


def test_all_experts_are_chosen_for_sure_where_k_is_their_number() -> None:
    logits = torch.randn(3, 4)
    assert torch.equal(chances(logits, logits, torch.ones(3, 4), 4), torch.ones(3, 4))


def test_noise_is_only_in_training() -> None:
    router, x = trained().eval(), tokens()
    first, again = router(x), router(x)
    assert torch.equal(first.gates, again.gates) and torch.equal(first.experts, again.experts)
    assert not first.losses
    logits = x @ router.weight.t()
    best = logits.topk(K)
    assert torch.equal(first.experts, best.indices)
    torch.testing.assert_close(first.gates, best.values.softmax(-1))
    router.train()
    assert not torch.equal(router(x).experts, router(x).experts)


def test_weights_start_at_zero_and_the_load_is_even_then() -> None:
    router = router_of("shazeer2017", WIDTH, EXPERTS, k=K)
    torch.manual_seed(0)
    routing = router(torch.randn(8000, WIDTH))
    assert all(not parameter.any() for parameter in router.parameters())
    counts = routing.counts.double()
    assert float(counts.std() / counts.mean()) < 0.05
    assert routing.losses["load"].item() < 1e-4


def test_every_loss_reaches_the_weights() -> None:
    router, x = trained(), tokens()
    assert router.noise_weight is not None
    for name in ("importance", "load"):
        gradients = torch.autograd.grad(router(x).losses[name], [router.weight, router.noise_weight])
        assert all(float(gradient.abs().max()) > 1e-5 for gradient in gradients)


def test_the_squared_variation_is_0_where_even_and_its_gradient_is_finite_there() -> None:
    """A standard deviation has an infinite gradient at 0; the variance has none."""
    values = torch.full((5,), 3.0, requires_grad=True)
    loss = squared_variation(values)
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == 0 and torch.equal(gradient, torch.zeros(5))
    assert float(squared_variation(torch.tensor([8.0, 0, 0, 0]))) == pytest.approx(3)


def test_padding_counts_in_no_loss() -> None:
    """Padding stands at the end, where its noise is drawn last."""
    router, x = trained(), tokens()
    torch.manual_seed(5)
    padded = router(torch.cat((x, x + 1)), valid=torch.arange(2 * TOKENS) < TOKENS)
    torch.manual_seed(5)
    alone = router(x)
    assert torch.equal(padded.counts, alone.counts) and torch.equal(padded.experts[:TOKENS], alone.experts)
    for name in ("importance", "load"):
        torch.testing.assert_close(padded.losses[name], alone.losses[name])
