"""Stand-ins: the shapes that modules would return, without their weights."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.errors import ModelError
from zeroshard.pipeline.cut.placeholders import Placeholders


def placeholder(module: nn.Module, *args: Any, placeholders: Placeholders | None = None, **kwargs: Any) -> Any:
    return (placeholders or Placeholders()).of(module, module.forward, args, kwargs)


def test_a_stand_in_is_one_nan_in_the_right_shape_and_dtype() -> None:
    with torch.device("meta"):
        module = nn.Conv2d(3, 5, 3, dtype=torch.bfloat16)
    found = placeholder(module, torch.zeros(2, 3, 9, 7, dtype=torch.bfloat16))
    assert (found.shape, found.dtype, found.device.type) == ((2, 5, 7, 5), torch.bfloat16, "cpu")
    assert found.isnan().all() and not found.requires_grad
    assert found.untyped_storage().nbytes() == 2


def test_every_shape_and_mode_of_the_input_has_its_own() -> None:
    class Mode(nn.Module):
        def forward(self, x: Tensor, times: int = 1) -> Tensor:
            return x.repeat(times, 2 if self.training else 1)

    module, placeholders = Mode(), Placeholders()
    assert placeholder(module, torch.zeros(2, 3), placeholders=placeholders).shape == (2, 6)
    assert placeholder(module, torch.zeros(4, 3), placeholders=placeholders).shape == (4, 6)
    assert placeholder(module, torch.zeros(4, 3), times=2, placeholders=placeholders).shape == (8, 6)
    module.eval()
    assert placeholder(module, torch.zeros(4, 3), placeholders=placeholders).shape == (4, 3)


def test_a_second_call_has_a_tensor_of_its_own() -> None:
    module, placeholders, x = nn.Linear(3, 5), Placeholders(), torch.zeros(2, 3)
    first = placeholder(module, x, placeholders=placeholders)
    first.requires_grad_()
    second = placeholder(module, x, placeholders=placeholders)
    assert not second.requires_grad and second.shape == (2, 5) and second.isnan().all()
    owned = placeholders.of(module, module.forward, (x,), {}, writable=True)
    owned[0, 0] = 1.0
    assert placeholder(module, x, placeholders=placeholders).isnan().all()
    with torch.inference_mode():
        assert placeholder(nn.Linear(3, 7), x, placeholders=placeholders).shape == (2, 7)


def test_every_structure_and_plain_value_of_the_input_has_its_own() -> None:
    class Widened(nn.Module):
        def forward(self, x: Tensor, options: Any) -> Tensor:
            by = options["by"] if isinstance(options, dict) else len(options)
            return x.repeat(1, by)

    module, placeholders, x = Widened(), Placeholders(), torch.zeros(2, 3)
    cases = [({"by": 2}, 6), ({"by": 3}, 9), ([x], 3), ((x, x), 6), ([[x, x]], 3), (OrderedDict(by=4), 12), ((), 0)]
    for _ in range(2):
        for options, width in cases:
            assert placeholder(module, x, options, placeholders=placeholders).shape == (2, width)


def test_a_recorded_call_is_followed_on_meta_only_after_a_cast() -> None:
    module, placeholders, x, followed = nn.Linear(3, 5), Placeholders(), torch.zeros(2, 3), []

    def forward(x: Tensor) -> Tensor:
        followed.append(x.device.type)
        return F.linear(x, module.weight, module.bias)

    placeholders.record(module, (x,), {}, module(x))
    for cast, expected in ((False, []), (True, ["meta"])):
        placeholders.forget(cast)
        assert placeholders.of(module, forward, (x,), {}).shape == (2, 5) and followed == expected


def test_what_stands_around_tensors_stays() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
            return {"values": (x * scale, x.argmax(-1)), "scale": scale, "none": None}

    found = placeholder(Mixed(), torch.zeros(2, 3), scale=0.5)
    assert (found["scale"], found["none"]) == (0.5, None)
    values, integers = found["values"]
    assert values.shape == (2, 3) and values.isnan().all()
    assert integers.shape == (2,) and integers.dtype == torch.int64 and not integers.any()


def test_the_module_is_left_as_it_was() -> None:
    module = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    placeholder(module, torch.randn(4, 3))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.forward.__func__ is nn.BatchNorm1d.forward  # type: ignore[attr-defined]


def test_a_module_under_two_names_has_its_parameters_afterwards() -> None:
    """`functional_call` with tied weights would leave the parameters on the meta device."""
    twice = nn.Sequential(layer := nn.Linear(2, 2), nn.ModuleList([layer])[0])
    twice.register_module("again", layer)
    held = list(twice.parameters())
    made = Placeholders().of(twice, twice.forward, (torch.ones(1, 2),), {})
    assert made.shape == (1, 2)
    assert all(one is other and not one.is_meta for one, other in zip(twice.parameters(), held, strict=True))


def test_a_stand_in_of_a_stand_in_that_is_written_into() -> None:
    first = placeholder(nn.Linear(3, 4), torch.zeros(2, 3))
    assert placeholder(nn.ReLU(inplace=True), first).shape == (2, 4)
    assert first.isnan().all()


def test_a_stand_in_to_write_into_has_memory_of_its_own() -> None:
    module = nn.Linear(3, 4)
    found = Placeholders().of(module, module.forward, (torch.zeros(2, 3),), {}, writable=True)
    found[0] = 1
    assert found[0].eq(1).all() and found[1].isnan().all()


def test_dtypes_are_found_anew_after_forget() -> None:
    module, placeholders, tokens = nn.Embedding(5, 3), Placeholders(), torch.zeros(2, dtype=torch.long)
    assert placeholder(module, tokens, placeholders=placeholders).dtype == torch.float32
    module.to(torch.bfloat16)
    assert placeholder(module, tokens, placeholders=placeholders).dtype == torch.float32
    placeholders.forget()
    assert placeholder(module, tokens, placeholders=placeholders).dtype == torch.bfloat16


class Peeking(nn.Module):
    """Asks for a value, which the meta device does not have."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(3, outputs)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scale = 2.0 if x.sum().item() > 0 else 1.0
        return self.inner(x) * scale, x.shape[0]


