"""Borrowed weights: every backward finds the version of its forward, and the sum of gradients is repaid once."""

import pytest
import torch
from torch import Tensor, nn

from zeroshard.memory.ledger import Arena, Category, Ledger
from zeroshard.pipeline.run.borrowed import Borrowed


class Head(nn.Module):
    """Its gradients depend on its weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=dtype)
        self.norm = nn.LayerNorm(2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.inner(x).square()).square()
        return y.sum()


class Debt:
    """A head whose linear layer is borrowed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.head, self.ledger = Head(dtype), Ledger()
        lent = [self.head.inner.weight, self.head.inner.bias]
        self.lent = [parameter.detach().clone() for parameter in lent]
        sites: list[list[tuple[nn.Module, str]]] = [[(self.head.inner, "weight")], [(self.head.inner, "bias")]]
        self.borrowed = Borrowed(lent, sites, self.ledger)
        self.values = {0: torch.cat([value.flatten() for value in self.lent])}

    def receive(self, idle: bool = False) -> None:
        """The owner lends its next version."""
        version = self.borrowed.latest + 1
        self.values[version] = torch.randn(8).to(self.borrowed.dtype)
        self.borrowed.room(idle).copy_(self.values[version])
        self.borrowed.take()
        assert self.borrowed.latest == version

    def gradient(self, version: int, x: Tensor) -> Tensor:
        """By a plain model with a version of the weights [8]."""
        plain = Head(self.borrowed.dtype)
        values = self.values[version]
        plain.inner.weight.data, plain.inner.bias.data = values[:6].view(2, 3), values[6:]
        plain(x).backward()
        assert plain.inner.weight.grad is not None and plain.inner.bias.grad is not None
        return torch.cat([plain.inner.weight.grad.flatten(), plain.inner.bias.grad])


def inputs(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(4, 3, dtype=dtype, requires_grad=True) for _ in range(n)]


def test_it_begins_with_a_copy_of_the_values() -> None:
    debt = Debt()
    weight, bias = debt.head.inner.weight, debt.head.inner.bias
    assert torch.equal(weight, debt.lent[0]) and torch.equal(bias, debt.lent[1])
    assert isinstance(weight, nn.Parameter) and weight.requires_grad
    assert (debt.borrowed.numel, debt.borrowed.dtype, debt.borrowed.latest) == (8, torch.float32, 0)
    assert debt.ledger.account(Category.PARAMETERS).current == debt.ledger.account(Category.GRADIENTS).current == 32


def test_every_backward_uses_the_version_of_its_forward() -> None:
    debt, (x, y, z) = Debt(), inputs(3)
    losses = {}
    for key, batch in (("x", x), ("y", y), ("z", z)):
        debt.borrowed.begin(key)
        losses[key] = debt.head(batch)
        if key != "z":
            debt.receive()
    total = torch.zeros(8)
    for key, batch, version in (("y", y, 1), ("x", x, 0), ("z", z, 2)):
        losses[key].backward()
        debt.borrowed.end(key)
        total += debt.gradient(version, batch)
        assert torch.equal(debt.borrowed.gradient, total)
    assert debt.head.inner.weight.grad is None


def test_recomputation_finds_its_version_too() -> None:
    debt, (x, y) = Debt(), inputs(2)
    debt.borrowed.begin("x")
    with torch.no_grad():
        before = debt.head(x)
    debt.receive()
    debt.borrowed.begin("y")
    of_y = debt.head(y)
    debt.borrowed.again("x")
    again = debt.head(x)
    assert torch.equal(again, before)
    again.backward()
    debt.borrowed.end("x")
    of_y.backward()
    debt.borrowed.end("y")
    assert torch.equal(debt.borrowed.gradient, debt.gradient(0, x) + debt.gradient(1, y))
    debt.borrowed.begin("z")
    assert torch.equal(debt.head.inner.bias, debt.values[1][6:])


def test_the_sum_is_repaid_and_starts_again() -> None:
    debt, (x, y) = Debt(), inputs(2)
    arena = Arena(debt.ledger, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    for batch in (x, y):
        debt.borrowed.begin("a")
        debt.head(batch).backward()
        debt.borrowed.end("a")
        sent = debt.borrowed.repay(arena)
        assert torch.equal(sent, debt.gradient(0, batch))
        assert not debt.borrowed.gradient.any()
        arena.give(sent)


def test_sums_of_16_bit_gradients_are_fp32() -> None:
    debt, batches = Debt(torch.bfloat16), inputs(5, torch.bfloat16)
    for batch in batches:
        debt.borrowed.begin("a")
        debt.head(batch).backward()
        debt.borrowed.end("a")
    assert debt.borrowed.gradient.dtype == torch.float32
    expected = sum(debt.gradient(0, batch).float() for batch in batches)
    assert torch.equal(debt.borrowed.gradient, expected)


def buffers(debt: Debt) -> int:
    return debt.ledger.account(Category.PARAMETERS).current // 32


def test_buffers_are_used_again() -> None:
    debt, (x,) = Debt(), inputs(1)
    for _ in range(4):
        debt.receive()
        debt.borrowed.begin("x")
        debt.head(x).backward()
        debt.borrowed.end("x")
    assert buffers(debt) == 2
    for key in "ab":
        debt.borrowed.begin(key)
        debt.receive()
    assert buffers(debt) == 3
    for key in "ab":
        debt.borrowed.end(key)
    for _ in range(3):
        debt.receive()
    assert buffers(debt) == 3


def test_a_version_may_take_the_place_of_the_current_one_when_nothing_is_in_flight() -> None:
    debt, (x,) = Debt(), inputs(1)
    for version in range(1, 4):
        debt.receive(idle=True)
        debt.borrowed.begin(version)
        debt.head(x).backward()
        debt.borrowed.end(version)
        assert torch.equal(debt.borrowed.gradient, sum(debt.gradient(v, x) for v in range(1, version + 1)))
    assert buffers(debt) == 1
    debt.borrowed.begin("in flight")
    loss = debt.head(x)
    debt.borrowed.gradient.zero_()
    debt.receive(idle=True)
    assert buffers(debt) == 2
    loss.backward()
    assert torch.equal(debt.borrowed.gradient, debt.gradient(3, x))


def test_versions_are_taken_in_the_order_in_which_room_was_made() -> None:
    debt = Debt()
    rooms = [debt.borrowed.room(idle=False) for _ in range(2)]
    rooms[1].fill_(2.0)
    rooms[0].fill_(1.0)
    for version in (1, 2):
        debt.borrowed.take()
        assert debt.head.inner.weight.eq(version).all() and debt.head.inner.bias.eq(version).all()


def test_weights_in_use_cannot_be_overwritten_unseen() -> None:
    debt, (x,) = Debt(), inputs(1)
    debt.borrowed.begin("x")
    loss = debt.head(x)
    debt.borrowed.end("x")  # too early
    debt.receive()
    debt.receive()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
