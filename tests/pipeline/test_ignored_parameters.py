"""Ignored parameters on stages, against a plain loop with two optimizers."""

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
from zeroshard.errors import CheckpointError, ModelError

STEPS = 3
OWN = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OTHERS = partial(torch.optim.Adam, lr=1e-2)
IGNORED = ("embed.weight", "*.gate", "*.base.*", "scale", "counts")


class Adapted(nn.Module):
    """A residual layer with a frozen base beside a trained part, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(10, 10).requires_grad_(False)
        self.down, self.up = nn.Linear(10, 2, bias=False), nn.Linear(2, 10, bias=False)
        self.gate = nn.Parameter(torch.full((10,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    """Adapted layers between a frozen embedding, with which the output is tied, and a scale of the model's own."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10).requires_grad_(False)
        self.blocks = nn.ModuleList([Adapted() for _ in range(layers)])
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((13,), 1.5))
        self.counts = nn.Parameter(torch.arange(13.0), requires_grad=False)  # of no layer

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(step: int, rank: int, ranks: int) -> Tensor:
    """A data rank's part of the tokens [16, 6] of a step."""
    return torch.randint(13, (16, 6), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def own_of(model: Model) -> list[nn.Parameter]:
    return [model.scale, *(block.gate for block in model.blocks)]


def plain() -> PlainRun:
    model = build()
    return loop_of_two(model, own_of(model), (OWN, OTHERS), 0.05, [batch(step, 0, 1) for step in range(STEPS)])


def train(mesh: zs.Mesh, settings: dict[str, Any], folder: str) -> Any:
    model = build()
    own = own_of(model)
    plan = zs.Plan(ignored=IGNORED, clip_norm=0.05, microbatches=4, **settings)
    engine = zs.Engine(model, OTHERS, plan, mesh=mesh, example=(batch(0, 0, 8),))
    here = {id(parameter) for parameter in model.parameters()}
    assert not any(p.is_meta for p in own if id(p) in here)
    mine, losses = OWN(own), []
    for step in range(STEPS):
        result = engine.train_step((batch(step, engine.data_rank, engine.data_ranks),))
        assert result.loss is not None
        losses.append(float(result.loss))
        average(mesh, own, engine.data_ranks)
        mine.step()
        mine.zero_grad()
        if step == 1:
            engine.save(folder, wait=True)
    table = {row.category: row for row in engine.memory().rows if row.tier == "device"}["parameters"]
    assert table.planned_bytes == table.measured_bytes - (table.padding_bytes or 0)
    ended = losses, engine.state_dict()
    walked = dict(engine.weights())
    assert walked.keys() == ended[1].keys()
    assert all(torch.equal(walked[name], value) for name, value in ended[1].items())
    engine.load(folder)
    assert not torch.equal(engine.state_dict()["scale"], ended[1]["scale"])
    engine.load_state_dict(ended[1])
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in ended[1].items())
    return ended


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "no stages": (1, {"zero": 0}),
    "gpipe": (2, {"pipeline_parallel": zs.Pipeline(2, schedule="gpipe"), "zero": 0}),
    "1f1b of four ranks": (4, {"pipeline_parallel": 2, "zero": 1}),
    "stage 2": (4, {"pipeline_parallel": 2, "zero": 2}),
    "stage 3": (4, {"pipeline_parallel": 2, "zero": 3, "transport": "network"}),
    "interleaved": (2, {"pipeline_parallel": zs.Pipeline(2, schedule="interleaved", virtual_stages=2), "zero": 1}),
    "split backwards": (2, {"pipeline_parallel": zs.Pipeline(2, schedule="zb-h1"), "zero": 1}),
    "a stage without trained layers": (
        2,
        {"pipeline_parallel": zs.Pipeline(2, split=("blocks.1",)), "zero": 1, "offload": "optimizer"},
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_ignored_parameters_are_the_users_own_on_stages(pool: Pool, plan: str, tmp_path: Path) -> None:
    ranks, settings = PLANS[plan]
    follows_plain_loop(pool.run(train, ranks, settings, str(tmp_path / "saved")), plain())


def moved(mesh: zs.Mesh, settings: dict[str, Any], folder: str, source: str, exported: str) -> Any:
    """Save under one plan, or load under it what another plan saved, and take a step."""
    model = build(0 if source == "" else 7)
    plan = zs.Plan(ignored=IGNORED, **settings)
    engine = zs.Engine(model, OTHERS, plan, mesh=mesh, example=(batch(0, 0, 8),))
    if source:
        engine.load(source)
    else:
        for parameter in own_of(model):
            if not parameter.is_meta and parameter.requires_grad:
                parameter.data += 0.25
        engine.train_step((batch(0, engine.data_rank, engine.data_ranks),))
    if exported:
        engine.load_weights(exported)
    before = engine.state_dict()
    if folder:
        engine.save(f"{folder}/saved", wait=True)
        engine.export(f"{folder}/exported")
    result = engine.train_step((batch(1, engine.data_rank, engine.data_ranks),))
    assert result.loss is not None
    return before, float(result.loss), engine.state_dict()


MOVES: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (2, {"zero": 2}),
    "stages": (2, {"pipeline_parallel": 2, "zero": 1, "microbatches": 2}),
    "stages of two ranks": (4, {"pipeline_parallel": 2, "zero": 3, "microbatches": 2, "transport": "network"}),
}