def recorded(module: nn.Module, placeholders: Placeholders, *args: Any) -> None:
    placeholders.record(module, args, {}, module(*args))


def test_a_module_that_cannot_run_on_meta_returns_what_was_recorded() -> None:
    module, placeholders = Peeking(4), Placeholders()
    recorded(module, placeholders, torch.randn(2, 3))
    tensor, rows = placeholder(module, torch.randn(2, 3), placeholders=placeholders)
    assert (tensor.shape, rows) == ((2, 4), 2)


def test_or_what_is_alike_for_another_shape() -> None:
    module, placeholders = Peeking(3), Placeholders()
    recorded(module, placeholders, torch.randn(2, 3))
    tensor, _ = placeholder(module, torch.randn(7, 5, 3), placeholders=placeholders)
    assert tensor.shape == (7, 5, 3) and tensor.isnan().all()
    tensor, _ = placeholder(module, torch.randn(4, 3, dtype=torch.bfloat16), placeholders=placeholders)
    assert (tensor.shape, tensor.dtype) == ((4, 3), torch.bfloat16)


@pytest.mark.parametrize(
    "module, example, now",
    [
        (Peeking(4), (torch.randn(2, 3),), (torch.randn(5, 3),)),  # it changes shapes
        (Peeking(3), (torch.randn(2, 3), torch.randn(2, 3)), (torch.randn(5, 3), torch.randn(6, 3))),  # alike to which?
        (Peeking(3), (torch.randn(2, 3),), (torch.randn(2, 3), torch.randn(2, 3))),  # other arguments
        (Peeking(3), None, (torch.randn(2, 3),)),  # nothing recorded
    ],
)
def test_or_is_refused(module: nn.Module, example: tuple[Tensor, ...] | None, now: tuple[Tensor, ...]) -> None:
    placeholders = Placeholders()
    if example is not None:
        recorded(module, placeholders, *example)
    said = (
        r"The shape of what Peeking returns cannot be found without computing it \(.*meta.*\); give every microbatch "
    )
    with pytest.raises(ModelError, match=said + "the shape of the example, or pad the last batch"):
        placeholder(module, *now, placeholders=placeholders)


def test_records_are_of_one_module() -> None:
    one, other, placeholders = Peeking(3), Peeking(3), Placeholders()
    recorded(one, placeholders, torch.randn(2, 3))
    with pytest.raises(ModelError, match="Peeking"):
        placeholder(other, torch.randn(2, 3), placeholders=placeholders)


class Grouped(nn.Module):
    """Products by groups of rows, as mixtures of experts make them; torch's kernel on meta takes bf16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 16, 32))

    def forward(self, kind: str, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 8], dtype=torch.int32, device=x.device)
        if kind == "rows":
            return F.grouped_mm(x, self.experts, offs=ends)
        if kind == "both":
            return F.grouped_mm(x.reshape(2, 4, 16), self.experts)
        return F.grouped_mm(x.t(), x, offs=ends)


@pytest.mark.parametrize("kind", ["rows", "both", "sum"])
def test_products_by_groups_have_a_shape_in_every_dtype(kind: str) -> None:
    module, x = Grouped(), torch.randn(8, 16)
    found = Placeholders().of(module, module.forward, (kind, x), {})
    expected = module(kind, x)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
