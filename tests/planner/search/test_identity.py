"""The identity of a task: equal for equal content in any order of calls, and another after each change."""

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.planner.search.identity import identity_of

FACTOR = 2.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return FACTOR * x


class Net(nn.Module):
    """A layer, an attribute, a function, and a tie."""

    power = 2

    def __init__(self, width: int = 4, scale: float = 1.0, act: Callable[..., Any] = torch.relu) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.scale, self.act, self.names = scale, act, {"a": [1, 2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(scaled(self.second(self.first(x)))) ** self.power


def tied() -> Net:
    net = Net()
    net.second.weight = net.first.weight
    return net


def frozen() -> Net:
    net = Net()
    net.first.weight.requires_grad_(False)
    return net


def hooked() -> Net:
    net = Net()
    net.first.register_forward_hook(lambda module, given, made: made)
    return net


def other_names() -> Net:
    net = Net()
    net.names["a"].append(3)
    return net


def test_equal_content_has_one_identity_whatever_its_values() -> None:
    first, second = Net(), Net()
    assert not torch.equal(first.first.weight, second.first.weight)
    assert identity_of(first, partial(torch.optim.SGD, lr=0.1)) == identity_of(second, partial(torch.optim.SGD, lr=0.1))
    assert identity_of(torch.optim.AdamW(first.parameters())) == identity_of(torch.optim.AdamW(second.parameters()))


OTHERS: dict[str, Callable[[], Any]] = {
    "width": lambda: Net(8),
    "attribute": lambda: Net(scale=2.0),
    "function": lambda: Net(act=torch.tanh),
    "tie": tied,
    "frozen": frozen,
    "hook": hooked,
    "inside": other_names,
    "dtype": lambda: Net().bfloat16(),
    "mode": lambda: Net().eval(),
    "partial": lambda: Net(act=partial(torch.pow, exponent=2)),
    "closure of 2": lambda: Net(act=(lambda n: lambda x: x * n)(2)),
    "closure of 3": lambda: Net(act=(lambda n: lambda x: x * n)(3)),
    "class": lambda: nn.Sequential(Net()),
}


def test_each_change_makes_another_identity() -> None:
    found = [identity_of(Net()), *(identity_of(make()) for make in OTHERS.values())]
    assert "" not in found and len(set(found)) == 1 + len(OTHERS)
    optimizers = [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.2), torch.optim.SGD, torch.optim.Adam]
    assert len({identity_of(Net(), one) for one in optimizers}) == 4
    assert identity_of(Net(), {"x": torch.zeros(2, 4)}) != identity_of(Net(), {"x": torch.zeros(2, 5)})


def test_values_that_code_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of(Net())
    monkeypatch.setitem(globals(), "FACTOR", 3.0)  # named by a function that the forward calls
    assert identity_of(Net()) != before
    monkeypatch.undo()
    monkeypatch.setattr(Net, "power", 3)
    assert identity_of(Net()) != before
    monkeypatch.undo()
    assert identity_of(Net()) == before


class Opaque:
    """Content that has no text."""

    __slots__ = ()


@pytest.mark.parametrize("value", [torch.Generator(), re.compile("a"), iter([1]), Opaque()])
def test_content_without_a_text_has_no_identity(value: Any) -> None:
    assert identity_of(value) == ""


def test_a_changed_file_of_the_user_changes_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_the_test.py").write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = identity_of(Net())
    monkeypatch.setitem(sys.modules, "helper_of_the_test", importlib.import_module("helper_of_the_test"))
    first, same = identity_of(Net()), identity_of(Net())
    (tmp_path / "helper_of_the_test.py").write_text("def f(): return 22\n")
    assert before != first == same != identity_of(Net()) != before


def test_code_without_a_file_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Module):
        """As if typed at a prompt."""

    assert identity_of(Mine())
    monkeypatch.setattr(Mine, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert identity_of(Mine()) == ""
