"""Dtypes of computation and the casts at the borders of modules that stay in fp32."""

import pytest
import torch
from engine.models import Plain
from torch import Tensor, nn

from zeroshard.errors import PlanError
from zeroshard.precision.cast import Precision, keep_in_fp32

BF16 = Precision.named("bf16")


class Seen(nn.Module):
    """Remembers the dtypes that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, *, bias: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.dtypes = [x.dtype, bias.dtype, index.dtype]
        return {"y": x * self.weight + bias, "index": index}


def as_computed(model: nn.Module, kept: set[nn.Parameter]) -> nn.Module:
    """The model with every parameter in the dtype in which it computes under bf16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16.dtype_of(parameter, parameter in kept))
    return model


def test_named() -> None:
    assert [Precision.named(name).compute for name in ("fp32", "bf16", "fp16")] == [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "precision, own, stays, expected",
    [
        ("fp32", torch.float64, False, torch.float64),
        ("fp32", torch.bfloat16, False, torch.bfloat16),
        ("bf16", torch.float32, False, torch.bfloat16),
        ("bf16", torch.float64, False, torch.bfloat16),
        ("fp16", torch.bfloat16, False, torch.float16),
        ("fp16", torch.int64, False, torch.int64),
        ("bf16", torch.float32, True, torch.float32),
        ("bf16", torch.bfloat16, True, torch.float32),
        ("bf16", torch.float64, True, torch.float32),
        ("bf16", torch.int64, True, torch.int64),
    ],
)
def test_dtype_of(precision: str, own: torch.dtype, stays: bool, expected: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(2).to(own), requires_grad=False)
    assert Precision.named(precision).dtype_of(parameter, stays) == expected


def test_inputs_are_cast_where_they_are_floats() -> None:
    args = (
        torch.ones(2),
        {"tokens": torch.arange(3), "mask": torch.tensor(True), "scale": 0.5},
        [torch.ones(1).double()],
    )
    x, named, (z,) = BF16.cast_inputs(args)
    assert (x.dtype, z.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (named["tokens"].dtype, named["mask"].dtype, named["scale"]) == (torch.int64, torch.bool, 0.5)
    assert Precision.named("fp32").cast_inputs(args) is args


@pytest.mark.parametrize("wanted", [("LayerNorm",), ("blocks.1",), ("blocks.0.norm", "head"), ()])
def test_kept_are_the_parameters_below(wanted: tuple[str, ...]) -> None:
    model = Plain()
    expected = {
        "LayerNorm": {f"blocks.{n}.norm.{p}" for n in range(3) for p in ("weight", "bias")},
        "blocks.1": {f"blocks.1.{m}.{p}" for m in ("norm", "up", "down") for p in ("weight", "bias")},
        "blocks.0.norm": {"blocks.0.norm.weight", "blocks.0.norm.bias"},
        "head": {"head.weight"},
    }
    kept = keep_in_fp32(model, wanted, BF16)
    names = {name for name, parameter in model.named_parameters() if parameter in kept}
    assert names == set().union(*(expected[want] for want in wanted))


def test_casts_at_the_borders() -> None:
    model = nn.ModuleDict({"seen": Seen()})
    keep_in_fp32(model, ["Seen"], BF16)
    output = model["seen"](torch.ones(2).bfloat16(), bias=torch.ones(2).bfloat16(), index=torch.arange(2))
    assert model["seen"].dtypes == [torch.float32, torch.float32, torch.int64]
    assert (
        output["y"].dtype == torch.bfloat16 and output["y"].tolist() == [2, 2] and output["index"].dtype == torch.int64
    )


def test_gradients_pass_the_borders() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    keep_in_fp32(model, ["LayerNorm"], BF16)
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    plain = x.detach().float().requires_grad_()
    model(x).float().square().sum().backward()
    nn.functional.layer_norm(plain, (4,)).bfloat16().float().square().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, plain.grad.bfloat16())


@pytest.mark.parametrize(
    "wanted", [("LayerNorm",), ("blocks.1",), ("Block", "LayerNorm"), ("blocks.1", "blocks.1.up"), ("Plain", "Block")]
)
def test_the_model_still_runs(wanted: tuple[str, ...]) -> None:
    """Also where a wanted module lies inside another wanted one, which must not be cast back half-way."""
    torch.manual_seed(0)
    model, plain = Plain(), Plain()
    plain.load_state_dict(model.state_dict())
    as_computed(model, keep_in_fp32(model, wanted, BF16))
    tokens = torch.randint(13, (4, 6))
    torch.testing.assert_close(model(tokens).float(), plain(tokens), rtol=2e-2, atol=0)


def test_a_module_inside_a_kept_one_computes_and_answers_in_fp32() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))), torch.randn(3, 4)
    expected = model(x.bfloat16().float()).bfloat16()
    keep_in_fp32(model, ["0", "LayerNorm"], BF16)
    assert torch.equal(model(x.bfloat16()), expected)


@pytest.mark.parametrize("wanted", ["embed", "head"])
def test_a_layer_that_shares_a_parameter_computes_in_fp32_too(wanted: str) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5)})
    model["head"].weight = model["embed"].weight
    kept = keep_in_fp32(model, [wanted], BF16)
    assert kept == {model["embed"].weight, model["head"].bias}
    as_computed(model, kept)
    hidden = model["norm"](model["embed"](torch.arange(5)))
    assert hidden.dtype == model["head"](hidden).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("wanted, hint", [("LayerNrom", "'LayerNorm'"), ("blocks.7", "'blocks"), ("zzz", "LayerNorm")])
def test_a_misspelt_name(precision: str, wanted: str, hint: str) -> None:
    with pytest.raises(PlanError, match="fp32_modules") as error:
        keep_in_fp32(Plain(), [wanted], Precision.named(precision))
    assert wanted in str(error.value) and hint in str(error.value)


def test_nothing_to_do_in_fp32() -> None:
    model = Plain()
    assert keep_in_fp32(model, ["LayerNorm"], Precision.named("fp32")) == set()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
