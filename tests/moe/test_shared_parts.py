"""Mixtures that share experts, weights or a router, and experts with buffers or idle weights, on several ranks."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ModelError, PlanError
from zeroshard.step.context import Within

WIDTH, EXPERTS, STEPS = 6, 5, 3
BUFFERS = ("rows", "total", "called")


class Counting(nn.Module):
    """An expert that counts its rows in a buffer, and has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("called", torch.zeros(1, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """[r, D] -> [r, D]."""
        if self.training:
            self.rows += len(x)
            self.total += x.detach().sum(0)
            self.called.fill_(True)
        return torch.tanh(self.used(x))


class Layers(nn.Module):
    """Two mixtures; returns the loss."""

    def __init__(self, expert: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(zs.moe.MoE(WIDTH, 7, EXPERTS, router="mixtral", expert=expert) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def sharing(*paths: str) -> Callable[[], Layers]:
    """Makes layers of which the second has modules or parameters of the first."""

    def make() -> Layers:
        model = Layers()
        first, second = model.layers
        for path in paths:
            owner, _, name = path.rpartition(".")
            setattr(second.get_submodule(owner), name, getattr(first.get_submodule(owner), name))
        return model

    return make


MODELS: dict[str, Callable[[], Layers]] = {
    "experts": sharing("experts"),
    "weights of experts": sharing("experts.up", "experts.down"),
    "router": sharing("router"),
    "experts with buffers": lambda: Layers(Counting),
}


def build(name: str) -> Layers:
    torch.manual_seed(0)
    return MODELS[name]()


def data(step: int, data_rank: int) -> Tensor:
    """Enough tokens for every expert."""
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(100 * step + data_rank))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """With decay, which weights without a gradient do not get."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.1)


def plain(name: str, data_ranks: int) -> dict[str, Tensor]:
    """The state dict of one process."""
    model = build(name)
    updates = optimizer(model.parameters())
    for step in range(STEPS):
        updates.zero_grad()
        for rank in range(data_ranks):
            with Within(penalty_weight=1 / data_ranks):
                (model(data(step, rank)) / data_ranks).backward()
        updates.step()
    return model.state_dict()


def follow(mesh: zs.Mesh, name: str, plan: dict[str, Any]) -> dict[str, Tensor]:
    """What one rank has in the end."""
    engine = zs.Engine(build(name), optimizer, zs.Plan.from_dict(plan), mesh=mesh, loss=lambda output, _: output)
    for step in range(STEPS):
        engine.train_step(data(step, engine.data_rank))
    engine.check_replicas()
    assert set(engine.layer_readings) == {
        path for path, module in engine.model.named_modules() if path.endswith(".experts")
    }
    return engine.state_dict()


@pytest.mark.parametrize("plan", [{"zero": 1}, {"expert_parallel": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_they_train_like_one_process(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    expected = plain(name, 2)
    for mine in pool.run(follow, 2, name, plan):
        assert mine.keys() == expected.keys()
        for key, value in expected.items():
            if "expert_parallel" in plan or not key.endswith(BUFFERS):  # else each rank has its own
                torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def one_bias(model: Layers) -> None:
    """All experts of a mixture share a bias."""
    networks: Any = model.layers[0].experts.networks
    for network in networks:
        network.used.bias = networks[0].used.bias


def outside(model: Layers) -> None:
    """A dense layer has the bias of an expert."""
    model.enter.bias = model.layers[0].experts.networks[1].used.bias


def refusal(mesh: zs.Mesh, tie: Callable[[Layers], None]) -> str:
    """What the engine says of a model with experts that cannot lie on several ranks."""
    model = Layers(Counting)
    tie(model)
    with pytest.raises(ModelError) as caught:
        zs.Engine(model, optimizer, zs.Plan(expert_parallel=mesh.ranks), mesh=mesh)
    return str(caught.value)


@pytest.mark.parametrize(
    "tie, said", [(one_bias, "'used.bias' .* is shared by experts of several ranks"), (outside, "'enter.bias'")]
)
def test_a_weight_of_experts_on_several_ranks_is_refused_alike(
    pool: Pool, tie: Callable[[Layers], None], said: str
) -> None:
    """On four ranks, two of which have none of the first experts."""
    answers = pool.run(refusal, 4, tie)
    assert len(set(answers)) == 1
    assert re.search(said, answers[0]), answers[0]


def copied(mesh: zs.Mesh, plan: dict[str, Any]) -> str:
    """What a copy of a model is answered whose parts lie on several ranks."""
    engine = zs.Engine(build("router"), optimizer, zs.Plan.from_dict(plan), mesh=mesh)
    with engine.gathered(), pytest.raises(PlanError) as caught:
        copy.deepcopy(engine.model)
    build("router").load_state_dict(engine.state_dict())
    return str(caught.value)


def test_a_model_whose_parts_lie_on_several_ranks_is_not_copied(pool: Pool) -> None:
    assert all("load engine.state_dict() into it" in said for said in pool.run(copied, 2, {"expert_parallel": 2}))
