"""The backward in two parts gives what the backward in one gives."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.models import Plain, batch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.pipeline.run import deferred
from zeroshard.pipeline.run.deferred import Deferral
from zeroshard.step.context import WeightGradients
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

Loss = Callable[[], Tensor]


def in_two(deferral: Deferral, forward: Loss) -> WeightGradients:
    """Forward, and the first part of the backward."""
    store = WeightGradients()
    with deferral.into(store):
        assert deferral.store is store
        loss = forward()
    assert deferral.store is None
    loss.backward()
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 3, 4, 7), (7,), (0, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_a_linear_layer_bit_by_bit(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool, input_needs_gradient: bool
) -> None:
    plain = nn.Linear(7, 4, bias=bias, dtype=dtype)
    layer = copy.deepcopy(plain)
    deferral = Deferral(layer)
    x = torch.randn(shape, dtype=dtype)
    one, two = (x.clone().requires_grad_(input_needs_gradient) for _ in range(2))
    weights = torch.randn(*shape[:-1], 4, dtype=dtype)
    expected = (plain(one).tanh() * weights).sum()
    expected.backward()
    store = in_two(deferral, lambda: (layer(two).tanh() * weights).sum())
    assert layer.weight.grad is None
    if bias:
        assert torch.equal(layer.bias.grad, plain.bias.grad)  # type: ignore[arg-type]
    if input_needs_gradient:
        assert torch.equal(two.grad, one.grad)  # type: ignore[arg-type]
    store.compute()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == dtype
    assert torch.equal(layer.weight.grad, plain.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("later", [True, False])
def test_a_layer_that_a_technique_uses_for_its_part(later: bool) -> None:
    """Without its bias; and with gradients to which other ranks add theirs, here as many again."""
    layer, x = nn.Linear(7, 4), torch.randn(3, 5, 7)
    plain = copy.deepcopy(layer)
    deferral, said = Deferral(layer), list[tuple[tuple[int, ...], int]]()
    forward: Any = layer.forward
    assert torch.equal(forward(x, biased=False), F.linear(x, plain.weight))

    def twice(gradient: Tensor, dimension: int) -> Tensor:
        assert not gradient.requires_grad
        said.append((tuple(gradient.shape), dimension))
        return gradient + gradient

    plain(x).square().sum().backward()
    store = in_two(deferral, lambda: forward(x.requires_grad_(), sums=twice if later else None).square().sum())
    store.compute()
    assert said == ([((4,), 0), ((4, 7), 0)] if later else [])
    for mine, alone in zip(layer.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and alone.grad is not None
        assert torch.equal(mine.grad, 2 * alone.grad if later else alone.grad)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def language() -> tuple[Tensor, Tensor]:
    return torch.randint(19, (3, 6)), torch.randint(19, (3, 6))


def test_a_whole_model_over_several_microbatches() -> None:
    """The head is tied to the embedding, whose own gradient comes at once: two uses of one weight."""
    torch.manual_seed(3)
    plain = GPT(GPTConfig(vocabulary=19, context=6, width=8, heads=2, layers=2))
    model = copy.deepcopy(plain)
    deferral = Deferral(model)
    batches = [language() for _ in range(3)]
    stores = []
    for tokens, targets in batches:
        plain(tokens, targets).backward()
        stores.append(in_two(deferral, lambda tokens=tokens, targets=targets: model(tokens, targets)))  # type: ignore[misc]
    at_once = gradients(model)
    linear = {name for name in at_once if "attention." in name or "mlp." in name}
    assert len(linear) == 8
    assert {name for name, gradient in at_once.items() if gradient is None} == linear
    for store in stores:
        store.compute()
    after, expected = gradients(model), gradients(plain)
    tied = "embedding.weight"
    torch.testing.assert_close(after.pop(tied), expected.pop(tied))  # summed in another order
    assert same(after, expected)


class Shared(nn.Module):
    """One layer used twice, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(torch.tanh(self.one(torch.tanh(self.one(x)))))
        return y.square().sum()


