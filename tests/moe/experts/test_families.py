"""Experts of transformers' models: found by structure, and computed by forwards that get a routing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError, PlanError
from zeroshard.moe.exchange.technique import ExpertTechnique
from zeroshard.moe.experts import experts
from zeroshard.moe.experts.families import find_experts, unknown_mixtures
from zeroshard.moe.layer import MoE
from zeroshard.moe.policy import ExpertParallel
from zeroshard.parts.axes import Axis
from zeroshard.platform.accelerator import as_on_devices

pytest.importorskip("transformers")
from moe.families import FAMILIES, UNKNOWN, route, routed, seeded, words

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


class Counted(nn.Module):
    """A mixture of an unknown kind, which knows how many experts it has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.ones(4, 2))


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
    compare(model)
    assert type(model) is kind and list(model.state_dict()) == list(state)


def without_gradients(model: Any) -> list[str]:
    """Names of parameters to which the last backward did not come, or with None."""
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def compare(model: Any, step: int = 0) -> None:
    """The model's results before and after its experts get routed forwards."""
    expected, missing = results(model, step), without_gradients(model)
    loss, gradients = results(routed(model), step)
    assert abs(loss - expected[0]) <= 1e-6 * expected[0].abs()
    largest = max(gradient.abs().max() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert (gradients[name] - gradient).abs().max() <= 5e-6 * largest, name
    assert without_gradients(model) == missing


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_without_tokens_get_zeros_or_none_as_in_the_own_forward(family: str) -> None:
    model = seeded(family, experts=64)
    for found in find_experts(model):
        found.count()
    compare(model)
    assert all(int((found.count().load == 0).sum()) > 5 for found in find_experts(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_may_choose_the_same_experts(family: str) -> None:
    model = seeded(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.classifier.weight")):
                parameter.zero_()
    compare(model)


def test_choices_beyond_the_capacity_are_left_out_as_in_switch_transformers() -> None:
    model = seeded("switch_transformers", expert_capacity=1)
    statistics = [found.count() for found in find_experts(model)]
    compare(model)
    assert all(int(each.choices) < int(each.tokens) for each in statistics)


class Polynomials(nn.Module):
    """Stacked experts that no interface describes."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.factors = nn.Parameter(torch.randn(experts, 3, 8))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum over choices of the values of polynomials."""
        assert len(self.factors) == self.num_experts
        powers = torch.stack([hidden_states**power for power in range(3)], 1)
        return (self.factors[top_k_index] * powers[:, None]).sum(2).mul(top_k_weights[..., None]).sum(1)


def test_other_stacked_experts_compute_by_their_own_forward() -> None:
    torch.manual_seed(0)
    module = Polynomials(4)
    (found,) = find_experts(nn.Sequential(module))
    assert (found.path, found.experts, found.stacked) == ("0", 4, ("factors",))
    x, chosen, weights = torch.randn(6, 8), torch.randint(4, (6, 2)), torch.rand(6, 2)
    expected = module(x, chosen, weights)
    found.install(route(found))
    assert torch.allclose(module(x, top_k_weights=weights, top_k_index=chosen), expected, atol=1e-6)
    gates = torch.ones(0, requires_grad=True)
    found.compute(x[:0], (0, 0, 0, 0), gates).sum().backward()
    assert module.factors.grad is not None and not module.factors.grad.any()
    assert gates.grad is not None  # for which other ranks wait


class Limited(nn.Module):
    """Experts of transformers' interface with a limit on what the activation gets, as some families have."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = 2, torch.relu
        self.has_gate, self.has_bias, self.is_transposed = True, False, False
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(2, 6, 4)), nn.Parameter(torch.randn(2, 4, 3))

    def _apply_gate(self, made: Tensor) -> Tensor:
        gate, up = made.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=10)) * up.clamp(-10, 10)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Of one choice for each token."""
        up, down = self.gate_up_proj[top_k_index[:, 0]], self.down_proj[top_k_index[:, 0]]
        hidden = self._apply_gate(torch.einsum("tmd,td->tm", up, hidden_states))
        return torch.einsum("tdf,tf->td", down, hidden) * top_k_weights


def test_limits_of_activations_are_kept() -> None:
    module = Limited()
    (found,) = find_experts(nn.Sequential(module))
    rows = 100 * torch.randn(5, 4)
    expected = module(rows, torch.tensor([[0], [0], [1], [1], [1]]), torch.ones(5, 1))
    torch.testing.assert_close(found.compute(rows, (2, 3), None), expected)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_in_bf16_accelerators_compute_all_experts_in_one_product(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    grouped = experts.grouped_rows
    monkeypatch.setattr(experts, "grouped_rows", lambda rows, *given: called.append(len(rows)) or grouped(rows, *given))
    found = find_experts(seeded(family).to(torch.bfloat16))[0]
    rows, gates, counts = torch.randn(9, 16).bfloat16(), torch.rand(9), (5, 0, 3, 1)
    one_at_a_time = found.compute(rows, counts, gates)
    assert not called
    with as_on_devices():
        at_once = found.compute(rows, counts, gates)
    assert called == [9]
    torch.testing.assert_close(at_once, one_at_a_time, rtol=0.05, atol=0.02)


def test_modules_that_hold_part_of_the_experts_compute_these() -> None:
    torch.manual_seed(0)
    model = seeded("gpt_oss")
    found = find_experts(model)[0]
    rows = torch.randn(7, 16)
    whole = found.compute(rows, (2, 0, 4, 1), None)
    for name in found.stacked:
        found.module._parameters[name] = nn.Parameter(getattr(found.module, name)[2:].detach())
    assert torch.equal(found.compute(rows[2:], (4, 1), None), whole[2:])
    module = Polynomials(4)
    (other,) = find_experts(nn.Sequential(module))
    whole = other.compute(rows[:, :8], (2, 0, 4, 1), None)
    module.factors = nn.Parameter(module.factors[2:].detach())
    assert torch.equal(other.compute(rows[2:, :8], (4, 1), None), whole[2:])
    assert module.num_experts == 4


def test_choices_of_experts_that_are_not_there_are_refused() -> None:
    module = Polynomials(4)
    (found,) = find_experts(nn.Sequential(module))
    found.install(route(found))
    with pytest.raises(ModelError, match="chose expert 4, and experts 0 to 3 are there"):
        module(torch.randn(2, 8), torch.tensor([[4], [0]]), torch.ones(2, 1))


def test_models_without_experts_have_none() -> None:
    assert find_experts(nn.Sequential(nn.Linear(2, 2))) == ()


def test_own_experts_are_found_too() -> None:
    layer = MoE(8, 16, 4, router="gshard")
    modules = MoE(8, 16, 4, router="gshard", expert=lambda: nn.Linear(8, 8))
    found = find_experts(nn.Sequential(layer, modules))
    assert [each.path for each in found] == ["0.experts", "1.experts"]
    assert set(found[0].stacked) == {"up", "down"} and not found[0].modules
    assert len(found[1].modules) == 4 and not found[1].stacked
    assert found[0].count() is layer.experts.statistics


@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_of_an_unknown_structure_are_not_called_none(name: str) -> None:
    made, named = UNKNOWN[name]
    axis = Axis("experts", ((0, 1),), None)  # type: ignore[arg-type]  # no message is sent before the check
    with pytest.raises(PlanError, match=r"Leave expert_parallel out; zero=3") as raised:
        ExpertTechnique(ExpertParallel(2)).cut(made(), {"experts": axis})
    assert f"that of {named}" in str(raised.value) and "is not known" in str(raised.value)


def test_a_mixture_may_show_by_its_number_of_experts_alone() -> None:
    assert unknown_mixtures(nn.Sequential(nn.Linear(2, 2))) == []
    assert not find_experts(nn.Sequential(Counted())) and unknown_mixtures(nn.Sequential(Counted())) == [
        "'0' (Counted)"
    ]
