"""Experts one at a time: equal to literal loops over tokens, with every gradient, and in little memory."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from moe.large_tensors import made_by
from moe.routings import mixture_by_tokens, routing_of
from selection import by_default
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import ModelError
from zeroshard.moe.exchange.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.experts import kernels
from zeroshard.moe.experts.activations import Activation, Traced, activation_of
from zeroshard.moe.experts.experts import Experts, plain_rows
from zeroshard.moe.experts.kernels import ExpertStack, check_counts, expert_rows, expert_tokens
from zeroshard.moe.routing.record import Routing
from zeroshard.step.context import WeightGradients, Within

T, D, H, E = 23, 6, 5, 4
NAMES = ["relu", "relu_squared", "gelu", "gelu_tanh", "silu"]


def clipped(made: Tensor) -> Tensor:
    """An activation of GPT-OSS's kind: gates and values take turns."""
    gate, value = made[..., ::2].clamp(max=7.0), made[..., 1::2].clamp(-7.0, 7.0)
    return (value + 1) * gate * torch.sigmoid(1.702 * gate)


FORMS: dict[str, Activation] = {
    **{name: activation_of(name, False) for name in NAMES},
    **{f"gated {name}": activation_of(name, True) for name in NAMES},
    "traced": Traced(clipped, 0.5),
}


def stack_of(activation: Activation, bias: bool = True, transposed: bool = False, dtype=torch.float64) -> ExpertStack:
    made = round(H / activation.features)
    shapes = [(E, made, D), (E, D, H), (E, made), (E, D)]
    up, down, up_bias, down_bias = (nn.Parameter(torch.randn(shape, dtype=dtype) / 2) for shape in shapes)
    if transposed:
        up, down = (nn.Parameter(w.detach().mT.contiguous()) for w in (up, down))
    return ExpertStack(up, down, activation, up_bias if bias else None, down_bias if bias else None, transposed)


def parameters(stack: ExpertStack) -> list[nn.Parameter]:
    return [p for p in (stack.up, stack.up_bias, stack.down, stack.down_bias) if isinstance(p, nn.Parameter)]


def by_tokens(x: Tensor, routing: Routing, stack: ExpertStack) -> Tensor:
    def expert(e: int, row: Tensor) -> Tensor:
        up, down = (w[e].mT if stack.transposed else w[e] for w in (stack.up, stack.down))
        made = up @ row + (0 if stack.up_bias is None else stack.up_bias[e])
        return down @ stack.activation(made) + (0 if stack.down_bias is None else stack.down_bias[e])

    return mixture_by_tokens(x, routing, expert)


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    return list(torch.autograd.grad((output * weights).sum(), inputs))


@pytest.fixture(params=[3, 1024], ids=["small tiles", "one tile"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernels, "TILE", request.param)
    return int(request.param)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k, drops", [(1, 0.0), (2, 0.3), (3, 0.0)])
@pytest.mark.parametrize("bias, transposed", [(True, False), (False, True)])
def test_tokens_equal_a_literal_loop(form: str, k: int, drops: float, bias: bool, transposed: bool, tile: int) -> None:
    stack = stack_of(FORMS[form], bias, transposed)
    routing = routing_of(T, E, k, drops, torch.float64)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, routing.gates, *parameters(stack)]
    output, expected = expert_tokens(x, order_of(routing, E), routing.gates, stack), by_tokens(x, routing, stack)
    torch.testing.assert_close(output, expected)
    for found, right in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("form", by_default(FORMS, "gelu", "gated silu"))
def test_gradients_pass_gradcheck(form: str, tile: int) -> None:
    stack, routing = stack_of(FORMS[form]), routing_of(7, E, 2, 0.2, torch.float64)
    x, order = torch.randn(7, D, dtype=torch.float64, requires_grad=True), order_of(routing, E)

    def function(x: Tensor, gates: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        return expert_tokens(x, order, gates, ExpertStack(up, down, stack.activation, up_bias, down_bias))

    assert torch.autograd.gradcheck(function, (x, routing.gates, *parameters(stack)))


@pytest.mark.parametrize("with_gates", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_equal_plain_operations(with_gates: bool, dtype: torch.dtype, tile: int) -> None:
    stack, counts = stack_of(FORMS["gated silu"], dtype=dtype), (5, 0, 4, 1)
    rows = torch.randn(10, D, dtype=dtype, requires_grad=True)
    gates = torch.rand(10, requires_grad=True) if with_gates else None
    inputs = [rows, *parameters(stack), *([gates] if gates is not None else [])]
    output = expert_rows(rows, counts, gates, stack)
    expected = plain_rows(rows, counts, stack)
    expected = expected if gates is None else (expected * gates[:, None]).to(dtype)
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(output, expected, **tolerance)
    for found, right in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, **tolerance)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_tokens_equal_rows_that_were_gathered_bit_for_bit(k: int) -> None:
    """As an engine with experts on several ranks gathers them; widths whose rows are all aligned alike."""
    experts = Experts(16, 32, E, bias=True)
    routing, x = routing_of(64, E, k, 0.3), torch.randn(64, 16, requires_grad=True)
    inputs = [x, routing.gates, *experts.parameters()]
    order = order_of(routing, E)
    rows = experts.compute(gather_rows(x, order), order.counts, gather_gates(routing.gates, order))
    output, expected = experts(x, routing), combine(rows, order)
    assert torch.equal(output, expected)
    assert all(map(torch.equal, gradients(output, inputs), gradients(expected, inputs)))


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (0, 3, 0, 0)])
def test_experts_without_rows_get_zeros_and_never_none(counts: tuple[int, ...]) -> None:
    stack = stack_of(FORMS["gelu"])
    rows = torch.randn(sum(counts), D, dtype=torch.float64, requires_grad=True)
    expert_rows(rows, counts, None, stack).sum().backward()
    for parameter in parameters(stack):
        assert parameter.grad is not None
        idle = [e for e, count in enumerate(counts) if not count]
        assert not parameter.grad[idle].any() and parameter.grad.isfinite().all()
    assert rows.grad is not None and rows.grad.shape == rows.shape


