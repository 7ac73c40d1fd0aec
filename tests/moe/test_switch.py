"""Switch's router beside the text of 2101.03961 and beside Switch Transformers of Hugging Face."""

import math
from functools import partial

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers import modeling_switch_transformers as hf

import zeroshard as zs
from zeroshard.moe.routing.presets import router_of
from zeroshard.moe.routing.record import Routing
from zeroshard.precision.cast import Precision, keep_in_fp32
from zeroshard.step.losses import penalised

TOKENS, WIDTH, EXPERTS = 100, 16, 8


def skewed() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(TOKENS, WIDTH) + torch.linspace(0, 1, WIDTH)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
def test_the_router_is_that_of_the_text(factor: float) -> None:
    """Equations 1 to 6: raw probability of the best expert, exactly C = T/E·factor places in order, the loss."""
    router, x = router_of("switch", WIDTH, EXPERTS, capacity=factor, noise=None), skewed()
    routing = router(x)
    probabilities = torch.softmax(x @ router.weight.detach().t(), -1)
    capacity, counts, means = math.ceil(TOKENS / EXPERTS * factor), [0] * EXPERTS, [0.0] * EXPERTS
    assert routing.kept is not None
    for t in range(TOKENS):
        row = probabilities[t].tolist()
        best = row.index(max(row))
        assert routing.experts[t].item() == best
        assert routing.gates[t].item() == pytest.approx(row[best], rel=1e-6)
        assert routing.kept[t].item() is (counts[best] < capacity)
        counts[best] += 1
        means = [mean + p / TOKENS for mean, p in zip(means, row, strict=True)]
    assert routing.counts.tolist() == counts
    loss = EXPERTS * sum(n / TOKENS * mean for n, mean in zip(counts, means, strict=True))
    assert routing.losses["balance"].item() == pytest.approx(1e-2 * loss, rel=1e-5)
    assert factor > 1 or not routing.kept.all()


def test_jitter_multiplies_a_copy_of_the_input_in_training_only() -> None:
    router, x = router_of("switch", WIDTH, EXPERTS), skewed()
    before = x.clone()
    torch.manual_seed(5)
    factors = torch.empty_like(x).uniform_(1 - 1e-2, 1 + 1e-2)
    torch.manual_seed(5)
    gates = router(x).gates
    assert torch.equal(x, before)
    expected = torch.softmax((x * factors) @ router.weight.t(), -1).amax(-1, keepdim=True)
    torch.testing.assert_close(gates, expected)
    clean = torch.softmax(x @ router.weight.t(), -1).amax(-1, keepdim=True)
    assert not torch.allclose(gates, clean, rtol=1e-6)
    routing = router.eval()(x)
    torch.testing.assert_close(routing.gates, clean)
    assert routing.kept is None and not routing.losses


def test_jitter_is_drawn_in_fp32_for_tokens_in_bf16() -> None:
    """In bf16 the factors between 0.99 and 1.01 would be four numbers."""
    router, x = router_of("switch", WIDTH, EXPERTS), skewed().bfloat16()
    torch.manual_seed(5)
    gates = router(x).gates
    torch.manual_seed(5)
    assert torch.equal(router(x.float()).gates, gates)


def test_initial_weights_are_truncated_normal_of_a_tenth() -> None:
    torch.manual_seed(0)
    weight = router_of("switch", 400, 64).weight.detach()
    std = math.sqrt(0.1 / 400)
    assert weight.abs().max().item() <= 2 * std
    assert weight.std().item() == pytest.approx(0.8796 * std, rel=0.02)  # of a normal cut off at two deviations


