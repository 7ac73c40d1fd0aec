"""Experts of transformers' models: found by structure, and computed by forwards that get a routing."""

from typing import Any

import pytest
from torch import Tensor

from zeroshard.moe.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.families import FoundExperts, find_experts
from zeroshard.moe.routing import Routing

pytest.importorskip("transformers")
from moe.families import FAMILIES, seeded, words

MIXTURES = {
    "mixtral": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "qwen3_moe": ["model.layers.1.mlp.experts"],
    "deepseek_v3": ["model.layers.1.mlp.experts"],
    "gpt_oss": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "olmoe": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    "switch_transformers": [
        "encoder.block.1.layer.1.mlp.experts",
        "decoder.block.1.layer.2.mlp.experts",
    ],
}
STACKED = {
    "gpt_oss": ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
    "switch_transformers": (),
}


def route(found: FoundExperts) -> Any:
    """A forward that does what ranks which exchange rows do, on all experts at once."""

    def forward(x: Tensor, routing: Routing) -> Tensor:
        order = order_of(routing, found.experts)
        rows = found.compute(gather_rows(x, order), order.counts, gather_gates(routing.gates, order))
        return combine(rows, order)

    return forward


def results(model: Any, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of every parameter; zeros for none."""
    model.zero_grad()
    loss = model(**words(step)).loss
    loss.backward()
    gradients = {name: p.new_zeros(p.shape) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.detach(), gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_found_by_structure(family: str) -> None:
    model = seeded(family)
    found = find_experts(model)
    assert [each.path for each in found] == MIXTURES[family]
    for each in found:
        assert each.experts == 4
        assert each.stacked == STACKED.get(family, ("gate_up_proj", "down_proj"))
        assert len(each.modules) == (0 if each.stacked else 4)


@pytest.mark.parametrize("eager", [False, True], ids=["grouped", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_routed_forward_equals_the_modules_own(family: str, eager: bool) -> None:
    model = seeded(family)
    if eager and family != "switch_transformers":
        model.set_experts_implementation("eager")
    state, kind = {name: value.clone() for name, value in model.state_dict().items()}, type(model)
    expected = results(model, 0)
    for found in find_experts(model):
        found.count()
        found.install(route(found))
    loss, gradients = results(model, 0)
    assert abs(loss - expected[0]) <= 1e-6 * expected[0].abs()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().clamp(min=1e-2)
        assert (gradients[name] - gradient).abs().max() <= 1e-6 * scale, name
    assert type(model) is kind and list(model.state_dict()) == list(state)
