"""Microbatches, calls with a batch, and the loss in an output."""

import copy
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import BatchError
from zeroshard.step.batch import call_with, loss_in, microbatches


class Pair(NamedTuple):
    tokens: torch.Tensor
    step: int


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5))
def test_the_parts_are_even_and_put_together_again(count: int, rows: int) -> None:
    batch = torch.arange(count * rows * 2).view(-1, 2)
    parts = microbatches(batch, count)
    assert [part.shape for part in parts] == [(rows, 2)] * count
    assert torch.equal(torch.cat(parts), batch)


def test_nested_batches_keep_their_shape_and_what_is_no_tensor() -> None:
    batch = {"x": [torch.arange(4), None], "pair": Pair(torch.arange(4) * 10, step=7), "name": "train"}
    first, second = microbatches(batch, 2)
    assert isinstance(second["pair"], Pair) and list(second) == ["x", "pair", "name"]
    assert first["x"][0].tolist() == [0, 1] and second["pair"].tokens.tolist() == [20, 30]
    assert second["x"][1] is None and second["pair"].step == 7 and second["name"] == "train"


@pytest.mark.parametrize("batch", [torch.zeros(3), "no tensor", torch.tensor(1.0), (torch.zeros(2), torch.zeros(3))])
def test_one_microbatch_is_the_batch_itself(batch: Any) -> None:
    assert microbatches(batch, 1)[0] is batch


@pytest.mark.parametrize(
    "batch, found",
    [
        (torch.zeros(6), "6.*4"),
        (torch.zeros(2), "2.*4"),
        (torch.zeros(0, 3), "0.*4"),
        (torch.tensor(1.0), "0.*4"),
        ((torch.zeros(4), torch.zeros(8)), "4, 8"),
        ((torch.zeros(4), torch.tensor(1.0)), "0, 4"),
        ("no tensor", r"\[\]"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, found: str) -> None:
    with pytest.raises(BatchError, match=found):
        microbatches(batch, 4)


def arguments(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def test_call_with() -> None:
    x = torch.zeros(2)
    assert call_with(arguments, {"x": 1, "y": 2}) == ((), {"x": 1, "y": 2})
    assert call_with(arguments, OrderedDict(x=1)) == ((), {"x": 1})
    assert call_with(arguments, (1, 2)) == call_with(arguments, [1, 2]) == ((1, 2), {})
    assert call_with(arguments, Pair(x, 3))[0][1] == 3
    assert call_with(arguments, x)[0][0] is x
    assert call_with(arguments, "text") == (("text",), {})


LOSS = torch.tensor(2.5)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        LOSS.view(1, 1),
        SimpleNamespace(loss=LOSS, logits=torch.zeros(3)),
        {"loss": LOSS, "logits": torch.zeros(3)},
        OrderedDict(logits=torch.zeros(1), loss=LOSS),
    ],
)
def test_the_loss_is_found(output: Any) -> None:
    loss = loss_in(output)
    assert loss.shape == () and loss.item() == 2.5


def test_the_loss_keeps_its_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss_in({"loss": weight * 3}).backward()
    assert weight.grad.item() == 3


@pytest.mark.parametrize(
    "output, found",
    [
        (torch.zeros(2, 3), r"Tensor of shape \(2, 3\)"),
        ((LOSS, LOSS), "tuple"),
        ({"logits": LOSS}, "dict"),
        ({"loss": torch.zeros(2)}, "dict"),
        (SimpleNamespace(loss=1.0), "SimpleNamespace"),
        (None, "NoneType"),
        (2.5, "float"),
    ],
)
def test_no_loss_to_be_found(output: Any, found: str) -> None:
    with pytest.raises(BatchError, match=f"{found}.*loss="):
        loss_in(output)


class Images(nn.Module):
    """Means over each image's patches, which come in one tensor for all images."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, patches: Tensor, counts: Tensor) -> Tensor:
        image = torch.repeat_interleave(torch.arange(len(counts)), counts)
        sums = torch.zeros(len(counts), 2).index_add(0, image, self.inner(patches))
        return (sums / counts[:, None]).square().mean()


def test_microbatches_that_the_caller_cut() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(5, 3), torch.tensor([2, 3])), (torch.randn(4, 3), torch.tensor([1, 3]))]
    model = Images()
    plain = copy.deepcopy(model)
    engine = zs.Engine(model, partial(torch.optim.SGD, lr=0.1), zs.Plan(microbatches=2))
    with pytest.raises(BatchError, match=r"Cut them yourself: train_step\(zs.Microbatches"):
        engine.train_step((torch.cat([parts[0][0], parts[1][0]]), torch.cat([parts[0][1], parts[1][1]])))
    found = engine.train_step(zs.Microbatches(parts))
    loss = torch.stack([plain(*part) for part in parts]).mean()
    loss.backward()
    assert float(found.loss) == pytest.approx(loss.item())
    for (name, one), other in zip(engine.state_dict().items(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach() - 0.1 * other.grad, msg=name)
    with pytest.raises(BatchError, match=r"has 1 parts and the plan microbatches=2; give 2"):
        engine.train_step(zs.Microbatches(parts[:1]))


def test_the_loss_of_a_model_in_fp64_has_its_digits() -> None:
    model, x = nn.Linear(3, 1).double(), torch.arange(6, dtype=torch.float64).view(2, 3) / 7
    loss = model(x).square().mean().item()
    engine = zs.Engine(
        model, partial(torch.optim.SGD, lr=0.1), zs.Plan(), loss=lambda output, _: output.square().mean()
    )
    assert engine.train_step((x,)).loss.item() == loss


@pytest.mark.parametrize(
    "batch, found",
    [
        ((torch.ones(2, 4), torch.zeros(2)), "a tuple of 2, and the forward of Sequential takes input"),
        ({"pixels": torch.ones(2, 4)}, "a mapping with the keys pixels, and the forward of Sequential takes input"),
        ((), "a tuple of 0, and the forward of Sequential takes input"),
    ],
)
def test_a_batch_of_other_arguments_names_them_and_the_way_out(batch: Any, found: str) -> None:
    with pytest.raises(BatchError, match=f"The batch is {found} .*WithLoss"):
        call_with(torch.nn.Sequential(torch.nn.Linear(4, 4)), batch)


def test_a_type_error_of_a_model_is_its_own() -> None:
    with pytest.raises(TypeError, match="must be Tensor"):
        call_with(torch.nn.Sequential(torch.nn.Linear(4, 4)), ["text"])
