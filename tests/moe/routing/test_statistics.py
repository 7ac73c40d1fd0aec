"""Statistics: counted once in training, recomputed or not, and an error where a recomputation routes otherwise."""

from collections.abc import Callable

import pytest
import torch
from moe.routings import TopRouter, routing_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.moe.routing.record import Routing
from zeroshard.moe.routing.statistics import LOSSES, Statistics

RECOMPUTED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "none": lambda layer, x: layer(x),
    "re-entrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "not re-entrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
}


def layer_of(noise: float = 0.0, drops: float = 0.0) -> zs.moe.MoE:
    torch.manual_seed(0)
    return zs.moe.MoE(8, 16, 4, router=TopRouter(8, 4, 2, drops, noise))


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_forwards_are_counted_once_and_the_penalty_is_delivered_once(kind: str) -> None:
    layer, x = layer_of(noise=0.5, drops=0.3), torch.randn(3, 10, 8, requires_grad=True)
    torch.manual_seed(1)
    (RECOMPUTED[kind](layer, x) * 0).sum().backward()  # what is left is the penalty's gradient
    found = layer.router.linear.weight.grad
    torch.manual_seed(1)
    routing = layer.router(x.view(-1, 8))
    (expected,) = torch.autograd.grad(routing.penalty, [layer.router.linear.weight])
    assert found is not None and expected.any()
    torch.testing.assert_close(found, expected)
    counted = layer.experts.statistics
    assert counted.forwards == 1 and counted.tokens == 30 and counted.choices == 60
    assert torch.equal(counted.load, routing.counts)
    assert counted.dropped == 60 - int(routing.kept.sum())
    torch.testing.assert_close(counted.entropy, routing.entropy * 30)
    torch.testing.assert_close(counted.losses[LOSSES.index("balance")], routing.losses["balance"].detach())


def test_they_add_up_until_they_are_cleared_and_leave_evaluation_out() -> None:
    layer = layer_of()
    for _ in range(3):
        layer(torch.randn(5, 8))
    layer.eval()(torch.randn(5, 8))
    assert layer.experts.statistics.tokens == 15 and layer.experts.statistics.forwards == 3
    assert int(layer.experts.statistics.load.sum()) == 30
    layer.experts.statistics.clear()
    assert not any(buffer.any() for buffer in layer.experts.statistics.buffers())


def test_they_are_no_part_of_checkpoints_and_survive_narrow_models() -> None:
    layer = layer_of().bfloat16()
    layer(torch.randn(7, 8, dtype=torch.bfloat16))
    assert layer.experts.statistics.load.dtype is torch.int64
    assert not [name for name in layer.state_dict() if "statistics" in name]


@pytest.mark.parametrize("kind", ["re-entrant", "not re-entrant"])
def test_a_recomputation_that_routes_otherwise_is_an_error_before_the_experts(kind: str) -> None:
    layer, x = layer_of(noise=2.0), torch.randn(40, 8, requires_grad=True)
    entered = []
    layer.experts.register_forward_pre_hook(lambda *_: entered.append(1))
    output = checkpoint(layer, x, use_reentrant=kind == "re-entrant", preserve_rng_state=False)
    with pytest.raises(ModelError, match=r"recomputed forward chose other experts.*preserve_rng_state=True"):
        output.sum().backward()
    assert entered == [1]


def test_recomputations_in_another_order_are_recognised() -> None:
    layer, inputs = layer_of(), [torch.randn(6, 8, requires_grad=True) for _ in range(3)]
    outputs = [checkpoint(layer, x, use_reentrant=False) for x in inputs]
    for output in reversed(outputs):
        output.sum().backward()
    assert layer.experts.statistics.forwards == 3


def test_choices_that_trade_places_are_other_choices() -> None:
    one = routing_of(16, 4, 2)
    other = Routing(one.experts.flip(0), one.gates, None, one.counts)
    third = Routing(one.experts, one.gates, torch.arange(32).view(16, 2) > 0, one.counts)
    statistics = Statistics(4)
    statistics.add(one)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, routing):  # type: ignore[no-untyped-def]
            ctx.routing = routing
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            statistics.compare(ctx.routing)
            return gradient, None

    Again.apply(torch.ones(1, requires_grad=True), one).backward()
    for routing in (other, third):
        with pytest.raises(ModelError, match="chose other experts"):
            Again.apply(torch.ones(1, requires_grad=True), routing).backward()