@pytest.mark.parametrize("first", MOVES)
def test_checkpoints_and_exports_move_between_plans(pool: Pool, first: str, tmp_path: Path) -> None:
    ranks, settings = MOVES[first]
    before, loss, after = pool.run(moved, ranks, settings, str(tmp_path), "", "")[0]
    assert torch.equal(before["blocks.3.gate"], torch.full((10,), 0.75))
    for name, (others, other) in MOVES.items():
        for exported in ("", str(tmp_path / "exported")):
            answers = pool.run(moved, others, other, "", str(tmp_path / "saved"), exported)
            for found, again, ended in answers:
                assert found.keys() == before.keys()
                assert all(torch.equal(found[key], value) for key, value in before.items()), (name, exported)
                if not other.get("pipeline_parallel"):
                    continue
                assert again == pytest.approx(loss if "pipeline_parallel" in settings else again, rel=1e-5)
                near = {"rtol": 1e-5, "atol": 1e-5}
                assert all(torch.allclose(ended[key], value, **near) for key, value in after.items())


def on_meta(mesh: zs.Mesh) -> Any:
    """State dicts of an engine on stages and of a plain one, both with values of the engine's own."""
    states = []
    cut: dict[str, Any] = {"pipeline_parallel": zs.Pipeline(2, split=("2",)), "microbatches": 2}
    for settings in ({}, cut):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
        plan = zs.Plan(ignored=("1", "2.bias", "3.bias"), **settings)
        example = (torch.zeros(2, 10),) if "pipeline_parallel" in settings else None
        engine = zs.Engine(model, OTHERS, plan, mesh=mesh, loss=lambda x, _: x.square().mean(), example=example)
        states.append(engine.state_dict())
    held = [name for name, parameter in model.named_parameters() if type(parameter) is nn.Parameter]
    return states, [name for name in held if not model.get_parameter(name).is_meta]


def test_ignored_parameters_on_meta_get_the_values_of_the_plain_plan(pool: Pool) -> None:
    held = []
    for (plain_state, of_stages), mine in pool.run(on_meta, 2):
        assert plain_state.keys() == of_stages.keys()
        assert all(torch.equal(of_stages[name], value) for name, value in plain_state.items())
        held.append(mine)
    assert held == [["1.weight", "1.bias"], ["2.bias", "3.bias"]]


def streamed(mesh: zs.Mesh, schedule: Any) -> Any:
    """Losses under a schedule without a flush: with a frozen ignored base, and with the same base frozen alone."""
    found = []
    for ignored in ((), ("embed.weight", "*.base.*")):
        model = build()
        for parameter in own_of(model):
            parameter.requires_grad_(False)
        stages, fp32 = (
            zs.Pipeline(2, schedule=schedule, split=("blocks.2",)),
            ("embed", "head", *(f"blocks.{n}.base" for n in range(4))),
        )
        kinds: dict[str, Any] = {"pipeline_parallel": stages, "precision": "bf16", "fp32_modules": fp32}
        plan = zs.Plan(zero=0, microbatches=4, ignored=ignored, **kinds)
        engine = zs.Engine(model, OTHERS, plan, mesh=mesh, example=(batch(0, 0, 8),))
        results = [engine.train_step((batch(step, 0, 1),)).loss for step in range(3)]
        with torch.no_grad():
            evaluated = engine(batch(9, 0, 1))
        found.append((results, evaluated, engine.state_dict()))
    return found


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_streams_with_a_frozen_ignored_base(pool: Pool, schedule: str) -> None:
    for (losses, evaluated, state), (again, evaluated_again, state_again) in pool.run(streamed, 2, schedule):
        assert losses == again and (evaluated is None or torch.equal(evaluated, evaluated_again))
        assert all(torch.equal(state_again[name], value) for name, value in state.items())


class Beside(nn.Module):
    """A teacher under no_grad beside blocks of a student, as for distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(x, wanted)


def distilled(mesh: zs.Mesh, stages: int) -> Any:
    torch.manual_seed(0)
    model = Beside()
    plan = zs.Plan(zero=0, microbatches=2, pipeline_parallel=stages, ignored=("teacher",))
    engine = zs.Engine(model, OTHERS, plan, mesh=mesh, example=(torch.randn(2, 6),))
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    losses: list[Any] = [engine.train_step((each,)).loss for each in batches]
    return list(map(float, losses)), engine.state_dict()


def test_a_teacher_beside_the_blocks(pool: Pool) -> None:
    losses, state = pool.run(distilled, 1, 1)[0]
    follows_plain_loop(pool.run(distilled, 2, 2), PlainRun(losses, weights=state))


def refused(mesh: zs.Mesh, case: str, folder: str) -> str:
    def engine_of(model: Model, ignored: tuple[str, ...]) -> zs.Engine:
        plan = zs.Plan(ignored=ignored, pipeline_parallel=2, microbatches=2)
        return zs.Engine(model, OTHERS, plan, mesh=mesh, example=(batch(0, 0, 8),))

    if case == "tied":
        model = build()
        model.embed.weight.requires_grad_(True)
        with pytest.raises(ModelError) as caught:
            engine_of(model, IGNORED)
        return str(caught.value)
    engine_of(build(), IGNORED).save(folder, wait=True)
    fewer = engine_of(build(), IGNORED[:-2])
    with pytest.raises(CheckpointError) as other:
        fewer.load(folder)
    return str(other.value)


def test_mistakes_are_named(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(refused, 2, "tied", ""):
        assert "'embed.weight' requires a gradient and is used on stages 0 and 1" in said and "requires_grad_" in said
    for said in pool.run(refused, 2, "other names", str(tmp_path / "saved")):
        assert "where the plan ignored 'blocks.0.base.bias'" in said and "Ignore the same" in said