def test_gradients_are_added_to_grad_in_place_and_round_as_autograd_rounds(tile: int) -> None:
    def run(stack: ExpertStack, clear: bool) -> list[Tensor]:
        for parameter in parameters(stack):
            parameter.grad = None
        sums = [torch.zeros_like(p) for p in parameters(stack)]
        torch.manual_seed(1)
        before: list[int] = []
        for _ in range(3):
            rows = torch.randn(13, D)
            expert_rows(rows, (8, 0, 4, 1), torch.rand(13), stack).square().sum().backward()
            for total, parameter in zip(sums, parameters(stack), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
                parameter.grad = None if clear else parameter.grad
            if not clear:
                now = [p.grad.data_ptr() for p in parameters(stack) if p.grad is not None]
                assert not before or now == before
                before = now
        return sums if clear else [p.grad for p in parameters(stack) if p.grad is not None]

    stack = stack_of(FORMS["relu"], dtype=torch.float32)
    for in_place, by_autograd in zip(run(stack, clear=False), run(stack, clear=True), strict=True):
        assert torch.equal(in_place, by_autograd)


def test_grad_is_left_alone_where_it_is_not_what_the_backward_makes() -> None:
    stack = stack_of(FORMS["relu"])
    rows = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    for parameter in parameters(stack):
        parameter.grad = torch.ones_like(parameter)
    output = expert_rows(rows, (1, 1, 1, 1), None, stack).sum()
    found = torch.autograd.grad(output, parameters(stack), retain_graph=True)
    assert all(g.any() for g in found)
    torch.autograd.backward(output, inputs=[rows], retain_graph=True)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in parameters(stack) if p.grad is not None)
    seen = []
    stack.up.register_hook(seen.append)
    output.backward()
    torch.testing.assert_close(seen[0], found[0])
    assert stack.up.grad is not None
    torch.testing.assert_close(stack.up.grad, 1 + found[0])


def test_a_stack_used_twice_in_one_forward_gets_the_sum() -> None:
    stack = stack_of(FORMS["relu"])
    rows = torch.randn(8, D, dtype=torch.float64)

    def loss(function: object) -> Tensor:
        once = function(rows, (2, 2, 2, 2))  # type: ignore[operator]
        return function(once, (8, 0, 0, 0)).square().sum() + stack.up.sum()  # type: ignore[operator]

    right = torch.autograd.grad(loss(lambda x, counts: plain_rows(x, counts, stack)), parameters(stack))
    for _ in range(2):  # without gradients, and with those that are there
        loss(lambda x, counts: expert_rows(x, counts, None, stack)).backward()
    for parameter, expected in zip(parameters(stack), right, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * expected)


@pytest.mark.parametrize("form", by_default(FORMS, "relu", "gated relu", "gelu", "traced"))
@pytest.mark.parametrize("bias, transposed, frozen", [(True, False, ""), (False, True, "up"), (False, False, "down")])
def test_products_left_for_later_bit_for_bit(form: str, bias: bool, transposed: bool, frozen: str, tile: int) -> None:
    """Over two microbatches, whose products are made after both; of tokens, and of rows whose input needs nothing."""
    at_once = stack_of(FORMS[form], bias, transposed, torch.float32)
    later = copy.deepcopy(at_once)
    routing, x = routing_of(T, E, 2, 0.3), torch.randn(T, D)
    rows, counts = torch.randn(10, D), (5, 0, 4, 1)
    stores, inputs = [WeightGradients(), WeightGradients()], list[Tensor]()
    for stack in (at_once, later):
        if frozen:
            getattr(stack, frozen).requires_grad_(False)
        for store in stores:
            tokens, gates = (each.detach().requires_grad_() for each in (x, routing.gates))
            inputs += [tokens, gates]
            with Within(weight_gradients=store) if stack is later else nullcontext():
                output = expert_tokens(tokens, order_of(routing, E), gates, stack)
                other = expert_rows(rows, counts, None, stack)
            output.square().sum().backward()
            other.square().sum().backward()
    assert later.up.grad is None and later.down.grad is None
    for store in stores:
        store.compute()
    grads = [each.grad for each in (*inputs, *parameters(at_once), *parameters(later))]
    split = 8 + len(parameters(at_once))
    ours, expected = [*grads[4:8], *grads[split:]], [*grads[:4], *grads[8:split]]
    for found, right in zip(ours, expected, strict=True):
        assert (found is None) == (right is None) and (found is None or torch.equal(found, right))
    assert sum(each is None for each in ours) == bool(frozen)