@pytest.mark.parametrize("autocast", [False, True])
def test_the_router_computes_in_fp32_for_tokens_in_bf16(autocast: bool) -> None:
    """In bf16 about one choice of 150 differs, and gates are off by up to a percent."""
    torch.manual_seed(0)
    x = torch.randn(4000, 64).bfloat16()
    router = router_of("switch", 64, EXPERTS).eval()
    exact = router(x.float())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = router(x)
    assert routing.gates.dtype == torch.float32
    assert torch.equal(routing.experts, exact.experts) and torch.equal(routing.gates, exact.gates)
    short = (x @ router.weight.detach().bfloat16().t()).float().softmax(-1)
    assert (short.argmax(-1) != exact.experts[:, 0]).float().mean().item() > 1e-3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacity", [4, 64])
def test_the_preset_is_the_router_of_hugging_face(training: bool, capacity: int) -> None:
    config = SwitchTransformersConfig(
        hidden_size=WIDTH, num_experts=EXPERTS, expert_capacity=capacity, router_jitter_noise=1e-2
    )
    theirs = hf.SwitchTransformersTop1Router(config).train(training)
    ours = router_of("hf_switch", WIDTH, EXPERTS, scale=1.0).train(training)
    if capacity != 64:
        ours = router_of("hf_switch", WIDTH, EXPERTS, capacity=ours.gating.capacity.__class__(4, 4, "constant"))
        ours.train(training)
    with torch.no_grad():
        theirs.classifier.weight.copy_(ours.weight)
    x = skewed().view(4, 25, WIDTH)
    torch.manual_seed(5)
    mask, gates, logits = theirs(x.clone())
    torch.manual_seed(5)
    routing = ours(x.view(TOKENS, WIDTH), group=25)
    assert routing.kept is not None
    kept = torch.zeros(TOKENS, EXPERTS).scatter(-1, routing.experts, routing.kept.float())
    assert torch.equal(kept.view(4, 25, EXPERTS).long(), mask)
    assert torch.equal(routing.gates.view(4, 25, 1), gates)
    if training:
        balance = hf.load_balancing_loss_func(logits.softmax(-1), logits.argmax(-1))
        torch.testing.assert_close(routing.losses["balance"], 1e-3 * torch.as_tensor(balance))
        torch.testing.assert_close(routing.losses["z"], 1e-3 * torch.as_tensor(hf.router_z_loss_func(logits)))


class _Routed(nn.Module):
    """A layer in the model's dtype before the router, whose record is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = router_of("switch", WIDTH, EXPERTS, noise=None, init_scale=10.0)
        self.seen: list[tuple[Tensor, Routing]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        routing = self.router(x)
        self.seen.append((x.detach(), routing))
        return penalised(x * routing.gates.to(x.dtype), routing.penalty)


def routed_in_bf16(mesh: zs.Mesh | None, zero: int) -> bool:
    model = _Routed()
    weight = model.router.weight.detach().clone()
    plan = zs.Plan(zero=zero, precision="bf16")
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), plan, mesh=mesh, loss=lambda out, _: out.float().sum())
    engine.train_step(torch.randn(200, WIDTH))
    ((x, routing),) = model.seen
    exact = (x.float() @ weight.t()).softmax(-1)
    assert x.dtype == torch.bfloat16 and routing.gates.dtype == torch.float32
    torch.testing.assert_close(routing.gates, exact.gather(-1, routing.experts), rtol=1e-5, atol=0)
    return torch.equal(routing.experts[:, 0], exact.argmax(-1))


@pytest.mark.parametrize("zero", [0, 3])
def test_the_router_keeps_its_weights_in_fp32_under_a_plan_in_bf16(pool: Pool, zero: int) -> None:
    assert pool.run(routed_in_bf16, 2, zero) == [True, True]


@pytest.mark.parametrize("preset", ["switch", "mixtral"])
def test_a_router_that_a_plan_names_returns_its_gates_in_fp32(preset: str) -> None:
    model = nn.Sequential(router_of(preset, WIDTH, EXPERTS, init_scale=1.0))
    assert keep_in_fp32(model, ("Router",), Precision.named("bf16")) == set(model.parameters())
    routing = model(torch.randn(20, WIDTH, dtype=torch.bfloat16))
    assert {t.dtype for t in (routing.gates, *routing.losses.values())} == {torch.float32}
