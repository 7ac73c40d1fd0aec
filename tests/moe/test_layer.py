"""The layer: any router, any experts, shared and residual ones, in every dtype, on every way into a model."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from moe.routings import TopRouter, mixture_by_tokens
from zeroshard.errors import ModelError, PlanError
from zeroshard.moe.layer import FeedForwardLayer
from zeroshard.units.materialise import Materialiser

WIDTH, HIDDEN, E = 8, 12, 4


def layer_of(**options: object) -> zs.moe.MoE:
    torch.manual_seed(0)
    return zs.moe.MoE(WIDTH, HIDDEN, E, router=TopRouter(WIDTH, E, 2), **options)  # type: ignore[arg-type]


def chosen(layer: zs.moe.MoE, x: Tensor) -> Tensor:
    """What the routed experts give, token by token."""
    experts = layer.experts

    def expert(e: int, row: Tensor) -> Tensor:
        if isinstance(experts, zs.moe.ExpertModules):
            result: Tensor = experts.networks[e](row.unsqueeze(0)).squeeze(0)
            return result
        up, down = (0 if b is None else b[e] for b in (experts.up_bias, experts.down_bias))
        return experts.down[e] @ experts.activation(experts.up[e] @ row + up) + down

    return mixture_by_tokens(x, layer.router(x), expert)


@pytest.mark.parametrize(
    "form",
    [
        zs.moe.FeedForward(),
        zs.moe.FeedForward(activation="gelu", bias=True),
        zs.moe.SWIGLU,
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)),
    ],
    ids=["relu", "gelu with biases", "swiglu", "linear", "a network"],
)
def test_the_layer_is_the_sum_over_choices(form: object) -> None:
    layer, x = layer_of(expert=form), torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(layer(x), chosen(layer, x.view(-1, WIDTH)).view(x.shape))


def test_shared_experts_are_added_and_mixed() -> None:
    x = torch.randn(11, WIDTH)
    layer = layer_of(shared=2, expert=zs.moe.SWIGLU)
    assert layer.shared is not None and layer.shared.network.down.in_features == 2 * HIDDEN
    torch.testing.assert_close(layer(x), chosen(layer, x) + layer.shared.network(x))
    own = nn.Linear(WIDTH, WIDTH)
    layer = layer_of(shared=own)
    torch.testing.assert_close(layer(x), chosen(layer, x) + own(x))
    layer = layer_of(shared=zs.moe.SharedExpert(own, WIDTH, mix="sigmoid"))
    assert layer.shared is not None and layer.shared.gate is not None
    torch.testing.assert_close(layer(x), chosen(layer, x) + torch.sigmoid(x @ layer.shared.gate.weight.T) * own(x))
    layer = layer_of(shared=zs.moe.SharedExpert(own, WIDTH, mix="softmax"))
    assert layer.shared is not None and layer.shared.gate is not None
    of_chosen, of_own = layer.shared.gate(x).softmax(-1).chunk(2, -1)
    torch.testing.assert_close(layer(x), of_chosen * chosen(layer, x) + of_own * own(x))


def test_mistakes_are_named() -> None:
    with pytest.raises(ModelError, match=r"mix 'mean'.*'sum', 'sigmoid' and 'softmax'"):
        zs.moe.SharedExpert(nn.Identity(), WIDTH, mix="mean")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="width=D"):
        zs.moe.SharedExpert(nn.Identity(), mix="softmax")
    with pytest.raises(ModelError, match="k and capacity beside a router of your own"):
        zs.moe.MoE(WIDTH, HIDDEN, E, router=TopRouter(WIDTH, E, 2), k=1, capacity=1.0)
    with pytest.raises(PlanError, match="Did you mean 'switch'"):
        zs.moe.MoE(WIDTH, HIDDEN, E, router="swich")
    same = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ModelError, match="one module twice"):
        layer_of(expert=lambda: same)
    with pytest.raises(ModelError, match="at least 1, not 8, 0, 4"):
        zs.moe.Experts(WIDTH, 0, E)


def test_presets_by_name_take_k_and_capacity() -> None:
    layer = zs.moe.MoE(WIDTH, HIDDEN, E, router="mixtral", k=3)
    layer(torch.randn(10, WIDTH)).sum().backward()
    assert layer.experts.statistics.choices == 30
    layer = zs.moe.MoE(WIDTH, HIDDEN, E, router="switch", capacity=0.5)
    layer(torch.randn(16, WIDTH))
    assert layer.experts.statistics.dropped >= 16 - E * math.ceil(0.5 * 16 / E)
    layer = zs.moe.MoE(WIDTH, HIDDEN, E, router="switch", capacity=math.inf)
    layer(torch.randn(16, WIDTH))
    assert layer.experts.statistics.dropped == 0


def test_padding_passes_no_expert() -> None:
    layer = zs.moe.MoE(WIDTH, HIDDEN, E, router="gshard")
    x, valid = torch.randn(2, 6, WIDTH), torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    output = layer(x, valid)
    assert not output[~valid].any() and output[0].any()


def test_a_batch_without_tokens_gives_zero_gradients() -> None:
    for form in (zs.moe.SWIGLU, partial(nn.Linear, WIDTH, WIDTH)):
        layer = layer_of(expert=form)
        x = torch.empty(0, WIDTH, requires_grad=True)
        routing = layer.router(x)
        routing.losses.clear()
        layer.experts(x, routing).sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())


def test_modules_without_rows_get_zero_gradients_and_are_not_called() -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    experts = zs.moe.ExpertModules(lambda: Counted(WIDTH, WIDTH), 3)
    experts.compute(torch.randn(5, WIDTH), (0, 5, 0), None).sum().backward()
    assert calls == [5]
    grads = [network.weight.grad for network in experts.networks]
    assert all(g is not None for g in grads) and [bool(g.any()) for g in grads] == [False, True, False]


def test_expert_dropout_is_of_hidden_features_in_training_alone() -> None:
    layer = layer_of(expert=zs.moe.FeedForward(dropout=0.4))
    layer.shared = None
    experts, rows = layer.experts, torch.randn(6, WIDTH)
    torch.manual_seed(3)
    found = experts.compute(rows, (6, 0, 0, 0), None)
    torch.manual_seed(3)
    hidden = F.dropout(F.relu(rows @ experts.up[0].T), 0.4)
    torch.testing.assert_close(found, hidden @ experts.down[0].T)
    layer.eval()
    torch.testing.assert_close(
        experts.compute(rows, (6, 0, 0, 0), None), F.relu(rows @ experts.up[0].T) @ experts.down[0].T
    )


def test_initial_weights_are_those_of_linear_layers_or_of_switch() -> None:
    torch.manual_seed(0)
    plain = zs.moe.Experts(64, 256, 3, bias=True)
    assert plain.up.abs().max() <= 1 / 8 and plain.down.abs().max() <= 1 / 16
    assert plain.down_bias is not None and plain.down_bias.any() and not torch.equal(plain.up[0], plain.up[1])
    scaled = zs.moe.Experts(64, 256, 3, scale=0.1, bias=True)
    std = math.sqrt(0.1 / 64)
    assert scaled.up.abs().max() <= 2 * std and 0.8 * std < scaled.up.std() < std
    assert scaled.up_bias is not None and not scaled.up_bias.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_layer_trains_in_every_dtype_and_under_autocast(dtype: torch.dtype) -> None:
    layer = zs.moe.MoE(WIDTH, HIDDEN, E, router="mixtral", expert=zs.moe.SWIGLU, shared=1).to(dtype)
    x = torch.randn(3, 5, WIDTH, dtype=dtype, requires_grad=True)
    output = layer(x)
    assert output.dtype is dtype
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is dtype for p in layer.parameters())
    if dtype is torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16


def test_a_model_on_the_meta_device_becomes_real_with_its_statistics() -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), zs.moe.MoE(WIDTH, HIDDEN, E, "gshard", expert=zs.moe.SWIGLU, shared=1)
        )

    with torch.device("meta"):
        meta = model()
    made = Materialiser(meta, 0)
    for module in meta.modules():
        made.materialise(module)
    layer = meta[1]
    assert isinstance(layer, zs.moe.MoE)
    assert not any(p.is_meta or not p.isfinite().all() for p in layer.parameters())
    assert not any(b.is_meta or b.any() for b in layer.experts.statistics.buffers())
    meta(torch.randn(4, WIDTH)).sum().backward()
    assert layer.experts.statistics.tokens == 4


def test_a_layer_of_one_expert_is_a_feed_forward_layer() -> None:
    layer = zs.moe.MoE(WIDTH, HIDDEN, 1, router=TopRouter(WIDTH, 1, 1), expert=zs.moe.SWIGLU)
    dense = FeedForwardLayer(WIDTH, HIDDEN, zs.moe.SWIGLU)
    with torch.no_grad():
        dense.up.weight.copy_(layer.experts.up[0])
        dense.down.weight.copy_(layer.experts.down[0])
    x = torch.randn(7, WIDTH)
    torch.testing.assert_close(layer(x), dense(x))


@pytest.mark.parametrize("form", [None, lambda: nn.Linear(WIDTH, WIDTH)], ids=["stacked", "modules"])
def test_a_block_may_write_over_the_output_and_keeps_the_gradient_of_losses(form: object) -> None:
    def gradient(in_place: bool) -> Tensor:
        torch.manual_seed(0)
        layer = zs.moe.MoE(WIDTH, HIDDEN, E, router="gshard", expert=form)  # type: ignore[arg-type]
        x = torch.randn(2, 9, WIDTH)
        output = layer(x)
        output = output.add_(x) if in_place else output + x  # as the blocks of Falcon do
        (output * 0).sum().backward()
        assert layer.router.weight.grad is not None
        return layer.router.weight.grad

    assert gradient(in_place=True).norm() > 0
    assert torch.equal(gradient(in_place=True), gradient(in_place=False))


@pytest.mark.parametrize("router", ["switch", "gshard", "deepseek_v3"])
def test_sequences_without_tokens_are_an_empty_batch(router: str) -> None:
    layer = zs.moe.MoE(WIDTH, HIDDEN, 16, router=router)
    output = layer(torch.randn(2, 0, WIDTH))
    output.sum().backward()
    assert output.shape == (2, 0, WIDTH)
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