def test_products_left_for_later_are_added_in_place_and_free_what_they_need() -> None:
    """The gradient is made in `grad`; frozen stacks leave nothing, and hold no graph."""
    stack, store, rows = (
        stack_of(FORMS["gated silu"], bias=False, dtype=torch.float32),
        WeightGradients(),
        torch.randn(9, D),
    )
    for parameter in parameters(stack):
        parameter.grad = torch.zeros_like(parameter)
    before = [p.grad.data_ptr() for p in parameters(stack) if p.grad is not None]
    with Within(weight_gradients=store):
        expert_rows(rows, (4, 0, 0, 5), torch.rand(9), stack).sum().backward()
    (_, make), _ = store._left
    kept = weakref.ref(make)
    del make
    store.compute()
    assert kept() is None and [p.grad.data_ptr() for p in parameters(stack) if p.grad is not None] == before
    assert all(p.grad is not None and p.grad.any() for p in parameters(stack))
    with Within(weight_gradients=store):
        for parameter in parameters(stack):
            parameter.requires_grad_(False)
        assert not expert_rows(rows, (4, 0, 0, 5), None, stack).requires_grad


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    stack = stack_of(FORMS["relu"])
    stack.up.requires_grad_(False)
    rows, gates = torch.randn(4, D, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    expert_rows(rows, (1, 1, 1, 1), gates, stack).sum().backward()
    assert stack.up.grad is None and stack.down.grad is not None and rows.grad is None and gates.grad is None


def test_without_gradients_nothing_is_saved() -> None:
    stack = stack_of(FORMS["relu"])
    with torch.no_grad():
        output = expert_rows(torch.randn(4, D, dtype=torch.float64), (4, 0, 0, 0), None, stack)
    assert output.grad_fn is None


def test_autocast_makes_products_in_16_bits_and_leaves_weights_as_they_are() -> None:
    stack = stack_of(FORMS["relu"], dtype=torch.float32)
    rows, gates = torch.randn(10, D, requires_grad=True), torch.rand(10, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = expert_rows(rows, (5, 0, 4, 1), gates, stack)
    narrow = ExpertStack(*(None if w is None else w if w is stack.activation else w.to(torch.bfloat16) for w in (
        stack.up, stack.down, stack.activation, stack.up_bias, stack.down_bias)))  # fmt: skip
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, expert_rows(rows.bfloat16(), (5, 0, 4, 1), gates, narrow))
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in parameters(stack))
    assert rows.grad is not None and rows.grad.dtype is torch.float32


@pytest.mark.parametrize("counts", [(4, 0, 0, 1), (5, -1, 0, 0), (2, 2), (1, 1, 1, 0)])
def test_counts_that_do_not_cover_the_rows_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="4 rows were to be divided among 4 experts"):
        check_counts(counts, 4, 4)
    with pytest.raises(ModelError, match="add up to 4"):
        expert_rows(torch.zeros(4, D), counts, None, stack_of(FORMS["relu"], dtype=torch.float32))


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="no activation 'swish', but relu, relu_squared, gelu, gelu_tanh, silu"):
        activation_of("swish", True)


def test_no_backward_makes_a_gradient_of_the_stack_for_each_expert() -> None:
    """As autograd does for `stack[expert]` in a loop."""
    stack, rows = stack_of(FORMS["relu"], bias=False, dtype=torch.float32), torch.randn(4, D)
    loop = torch.stack([F.linear(F.relu(F.linear(rows[e], stack.up[e])), stack.down[e]) for e in range(E)])
    assert made_by(loop.sum().backward, stack.up.nbytes) >= 2 * E
    stack.up.grad = stack.down.grad = None
    losses = [expert_rows(rows, (1, 1, 1, 1), None, stack).sum() for _ in range(2)]
    assert made_by(losses[0].backward, stack.up.nbytes) == 2  # the gradients themselves
    assert made_by(losses[1].backward, stack.up.nbytes) == 0  # in the place of those that are there
