"""Transforms of `torch.func` around a model of an engine, and inside of its forward; copies of trees."""

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zeroshard as zs
from zeroshard.units.hooks import explain_transform, map_tensors, tensors_of

SCRIPTED = pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # by torch, for jvp

Call = Callable[[Any, nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """[B, 4] -> the mean of squares, after blocks that are units of their own."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.inner:
            x = grad(lambda y: y.square().sum())(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def ones(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones(p.shape) for name, p in model.named_parameters()}


SCALE = torch.tensor(1.5)
CALLS: dict[str, Call] = {
    "grad": lambda e, m, x: grad(lambda p: functional_call(m, p, x))(parameters(m))["first.weight"],
    "grad of each row": lambda e, m, x: vmap(grad(lambda p, row: functional_call(m, p, row[None])), in_dims=(None, 0))(
        parameters(m), x
    )["first.weight"],
    "jvp": lambda e, m, x: jvp(lambda p: functional_call(m, p, x), (parameters(m),), (ones(m),))[1],
    "jvp of a block": lambda e, m, x: jvp(m.blocks[0], (x,), (x,))[1],  # type: ignore[index]
    "vmap": lambda e, m, x: vmap(lambda row: e(row[None]))(x),
    "grad around the engine": lambda e, m, x: grad(lambda scale: e(x * scale))(SCALE),
    "jvp around the engine": lambda e, m, x: jvp(lambda scale: e(x * scale), (SCALE,), (SCALE,))[1],
    "functional_call": lambda e, m, x: functional_call(m, ones(m), x),
}


def build(inner: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(inner)


def engine_of(mesh: zs.Mesh, inner: bool = False, **settings: Any) -> zs.Engine:
    plan = zs.Plan(**settings)
    return zs.Engine(build(inner), lambda ps: torch.optim.SGD(ps, lr=0.1), plan, mesh=mesh)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def expected(calls: list[str]) -> list[Any]:
    model, x = build(), batch()
    found: list[Any] = [CALLS[name](model, model, x).detach().tolist() for name in calls]
    return [*found, model(x).item()]


@SCRIPTED
def outcomes(mesh: zs.Mesh, gathered: bool, settings: dict[str, Any]) -> list[Any]:
    """What each call gives, or its error; and the loss of a step of training afterwards."""
    engine, found, x = engine_of(mesh, **settings), [], batch()
    with engine.gathered() if gathered else nullcontext():
        for call in CALLS.values():
            try:
                found.append(call(engine, engine.model, x).detach().tolist())
            except zs.PlanError as error:
                found.append(str(error))
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return [*found, loss.item()]


def same(found: Any, right: Any) -> bool:
    return torch.allclose(torch.tensor(found), torch.tensor(right), rtol=1e-5, atol=1e-7)


@SCRIPTED
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_transforms_of_whole_weights_give_what_they_give_of_a_plain_model(pool: Pool, zero: int) -> None:
    right = expected(list(CALLS))
    for found in pool.run(outcomes, 2, zero == 3, {"zero": zero, "transport": "network"}):
        assert [name for name, one, two in zip([*CALLS, "loss"], found, right, strict=True) if not same(one, two)] == []


GATHERED_INSIDE = ("jvp of a block", "vmap", "jvp around the engine", "functional_call", "loss")


@SCRIPTED
def test_transforms_gather_sliced_weights_or_are_refused_with_the_way_out(pool: Pool) -> None:
    """`jvp` and `vmap` gather them; transforms that take gradients would need them in their backwards."""
    right = dict(zip([*CALLS, "loss"], expected(list(CALLS)), strict=True))
    for found in pool.run(outcomes, 2, False, {"zero": 3, "transport": "network"}):
        answers = dict(zip([*CALLS, "loss"], found, strict=True))
        assert [name for name in GATHERED_INSIDE if not same(answers.pop(name), right[name])] == []
        assert all("with engine.gathered():" in answer for answer in answers.values())
        named = [name for name, answer in answers.items() if "A transform of torch.func that takes" in answer]
        assert named == ["grad", "grad of each row", "grad around the engine"]
        assert "unit 'root'" in answers["grad"] and "'first.weight' was read" in answers["jvp"]


def train_vectorised(mesh: zs.Mesh, zero: int) -> list[float]:
    """Losses of steps whose forward is vectorised over rows."""
    engine, found = engine_of(mesh, zero=zero, transport="network"), []
    for _ in range(3):
        loss = vmap(lambda row: engine(row[None]))(batch()).mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_a_vectorised_forward_trains_as_a_plain_loop(pool: Pool, zero: int) -> None:
    model, right = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = vmap(lambda row: model(row[None]))(batch()).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        right.append(loss.item())
    assert right[2] < right[0]
    for found in pool.run(train_vectorised, 2, zero):
        assert found == pytest.approx(right, rel=1e-5)


def refusals(mesh: zs.Mesh) -> list[str]:
    """Transforms that meet functions of the engine."""
    inside = engine_of(mesh, inner=True, zero=3, transport="network")
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    split = zs.Engine(layers, lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(tensor_parallel=2), mesh=mesh)
    calls: list[Callable[[], Any]] = [
        lambda: inside(batch()),
        lambda: CALLS["vmap"](split, split.model, batch()),
    ]
    found = []
    for call in calls:
        with pytest.raises(zs.ModelError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_transforms_that_meet_functions_of_the_engine_are_refused(pool: Pool) -> None:
    for inside, around in pool.run(refusals, 2):
        assert "called in the forward of a model" in inside and "Use zero=2" in inside
        assert "engine.state_dict()" in around and "tensor_parallel" in around


# Copies of trees with other tensors


@dataclass
class Record:
    hidden: Tensor
    notes: dict[str, Any] = field(default_factory=dict)
    next: "Record | None" = None

    def __post_init__(self) -> None:
        self.notes["made"] = self.notes.get("made", 0) + 1


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    name: str = "frozen"


@dataclass
class Late:
    """A field that no constructor sets."""

    value: Tensor = field(init=False)
    other: int = 0


def doubled(tree: Any) -> Any:
    return map_tensors(lambda tensor: 2 * tensor, tree)


class Leaves(Exception):
    """Takes a tensor out of a forward, as a stage that is not the last does."""

    def __str__(self) -> str:
        raise AssertionError("the values of the tensor would be fetched")


def test_exceptions_with_tensors_are_not_printed() -> None:
    explain_transform(Leaves(torch.ones(2)))


def test_records_are_copied_with_their_tensors_and_the_originals_stay() -> None:
    inner = Record(torch.ones(2), {"list": [torch.ones(1), "text"]})
    outer = Record(torch.ones(3), {"frozen": Frozen(torch.ones(1))}, inner)
    (found,) = doubled([outer])
    assert found.hidden.tolist() == [2, 2, 2] and found.next.notes["list"][0].tolist() == [2]
    assert found.notes["frozen"].value.tolist() == [2] and found.notes["frozen"].name == "frozen"
    assert outer.hidden.tolist() == [1, 1, 1] and inner.notes["list"][0].tolist() == [1] and outer.next is inner
    assert found.notes["made"] == found.next.notes["made"] == 1  # no constructor ran again


def test_mappings_of_other_classes_and_packed_sequences() -> None:
    batch = UserDict({"x": torch.ones(2), "name": "batch"})
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    new, again = doubled((batch, packed))
    assert type(new) is UserDict and new["x"].tolist() == [2, 2] and new["name"] == "batch"
    assert batch["x"].tolist() == [1, 1]
    assert isinstance(again, PackedSequence) and again.data.tolist() == [[2.0]] * 5
    assert [tensor.dtype for tensor in tensors_of(packed)] == [torch.float32, torch.int64]


def test_a_record_that_holds_itself_or_lacks_a_field() -> None:
    ring = Record(torch.ones(1))
    ring.next = ring
    found = doubled(ring)
    assert found.next is found and found is not ring and found.hidden.tolist() == [2]
    assert doubled(Late()).other == 0


@pytest.mark.parametrize("item", [None, "text", 3, Record, nn.Linear(1, 1), torch.distributions.Normal(0.0, 1.0)])
def test_other_objects_stay(item: Any) -> None:
    assert doubled(item) is item and tensors_of(item) == []


def test_unchanged_tensors_are_shared() -> None:
    record = Record(torch.ones(2))
    assert map_tensors(lambda tensor: tensor, record).hidden is record.hidden