def test_a_weight_used_more_than_once() -> None:
    plain = Shared()
    model = copy.deepcopy(plain)
    deferral = Deferral(model)
    for _ in range(2):
        x = torch.randn(5, 4)
        plain(x).backward()
        in_two(deferral, lambda x=x: model(x)).compute()  # type: ignore[misc]
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, gradients(plain)[name])


def test_gradients_arrive_at_hooks_and_a_store_is_empty_afterwards() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    deferral, arrived = Deferral(model), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: arrived.append(name))
    store = in_two(deferral, lambda: model(torch.randn(2, 3)).sum())
    assert arrived == ["2.bias", "0.bias"]
    store.compute()
    assert arrived == ["2.bias", "0.bias", "2.weight", "0.weight"]
    before = gradients(model)
    store.compute()
    assert same(gradients(model), before)


def test_stores_are_computed_in_any_order_and_apart() -> None:
    model, x, y = nn.Linear(3, 2, bias=False), torch.randn(2, 3), torch.randn(2, 3)
    deferral = Deferral(model)
    first, second = in_two(deferral, lambda: model(x).sum()), in_two(deferral, lambda: model(y).sum())
    second.compute()
    assert torch.equal(model.weight.grad, y.sum(0).expand(2, 3))  # type: ignore[arg-type]
    model.weight.grad = None
    first.compute()
    assert torch.equal(model.weight.grad, x.sum(0).expand(2, 3))  # type: ignore[arg-type]


def test_without_a_store_everything_is_as_before() -> None:
    model, plain = Plain(), Plain()
    model.load_state_dict(plain.state_dict())
    Deferral(model)
    for either in (model, plain):
        either(batch(0, 0, 1)).backward()
    assert same(gradients(model), gradients(plain))


def test_frozen_weights_and_forwards_without_gradients_leave_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    deferral, store = Deferral(model), WeightGradients()
    with deferral.into(store), torch.no_grad():
        assert not model(torch.randn(2, 3)).requires_grad
    store.compute()
    assert gradients(model) == {"0.bias": None, "1.bias": None, "1.weight": None, "0.weight": None}
    in_two(deferral, lambda: model(torch.randn(2, 3)).sum()).compute()
    assert [name for name, gradient in gradients(model).items() if gradient is None] == ["0.weight"]


def test_a_frozen_bias() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    model.bias.requires_grad_(False)
    in_two(Deferral(model), lambda: model(input=x).sum()).compute()
    assert model.bias.grad is None
    assert torch.equal(model.weight.grad, torch.ones(4, 2).mT @ x)  # type: ignore[arg-type]


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2)


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    model, x = nn.Sequential(Scaled(3, 2, bias=False), nn.Linear(2, 1, bias=False)), torch.randn(4, 3)
    with pytest.warns(UserWarning, match="first is '0', a Scaled"):
        deferral = Deferral(model)
    store = in_two(deferral, lambda: model(x).sum())
    at_once = gradients(model)
    assert at_once["0.weight"] is not None and at_once["1.weight"] is None
    store.compute()
    assert gradients(model)["1.weight"] is not None


def test_a_store_closes_even_when_the_forward_fails() -> None:
    model = nn.Linear(3, 2)
    deferral = Deferral(model)
    with pytest.raises(RuntimeError), deferral.into(WeightGradients()):
        model(torch.randn(2, 5))
    assert deferral.store is None


class Twice(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_matrices_that_are_not_deferred_are_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3), Twice(4, 4))
    with pytest.warns(UserWarning, match=r"80% .*the first is '1', a Conv1d"):
        Deferral(model)


def test_a_technique_may_defer_layers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(module: Twice, _: Any) -> Any:
        plain = deferred.DEFERS[nn.Linear](module, lambda x: nn.functional.linear(x, module.weight, module.bias))
        return lambda x: 2 * plain(x)

    monkeypatch.setitem(deferred.DEFERS, Twice, doubled)
    torch.manual_seed(0)
    layer, x = Twice(3, 2), torch.randn(5, 3)
    wanted = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deferral = Deferral(layer)
    store = in_two(deferral, lambda: layer(x).sum())
    assert layer.weight.grad is None
    store.compute()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, wanted)
