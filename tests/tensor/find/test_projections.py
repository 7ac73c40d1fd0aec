"""Gates beside the heads: which layers are tried, and that gates are split as heads are."""

import pytest
import torch
from tensor.test_structure import HEADS, SIZE, WIDTH, Separate, attend, found_in, shapes
from torch import Tensor, nn

from zeroshard.tensor.find.found import Style
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.find.projections import gate_choices
from zeroshard.tensor.policy import TensorParallel


class Gated(Separate):
    """The output of the heads is multiplied by a gate for each feature, or for each head."""

    def __init__(self, per_head: bool = False) -> None:
        super().__init__(kv_heads=2)
        self.opening = nn.Linear(WIDTH, HEADS if per_head else HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.wq, self.wk, self.wv))
        gate = self.opening(x).sigmoid().unflatten(-1, (self.n_head, -1))
        output: Tensor = self.wo((attend(q, k, v).unflatten(-1, (-1, SIZE)) * gate).flatten(2))
        return output


class GatedWithin(Separate):
    """One layer makes queries and their gates, for each head or one after the other."""

    def __init__(self, behind: bool = False) -> None:
        super().__init__()
        self.wq, self.behind = nn.Linear(WIDTH, 2 * HEADS * SIZE), behind

    def forward(self, x: Tensor) -> Tensor:
        made = self.wq(x)
        if self.behind:
            q, gate = (each.unflatten(-1, (-1, SIZE)) for each in made.chunk(2, -1))
        else:
            q, gate = made.unflatten(-1, (-1, 2 * SIZE)).chunk(2, -1)
        k, v = (layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.wk, self.wv))
        output: Tensor = self.wo(attend(q, k, v) * gate.flatten(2).sigmoid())
        return output


class GatedByAll(Separate):
    """A gate for each head that depends on the output of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = nn.Linear(HEADS * SIZE, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.wq, self.wk, self.wv))
        mixed = attend(q, k, v)
        gate = self.opening(mixed).sigmoid().unsqueeze(-1)
        output: Tensor = self.wo((mixed.unflatten(-1, (-1, SIZE)) * gate).flatten(2))
        return output


def test_no_gate_then_all_then_each_alone() -> None:
    module = Gated()
    module.other = nn.Linear(WIDTH, HEADS)
    module.odd = nn.Linear(WIDTH, HEADS + 1)
    layers = [f"a.{name}" for name in ("wq", "wk", "wv", "wo")]
    choices = list(gate_choices({"a": module}, "a", layers, HEADS, []))
    assert choices == [(), ("a.opening", "a.other"), ("a.opening",), ("a.other",)]
    assert list(gate_choices({"a": module}, "a", layers, HEADS, ["a.other"])) == [("a.other",)]


@pytest.mark.parametrize("per_head", [False, True])
def test_a_gate_of_any_name_is_split_by_heads(per_head: bool) -> None:
    _, layers = found_in(nn.Sequential(Gated(per_head)))
    assert shapes(layers["*.opening"]) == ("column", [(HEADS if per_head else HEADS * SIZE, 2)])
    assert shapes(layers["*.wq"]) == ("column", [(HEADS * SIZE, 2)])
    assert set(layers["*.wo"].columns) == {f"0.{name}" for name in ("wq", "wk", "wv", "opening")}
    assert "of what is made for each beside; found by its shape" in layers["*.opening"].reason


@pytest.mark.parametrize("behind", [False, True])
def test_gates_that_the_layer_of_queries_makes(behind: bool) -> None:
    _, layers = found_in(nn.Sequential(GatedWithin(behind)))
    features = HEADS * SIZE
    assert shapes(layers["*.wq"]) == ("column", [(features, 2)] * 2 if behind else [(2 * features, 2)])


def test_gated_queries_of_key_heads_that_several_ranks_hold() -> None:
    module = GatedWithin()
    module.wk, module.wv = (nn.Linear(WIDTH, 2 * SIZE, bias=False) for _ in range(2))
    _, layers = found_in(nn.Sequential(module), 4)
    assert shapes(layers["*.wq"]) == ("column", [(2 * HEADS * SIZE, 4)])
    assert shapes(layers["*.wk"]) == ("column", [(2 * SIZE, 2)])


def test_a_gate_that_reads_all_heads_leaves_them_whole() -> None:
    _, layers = found_in(nn.Sequential(GatedByAll()))
    assert all(layer.style is Style.WHOLE for layer in layers.values())
    assert "attention of GatedByAll: its forward" in layers["*.wq"].reason


def test_a_gate_that_the_user_names_whole_keeps_the_heads_whole() -> None:
    torch.manual_seed(0)
    found = find(nn.Sequential(Gated()), 2, TensorParallel(2, layers={"0.opening": "whole"}))
    assert {layer.name: layer.style for layer in found.layers}["0.wq"] is Style.WHOLE
