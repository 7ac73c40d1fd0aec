"""Weight versions: what a forward used stays until its backward, and no buffer more than needed is made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroshard.memory.ledger import Category, Ledger
from zeroshard.pipeline.run.weight_stashing import StashedVersions
from zeroshard.units import Flat, find_units


class Model(nn.Module):
    """Gradients depend on the weights; `last` is tied to `first.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).square())
        return y.square().sum()


class Stash:
    """The versions of a model's weights, gradients as they arrive, and a plain model with each version."""

    def __init__(self, ranks: int = 1) -> None:
        self.model, self.ledger = Model(), Ledger()
        self.arrived: list[tuple[str, Tensor]] = []
        unit = find_units(self.model, ())[0]
        flat = Flat(unit, unit.parameters, torch.float32, trainable=True, ranks=ranks)
        self.names = list(unit.parameters)
        buffer = torch.zeros(flat.index.padded_numel)
        for n, parameter in enumerate(flat.parameters):
            flat.view(buffer, n).copy_(parameter.detach())
        flat.bind(buffer)
        flat.attach()
        self.flat, self.buffer, self.made = flat, buffer, 0
        self.listen(flat.parameters)
        first, last = self.model.first, self.model.last
        sites: list[list[tuple[nn.Module, str]]] = [[(first, "weight"), (last, "weight")], [(first, "bias")]]
        self.versions = StashedVersions(flat, buffer, sites, self.ledger, self.listen)
        self.values: dict[int, dict[str, Tensor]] = {0: self.snapshot()}

    def listen(self, parameters: Any) -> None:
        self.made += 1
        for name, parameter in zip(self.names, parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.arrive(name, p))

    def arrive(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.arrived.append((name, parameter.grad))
        parameter.grad = None

    def snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def update(self) -> Tensor:
        """What an optimizer does: it writes into the buffer of the next version."""
        buffer = self.versions.advance()
        buffer.mul_(0.5).add_(0.1)
        self.versions.use(self.versions.latest)
        self.values[self.versions.latest] = self.snapshot()
        return buffer

    def forward(self, version: int, x: Tensor) -> Tensor:
        self.versions.use(version)
        loss: Tensor = self.model(x)
        return loss

    def check_backward(self, loss: Tensor, version: int, x: Tensor) -> None:
        """The gradients that arrive are those of a plain model with that version."""
        plain = Model()
        plain.load_state_dict(self.values[version] | {"last.weight": self.values[version]["first.weight"]})
        expected = plain(x)
        assert torch.equal(loss, expected)
        expected.backward()
        self.arrived.clear()
        loss.backward()
        wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert sorted(name for name, _ in self.arrived) == sorted(wanted)
        for name, gradient in self.arrived:
            assert torch.equal(gradient, wanted[name])  # type: ignore[arg-type]


def inputs(n: int) -> list[Tensor]:
    return [torch.randn(2, 3) for _ in range(n)]


def test_a_backward_finds_the_weights_of_its_forward() -> None:
    stash, (x, y, z) = Stash(), inputs(3)
    zero = stash.forward(0, x)
    stash.update()
    one = stash.forward(1, y)
    stash.update()
    two = stash.forward(2, z)
    assert stash.versions.live == [0, 1, 2]
    assert not torch.equal(stash.values[0]["first.bias"], stash.values[1]["first.bias"])
    stash.check_backward(zero, 0, x)
    stash.versions.drop(0)
    stash.check_backward(two, 2, z)
    stash.check_backward(one, 1, y)


def test_an_older_version_computes_again_as_it_did() -> None:
    stash, (x,) = Stash(), inputs(1)
    stash.update()
    stash.update()
    for version in (0, 2, 1):
        stash.check_backward(stash.forward(version, x), version, x)


def test_slots_are_used_again() -> None:
    stash, (x,) = Stash(ranks=2), inputs(1)
    for step in range(1, 6):
        stash.update()
        if step > 1:
            stash.versions.drop(step - 2)
    assert stash.versions.live == [4, 5]
    assert stash.made == 3  # the first, and two more
    account = stash.ledger.account(Category.PARAMETERS)
    assert account.current == 2 * 12 * 4
    for version in (4, 5):
        stash.check_backward(stash.forward(version, x), version, x)


def test_the_latest_is_updated_in_place_when_nobody_needs_it() -> None:
    stash, (x,) = Stash(), inputs(1)
    for _ in range(3):
        loss = stash.forward(stash.versions.latest, x)
        stash.check_backward(loss, stash.versions.latest, x)
        stash.versions.drop(stash.versions.latest)
        assert stash.versions.live == [stash.versions.latest]
        assert stash.update() is stash.buffer
    assert (stash.made, stash.versions.latest) == (1, 3)
    assert stash.ledger.total() == 0
    assert stash.update() is not stash.buffer  # version 3 was not dropped
    assert stash.versions.live == [3, 4]
    stash.check_backward(stash.forward(3, x), 3, x)


def test_both_sites_of_a_tied_weight_change_together() -> None:
    stash = Stash()
    stash.update()
    assert stash.model.first.weight is stash.model.last.weight
    stash.versions.use(0)
    assert stash.model.first.weight is stash.model.last.weight
    assert torch.equal(stash.model.last.weight, stash.values[0]["first.weight"])


def test_the_flat_follows_the_newest_version() -> None:
    stash = Stash()
    buffer = stash.update()
    assert [p.data_ptr() for p in stash.flat.parameters] == [buffer[:9].data_ptr(), buffer[9:].data_ptr()]
    assert stash.model.first.bias is stash.flat.parameters[1]


def test_padding_is_entered_as_such() -> None:
    stash = Stash(ranks=5)
    stash.update()
    account = stash.ledger.account(Category.PARAMETERS)
    assert (account.current, account.padding) == (15 * 4, 3 * 4)


def test_restart_calls_the_latest_version_0() -> None:
    stash, (x,) = Stash(), inputs(1)
    stash.update()
    stash.update()
    stash.versions.restart()
    assert (stash.versions.latest, stash.versions.live) == (0, [0])
    stash.values = {0: stash.values[2]}
    stash.check_backward(stash.forward(0, x), 0, x)
    stash.update()
    assert stash.versions.live == [0, 1]
    assert stash.made == 3  # slots of before are used again


def test_weights_in_use_cannot_be_overwritten_unseen() -> None:
    """A version that is dropped too early is found out by autograd."""
    stash, (x,) = Stash(), inputs(1)
    stash.update()
    loss = stash.forward(1, x)
    stash.versions.drop(1)
    stash.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
