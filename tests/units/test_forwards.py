"""Layers of a module's forward: in one order, by name, composed once, and removed without a trace."""

import copy
import itertools
import pickle
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroshard.units.forwards import Forward, Make, insert, inside, instead, layer_of, layers_of, remove, replaced


class Says(nn.Module):
    """Its forward adds a word."""

    def forward(self, words: str) -> str:
        return f"{words} own"


def saying(word: str) -> Make:
    """A layer that adds a word before the forward inside of it."""
    return lambda inner: lambda words: inner(f"{words} {word}")


NAMES = ("gate", "segment", "divided", "deferred")


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_layers_run_in_one_order_whatever_the_order_of_insertion(order: tuple[str, ...]) -> None:
    module = Says()
    for name in order:
        insert(module, name, saying(name))
    assert layers_of(module) == (*NAMES, "own")
    assert module("x") == "x gate segment divided deferred own"
    assert inside(module, "segment")("x") == "x divided deferred own"
    assert inside(module, "exchanged")("x") == "x divided deferred own"
    assert layer_of(module, "divided")("x") == "x divided deferred own" and layer_of(module, "loss") is None


def test_a_layer_of_a_name_that_is_there_goes_around_it() -> None:
    module = Says()
    for word in ("first", "second"):
        insert(module, "divided", saying(word))
    assert module("x") == "x second first own" and layers_of(module) == ("divided", "divided", "own")


@pytest.mark.parametrize("user", [False, True])
def test_removal_restores_the_module_exactly(user: bool) -> None:
    module = Says()
    if user:
        module.forward = lambda words: f"{words} user"  # type: ignore[method-assign]
    before = dict(vars(module))
    layers = [insert(module, name, saying(name)) for name in NAMES]
    for layer in (layers[1], layers[3], layers[0]):
        remove(module, layer)
    assert module("x") == ("x divided user" if user else "x divided own")
    remove(module, layers[2])
    assert vars(module) == before and layers_of(module) == (("user",) if user else ("own",))
    with pytest.raises(ValueError, match="Says has no layer 'divided' to remove"):
        remove(module, layers[2])


def test_forwards_that_the_user_sets_stay_where_they_were_set() -> None:
    """As by accelerate's hooks, before an engine and after it; later insertions are around them."""
    module = Says()
    before = module.forward
    module.forward = lambda words: before(f"{words} before")  # type: ignore[method-assign]
    gate = insert(module, "gate", saying("gate"))
    old = module.forward
    module.forward = lambda words: old(f"{words} after")  # type: ignore[method-assign]
    assert layers_of(module) == ("user", "gate", "user") and module("x") == "x after gate before own"
    with pytest.raises(ValueError, match="no layer 'gate' to remove"):
        remove(module, gate)
    later = insert(module, "divided", saying("divided"))
    assert layers_of(module) == ("divided", "user", "gate", "user")
    assert module("x") == "x divided after gate before own"
    remove(module, later)
    assert layers_of(module) == ("user", "gate", "user") and module("x") == "x after gate before own"
    module.forward = old  # type: ignore[method-assign]
    remove(module, gate)
    assert module("x") == "x before own" and layers_of(module) == ("user",)


def test_copies_have_no_layers_of_their_own() -> None:
    """A shallow one, as of trials; a deep one, whose forward says itself what it is there; one that was pickled."""
    module = nn.Linear(2, 2)
    insert(module, "divided", partial(Doubled, module))
    x = torch.ones(1, 2)
    shallow: Any = nn.Linear.__new__(nn.Linear)
    vars(shallow).update(vars(module))
    assert layers_of(shallow) == ("user",)
    insert(shallow, "gate", lambda inner: lambda x: inner(x) + 1)
    assert layers_of(module) == ("divided", "own") and torch.equal(shallow(x), module(x) + 1)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert layers_of(copied) == ("user",) and torch.equal(copied(x) * 2, module(x))
        insert(copied, "divided", lambda inner: lambda x: 3 * inner(x))
        assert layers_of(copied) == ("divided", "user") and torch.equal(copied(x) * 2, 3 * module(x))


class Doubled:
    """A layer that a copy of its module leaves out."""

    def __init__(self, module: nn.Linear, inner: Forward) -> None:
        self.module, self.inner = module, inner

    def __call__(self, x: Tensor) -> Any:
        return 2 * self.inner(x)

    def __reduce__(self) -> tuple[Any, ...]:
        return own_forward, (self.module,)


def own_forward(layer: nn.Linear) -> MethodType:
    return MethodType(nn.Linear.forward, layer)


def test_a_call_runs_the_layers_and_nothing_else() -> None:
    module, called = Says(), list[str]()

    def layer(name: str, inner: Forward) -> Forward:
        called.append(f"make {name}")
        return inner

    insert(module, "gate", partial(layer, "gate"))
    insert(module, "divided", partial(layer, "divided"))
    assert called == ["make gate", "make divided", "make gate"]
    assert module("x") == "x own" and len(called) == 3
    assert module.forward == MethodType(Says.forward, module)


def test_the_forward_of_the_class_counts_as_not_replaced() -> None:
    module = Says()
    assert replaced(module, module.forward) is None
    user = partial(Says.forward, module)
    assert replaced(module, user) is user
    insert(module, "deferred", saying("deferred"))
    assert replaced(module, inside(module, "divided")) is module.forward
    assert replaced(module, inside(module, "deferred")) is None


def test_another_forward_for_a_while() -> None:
    module = Says()
    with instead(module, lambda words: "other"):
        assert module("x") == "other"
    assert "forward" not in vars(module)
    insert(module, "gate", saying("gate"))
    with instead(module, inside(module, "gate")):
        assert module("x") == "x own"
    assert module("x") == "x gate own" and layers_of(module) == ("gate", "own")
