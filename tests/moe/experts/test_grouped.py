"""All experts in one product: equal to experts one at a time, behind checks of what the operator does not check."""

import pytest
import torch
from moe.routings import routing_of
from torch import nn

from zeroshard.errors import ModelError
from zeroshard.moe.exchange.dispatch import gather_gates, gather_rows, order_of
from zeroshard.moe.experts.activations import activation_of
from zeroshard.moe.experts.experts import Experts, aligned, fits, grouped_rows, weighed
from zeroshard.moe.experts.kernels import ExpertStack, expert_rows
from zeroshard.platform.accelerator import as_on_devices
from zeroshard.step.context import WeightGradients, Within


def stack_of(width: int, hidden: int, bias: bool, transposed: bool, dtype: torch.dtype) -> ExpertStack:
    activation = activation_of("silu", True)
    made = 2 * hidden
    up, down = torch.randn(4, made, width, dtype=dtype), torch.randn(4, width, hidden, dtype=dtype)
    up, down = (w.mT.contiguous() if transposed else w for w in (up, down))
    biases = (torch.randn(4, made, dtype=dtype), torch.randn(4, width, dtype=dtype)) if bias else (None, None)
    parameters = [None if each is None else nn.Parameter(each / 4) for each in (up, down, *biases)]
    return ExpertStack(parameters[0], parameters[1], activation, parameters[2], parameters[3], transposed)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(5, 0, 3, 1), (0, 0, 0, 9), (0, 0, 0, 0)])
@pytest.mark.parametrize("bias, transposed", [(False, False), (True, True)])
def test_one_product_equals_experts_one_at_a_time(counts: tuple[int, ...], bias: bool, transposed: bool) -> None:
    stack = stack_of(8, 4, bias, transposed, torch.float32)
    rows, gates = torch.randn(sum(counts), 8, requires_grad=True), torch.rand(sum(counts), requires_grad=True)
    inputs = [rows, gates, *(p for p in (stack.up, stack.down, stack.up_bias, stack.down_bias) if p is not None)]
    found, expected = weighed(grouped_rows(rows, counts, stack), gates), expert_rows(rows, counts, gates, stack)
    torch.testing.assert_close(found, expected)
    at_once = torch.autograd.grad(found.sum(), inputs)
    for ours, theirs in zip(at_once, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.isfinite().all()
    store = WeightGradients()
    with Within(weight_gradients=store):
        weighed(grouped_rows(rows, counts, stack), gates).sum().backward()
    assert stack.up.grad is None and stack.down.grad is None
    store.compute()
    for each, right in zip(inputs, at_once, strict=True):
        assert each.grad is not None and torch.equal(each.grad, right)


def test_counts_that_leave_rows_uninitialised_are_refused() -> None:
    stack = stack_of(8, 4, False, False, torch.float32)
    for counts in ((1, 1, 1, 0), (5, -1, 0, 0), (9, 0, 0, 0)):
        with pytest.raises(ModelError, match="add up to 4"):
            grouped_rows(torch.randn(4, 8), counts, stack)


def test_it_is_for_accelerators_in_16_bits_and_whole_strides() -> None:
    assert aligned(stack_of(16, 8, False, False, torch.bfloat16), torch.bfloat16)
    assert not aligned(stack_of(16, 6, False, False, torch.bfloat16), torch.bfloat16)
    rows, stack = torch.randn(4, 16, dtype=torch.bfloat16), stack_of(16, 8, False, False, torch.bfloat16)
    assert not fits(rows, stack)
    with as_on_devices():  # in a rehearsal of accelerators
        assert fits(rows, stack) and not fits(rows.float(), stack)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_experts_on_an_accelerator_equal_those_of_the_host() -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    host = Experts(64, 128, 4, "silu", gated=True)
    routing, x = routing_of(96, 4, 2, 0.2), torch.randn(96, 64)
    there = Experts(64, 128, 4, "silu", gated=True).to(device, torch.bfloat16)
    there.load_state_dict(host.state_dict())
    order = order_of(routing, 4)
    rows = gather_rows(x, order).to(device, torch.bfloat16)
    assert fits(rows, there._stack)
    gates = gather_gates(routing.gates, order)
    output = there.compute(rows, order.counts, gates.to(device))
    expected = host.compute(gather_rows(x, order), order.counts, gates)
    torch.testing.assert_close(output.float().cpu(), expected, rtol=0.05, atol=0.05)
    output.float().sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(there.parameters(), host.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.float().cpu(), theirs.grad, rtol=0.1, atol=0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_rounded_once_after_their_gates(dtype: torch.dtype) -> None:
    rows, gates = torch.randn(9, 4, dtype=dtype, requires_grad=True), torch.rand(9, requires_grad=True)
    found, expected = weighed(rows, gates), (rows * gates.unsqueeze(-1)).to(dtype)
    assert found.dtype == dtype and torch.equal(found, expected)
    above = torch.randn_like(found)
    pairs = [torch.autograd.grad(each, [rows, gates], above) for each in (found, expected)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*pairs, strict=True))


def test_gated_rows_have_second_derivatives() -> None:
    rows, gates = (torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (4,)))
    assert torch.autograd.gradgradcheck(weighed, (rows, gates))
