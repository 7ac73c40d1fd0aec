"""`p.grad` of parameters whose gradients autograd adds up itself: whatever comes twice, and what is kept for it."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from zero.gathered_models import WORDS, Language

import zeroshard as zs

SGD = partial(torch.optim.SGD, lr=0.5)


class Scaled(nn.Module):
    """A matrix, and small parameters of unlike shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(6, 4)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.linspace(-1, 1, 4))
        self.table = nn.Embedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.matrix(x) * self.scale + self.shift + self.table.weight[:1]).square().mean()


def model_of(seed: int = 0) -> Scaled:
    torch.manual_seed(seed)
    return Scaled()


def rows() -> Tensor:
    return torch.linspace(-1, 1, 12).view(2, 6)


def penalties(model: Scaled) -> Tensor:
    return model.shift.square().sum() + model.scale.square() + model.table.weight.square().sum()


def alone(engine: nn.Module, model: Scaled) -> list[Tensor]:
    return [penalties(model), penalties(model)]


def around_a_forward(engine: nn.Module, model: Scaled) -> list[Tensor]:
    return [penalties(model), engine(rows()), penalties(model)]


def of_some(engine: nn.Module, model: Scaled) -> list[Tensor]:
    return [engine(rows()), model.shift.square().sum(), model.scale * 2.0]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("losses", [alone, around_a_forward, of_some])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_come_again_add_up(losses: Callable[[nn.Module, Scaled], list[Tensor]], graph: bool) -> None:
    model, other = model_of(), model_of()
    engine, optimizer = zs.Engine(model, SGD, zs.Plan()), SGD(other.parameters())
    for _ in range(2):
        for mine, theirs in zip(losses(engine, model), losses(other, other), strict=True):
            mine.backward(create_graph=graph)
            theirs.backward(create_graph=graph)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_the_gradient_of_a_small_parameter_is_held_until_the_step_and_can_be_discarded() -> None:
    model = model_of()
    engine = zs.Engine(model, SGD, zs.Plan())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    engine.backward(engine(rows()))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype)
        with pytest.raises(zs.PlanError, match=f"gradient of '{name}'"):
            parameter.grad.norm()
    model.shift.grad = None
    assert model.scale.grad is not None
    model.scale.grad.zero_()
    engine.step()
    assert all(p.grad is None for p in model.parameters())
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"matrix.weight", "matrix.bias", "table.weight"}


def storages_alive() -> dict[int, torch.UntypedStorage]:
    """The storages of all numbers of this process, by identity; bytes are of messages still on their way."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.dtype is not torch.uint8]
    strided = [each.untyped_storage() for each in tensors if each.layout is torch.strided and not each.is_meta]
    return {storage._cdata: storage for storage in strided}


def alive(mesh: zs.Mesh, zero: int, blocks: int) -> tuple[int, int]:
    """Bytes that an engine keeps after two steps, and the numbers of the model."""
    before, model = storages_alive(), Language(blocks=blocks)
    size = sum(parameter.numel() for parameter in model.parameters())
    engine = zs.Engine(model, SGD, zs.Plan(zero=zero, transport="network"), mesh=mesh)
    for _ in range(2):
        engine.train_step(torch.zeros(4, 6, dtype=torch.int64) + torch.arange(6) % WORDS)
    return sum(each.nbytes() for key, each in storages_alive().items() if key not in before), size


@pytest.mark.parametrize("zero", [2, 3])
def test_what_is_kept_beside_the_states_does_not_grow_with_depth(pool: Pool, zero: int) -> None:
    for (few, least), (many, most) in zip(pool.run(alive, 2, zero, 3), pool.run(alive, 2, zero, 12), strict=True):
        states = {2: 4 + 4 / 2, 3: 4 / 2 + 4 / 2}[zero]  # bytes of a number: parameters and gradients
        assert abs(many - few - states * (most - least)) < 100 * 9  # and some numbers of each block


class Branches(nn.Module):
    """A branch for each rank: a matrix and a small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Scaled() for _ in range(2)])
        self.last = nn.Linear(1, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.last(self.branches[branch](x).view(1, 1)).square().mean()


def clipped(mesh: zs.Mesh, stages: list[int]) -> list[list[dict[str, Tensor]]]:
    """The weights after steps in which each rank uses its own branch, and norms are asked for before the step."""
    found = []
    for zero in stages:
        torch.manual_seed(0)
        engine = zs.Engine(Branches(), SGD, zs.Plan(zero=zero, transport="network", nonfinite="skip"), mesh=mesh)
        weights = []
        for step in range(3):
            engine.backward(engine(rows(), mesh.rank))
            assert engine.gradient("branches.0.matrix.weight") is not None
            if step == 1:
                engine.clip_grad_norm(float("inf"))
                engine.backward(engine(rows(), 0))
            engine.clip_grad_norm(0.1)
            engine.step()
            weights.append(engine.state_dict())
        found.append(weights)
    return found


def test_a_gradient_of_other_ranks_alone_is_there_after_a_norm(pool: Pool) -> None:
    """The rank without it did not take it away by `p.grad = None`."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = SGD(model.parameters())
    wanted = []
    for step in range(3):
        losses = [model(rows(), rank) / 2 for rank in range(2)] + [model(rows(), 0)] * (step == 1)
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append({name: value.clone() for name, value in model.state_dict().items()})
    for found in pool.run(clipped, 2, [0, 2, 3]):
        for weights in found:
            torch.testing.assert_close(weights, wanted)
