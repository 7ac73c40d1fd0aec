"""Dispatch: rows sorted by expert, nothing padded, dropped choices left out, sums in the order of choices."""

import pytest
import torch
from moe.routings import routing_of

from zeroshard.moe.exchange.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.routing.record import Routing


@pytest.mark.parametrize("drops", [0.0, 0.4])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_the_order_is_that_of_a_stable_sort_of_kept_choices(tokens: int, k: int, drops: float) -> None:
    routing = routing_of(tokens, 5, k, drops)
    order = order_of(routing, 5)
    kept = torch.ones(tokens, k, dtype=torch.bool) if routing.kept is None else routing.kept
    pairs = [(int(routing.experts[t, j]), t, j) for t in range(tokens) for j in range(k) if kept[t, j]]
    expected = sorted(pairs, key=lambda pair: pair[0])
    assert order.choices.tolist() == [t * k + j for _, t, j in expected]
    assert order.tokens.tolist() == [t for _, t, _ in expected]
    assert order.counts == tuple(sum(e == expert for e, _, _ in pairs) for expert in range(5))
    assert order.rows == len(pairs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_choices_may_have_fewer_bits(dtype: torch.dtype) -> None:
    routing = routing_of(37, 5, 2)
    narrow = Routing(routing.experts.to(dtype), routing.gates, routing.kept, routing.counts)
    found, expected = order_of(narrow, 5), order_of(routing, 5)
    assert torch.equal(found.choices, expected.choices) and found.counts == expected.counts


@pytest.mark.parametrize("k, drops", [(1, 0.0), (2, 0.5), (3, 0.0)])
def test_gather_and_combine_equal_index_and_index_add_and_are_each_others_transpose(k: int, drops: float) -> None:
    order = order_of(routing_of(29, 4, k, drops), 4)
    x = torch.randn(29, 6, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(order.rows, 6, dtype=torch.float64, requires_grad=True)
    assert torch.equal(gather_rows(x, order), x[order.tokens])
    added = torch.zeros_like(x).index_add(0, order.tokens, rows)
    torch.testing.assert_close(combine(rows, order), added)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, order), x)
    assert torch.autograd.gradcheck(lambda rows: combine(rows, order), rows)
    assert torch.autograd.gradgradcheck(lambda rows: combine(rows, order).square(), rows)


def test_sums_of_16_bit_rows_are_made_in_fp32() -> None:
    """1 + 2^-8 + 2^-8 is 1 if each sum is rounded to bf16."""
    routing = Routing(torch.tensor([[0, 1, 2]]), torch.ones(1, 3), None, torch.ones(3, dtype=torch.int64))
    rows = torch.tensor([[1.0], [2**-8], [2**-8]]).bfloat16()
    assert combine(rows, order_of(routing, 3)).item() == 1 + 2**-7


def test_gates_follow_their_rows() -> None:
    routing = routing_of(12, 4, 2, 0.3)
    order = order_of(routing, 4)
    gates = gather_gates(routing.gates, order)
    assert torch.equal(gates, routing.gates.flatten()[order.choices])


def test_the_order_does_not_depend_on_the_run() -> None:
    routing = routing_of(300, 7, 2)
    first, second = order_of(routing, 7), order_of(routing, 7)
    assert torch.equal(first.choices, second.choices) and first.counts == second.counts


def test_dropped_choices_make_no_rows() -> None:
    routing = routing_of(50, 4, 2)
    none = Routing(routing.experts, routing.gates, torch.zeros(50, 2, dtype=torch.bool), routing.counts)
    order = order_of(none, 4)
    assert order.rows == 0 and order.counts == (0, 0, 0, 0)
    assert torch.equal(combine(gather_rows(torch.randn(50, 3), order), order), torch.zeros(50, 3))
