"""Experts in stacked parameters: their dimensions are found by a trial, and stay whole with a reason otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.tensor.find.explain import explain
from zeroshard.tensor.find.found import FoundLayer, Style
from zeroshard.tensor.find.layers import find
from zeroshard.tensor.policy import TensorParallel

E, D, INNER, ROWS = 4, 10, 6, 8


class Experts(nn.Module):
    """Gated experts; `transposed` and `interleaved` are orders that models have, `mixing` is none."""

    def __init__(self, order: str = "parts", transposed: bool = False, biased: bool = False, width: int = D) -> None:
        super().__init__()
        self.order, self.transposed, self.biased, self.moe_intermediate_size = order, transposed, biased, INNER
        self.first = nn.Parameter(torch.randn(E, *((width, 2 * INNER) if transposed else (2 * INNER, width))))
        self.second = nn.Parameter(torch.randn(E, *((INNER, width) if transposed else (width, INNER))))
        if biased:
            self.first_bias = nn.Parameter(torch.randn(E, 2 * INNER))
            self.second_bias = nn.Parameter(torch.randn(E, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, D], chosen [N, k], weights [N, k] -> [N, D]."""
        total = torch.zeros_like(x)
        for expert in range(E):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            first, second = (w[expert] if self.transposed else w[expert].T for w in (self.first, self.second))
            made = x[rows] @ first
            made = made + self.first_bias[expert] if self.biased else made
            assert made.shape[-1] == 2 * self.moe_intermediate_size
            gate, up = (made[..., ::2], made[..., 1::2]) if self.order == "pairs" else made.chunk(2, -1)
            inner = F.silu(gate) * up
            inner = inner.flip(-1).cumsum(-1) if self.order == "mixing" else inner
            back = inner @ second
            back = back + self.second_bias[expert] if self.biased else back
            total.index_add_(0, rows, back * weights[rows, place, None])
        return total


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, experts: nn.Module, width: int = D) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, E), experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        made: Tensor = self.experts(rows, chosen, weights)
        return x + made.view_as(x)


def experts_of(model: nn.Module, ranks: int = 2, layers: Any = None) -> FoundLayer:
    found = find(model, ranks, TensorParallel(ranks, layers=layers))
    return {layer.name: layer for layer in found.layers}["0.experts"]


def cuts(layer: FoundLayer) -> dict[str, tuple[int, list[int]]]:
    return {cut.name: (cut.dimension, [segment.size for segment in cut.segments]) for cut in layer.cuts}


@pytest.mark.parametrize("order, first", [("parts", [INNER, INNER]), ("pairs", [2 * INNER])])
@pytest.mark.parametrize("transposed", [False, True])
def test_dimensions_and_orders_are_found_by_trial(order: str, first: list[int], transposed: bool) -> None:
    model = nn.Sequential(Mixture(Experts(order, transposed)))
    layer = experts_of(model)
    assert layer.style is Style.EXPERTS and layer.sizes == (("moe_intermediate_size", INNER // 2),)
    assert cuts(layer) == {
        "first": (2 if transposed else 1, first), "second": (1 if transposed else 2, [INNER])
    }  # fmt: skip
    (row,) = (row for row in explain(model, find(model, 2, TensorParallel(2)), 2) if row.name == "0.experts")
    assert (row.style, row.part) == ("experts", "3 of 6")
    assert row.reason.startswith("3 of 6 inner features of each of 4 experts")


def test_a_bias_that_all_ranks_would_add_is_divided() -> None:
    layer = experts_of(nn.Sequential(Mixture(Experts(biased=True))))
    assert cuts(layer)["first_bias"] == (1, [INNER, INNER]) and cuts(layer)["second_bias"] == (0, [])


@pytest.mark.parametrize("width", [INNER, 2 * INNER])
def test_equal_sizes_are_told_apart(width: int) -> None:
    layer = experts_of(nn.Sequential(Mixture(Experts(biased=True, width=width), width)))
    assert cuts(layer)["first"] == (1, [INNER, INNER]) and cuts(layer)["second_bias"] == (0, [])


def test_inner_features_that_depend_on_each_other_stay_whole() -> None:
    layer = experts_of(nn.Sequential(Mixture(Experts("mixing"))))
    assert layer.style is Style.WHOLE and layer.reason.startswith("experts: their outputs of all ranks do not add up")


def test_ranks_that_do_not_divide_the_inner_features_leave_them_whole() -> None:
    layer = experts_of(
        nn.Sequential(Mixture(Experts()), nn.Sequential(nn.Linear(D, 20), nn.ReLU(), nn.Linear(20, D))), 4
    )
    assert layer.style is Style.WHOLE and layer.reason == "experts: 4 ranks do not divide 6 inner features"


def test_the_user_names_them_whole() -> None:
    model = nn.Sequential(Mixture(Experts()), nn.Sequential(nn.Linear(D, 20), nn.ReLU(), nn.Linear(20, D)))
    assert experts_of(model, layers={"0.experts": "whole"}).style is Style.WHOLE
