"""Parameters that an engine leaves to the user, against a plain loop with two optimizers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignored_loop import average, loop_of_two
from plain_loop import PlainRun, follows_plain_loop
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import CheckpointError, PlanError

STEPS = 3
OWN = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OTHERS = partial(torch.optim.Adam, lr=1e-2)
IGNORED = ("tower", "*.gate", "embed.weight")


class Gated(nn.Module):
    """A residual layer with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 10)
        self.gate = nn.Parameter(torch.full((10,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.up(x))


class Teacher(nn.Module):
    """A frozen tower beside trained blocks, whose gates and embedding the user trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.tower = nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10)).requires_grad_(False)
        self.blocks = nn.ModuleList([Gated() for _ in range(3)])
        self.head = nn.Linear(10, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        wanted = self.tower(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten()) + F.mse_loss(x, wanted)


def build(seed: int = 0) -> Teacher:
    torch.manual_seed(seed)
    return Teacher()


def batch(step: int, rank: int, ranks: int) -> Tensor:
    """A rank's part of the tokens [8, 6] of a step."""
    return torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def own_of(model: Teacher) -> list[nn.Parameter]:
    return [model.embed.weight, *(block.gate for block in model.blocks)]


def plain() -> PlainRun:
    model = build()
    return loop_of_two(model, own_of(model), (OWN, OTHERS), 0.5, [batch(step, 0, 1) for step in range(STEPS)])


def train(mesh: zs.Mesh, settings: dict[str, Any], folder: str) -> Any:
    model = build()
    own = own_of(model)
    plan = zs.Plan(ignored=IGNORED, clip_norm=0.5, **settings)
    engine, mine = zs.Engine(model, OTHERS, plan, mesh=mesh), OWN(own)
    assert all(a is b for a, b in zip(own, own_of(model), strict=True)) and type(own[0]) is nn.Parameter
    counted = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert not counted & {id(p) for p in model.parameters() if type(p) is nn.Parameter}
    losses = []
    for step in range(STEPS):
        result = engine.train_step((batch(step, mesh.rank, mesh.ranks),))
        assert result.loss is not None
        losses.append(float(result.loss) if not isinstance(result.loss, list) else 0.0)
        average(mesh, own, mesh.ranks)
        mine.step()
        mine.zero_grad()
        if step == 1:
            engine.save(folder, wait=True)
    table = {row.category: row for row in engine.memory().rows if row.tier == "device"}["parameters"]
    assert table.planned_bytes == table.measured_bytes - (table.padding_bytes or 0)
    ended = losses, engine.state_dict()
    engine.load(folder)
    assert not torch.equal(engine.state_dict()["embed.weight"], ended[1]["embed.weight"])
    engine.load_state_dict(ended[1])
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in ended[1].items())
    return ended


PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3, "transport": "network"},
    "offloaded": {"zero": 3, "offload": "optimizer, parameters", "recompute": "blocks"},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ignored_parameters_are_the_users_own(pool: Pool, plan: str, ranks: int, tmp_path: Path) -> None:
    follows_plain_loop(pool.run(train, ranks, PLANS[plan], str(tmp_path / "saved")), plain())


def test_ignored_parameters_on_meta_get_the_values_of_a_plan_that_ignores_none() -> None:
    states = []
    for ignored in ((), IGNORED):
        with torch.device("meta"):
            model = Teacher()
        for block in model.blocks:
            block.gate = nn.Parameter(torch.full((10,), 0.5))
        plan = zs.Plan(ignored=ignored)
        states.append(zs.Engine(model, OTHERS, plan).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_weights_are_loaded_whatever_was_ignored(tmp_path: Path) -> None:
    with_some = zs.Engine(build(0), OTHERS, zs.Plan(ignored=IGNORED))
    with_some.save(tmp_path / "some", wait=True)
    with_some.export(tmp_path / "exported")
    without = zs.Engine(build(1), OTHERS, zs.Plan())
    without.save(tmp_path / "none", wait=True)
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        without.load(tmp_path / "some")
    with pytest.raises(CheckpointError, match=r"engine\.load_weights"):
        with_some.load(tmp_path / "none")
    without.load_weights(tmp_path / "some")
    other = zs.Engine(build(2), OTHERS, zs.Plan(ignored=("blocks.0",)))
    for engine in (without, other):
        engine.load_weights(tmp_path / "exported" if engine is other else tmp_path / "some")
        for name, value in with_some.state_dict().items():
            assert torch.equal(engine.state_dict()[name], value), name
    with_some.load_weights(tmp_path / "none")
    wanted = build(1).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in with_some.state_dict().items())


def test_ignored_modules_move_and_cast_as_in_pytorch() -> None:
    model = build()
    zs.Engine(model, OTHERS, zs.Plan(ignored=("tower",), precision="bf16", fp32_modules=("tower",)))
    assert model.tower[0].weight.dtype == torch.float32 and model.head.weight.dtype == torch.bfloat16
    model.tower.to(torch.bfloat16)
    assert model.tower[0].weight.dtype == torch.bfloat16
    with pytest.raises(PlanError, match="cannot be converted"):
        model.to(torch.float32)
    model.tower.load_state_dict(build(1).tower.state_dict())


def test_mistakes_are_named() -> None:
    with pytest.raises(PlanError, match=r"'towers'.*Did you mean 'tower'"):
        zs.Engine(build(), OTHERS, zs.Plan(ignored=("towers",)))
    with pytest.raises(PlanError, match="nothing to train"):
        zs.Engine(build(), OTHERS, zs.Plan(ignored=("*",)))
    with pytest.raises(PlanError, match="tuple of names"):
        zs.Plan(ignored="tower")  # type: ignore[arg-type]
    model = build()
    with pytest.warns(UserWarning, match="1 parameters that the plan ignores"):
        engine = zs.Engine(model, OTHERS([*model.parameters()]), zs.Plan(ignored=("embed",)))
    assert len(list(engine.optimizer.param_groups)) == 1
    zs.Engine(other := build(), OTHERS, zs.Plan(ignored=("Embedding",)))
    assert type(other.embed.weight) is nn.Parameter
