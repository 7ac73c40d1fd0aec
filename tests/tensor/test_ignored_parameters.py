"""Ignored parameters on ranks that split layers or share out experts, against a plain loop with two optimizers."""

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
from zeroshard.errors import PlanError
from zeroshard.train.gpt import Attention, GPTConfig

STEPS = 3
OWN = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OTHERS = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
FROZEN = ("blocks.0", "blocks.2.up.bias", "*.norm.weight", "blocks.3.attention")  # so that sequences are whole
APART = ("blocks.0.up", "blocks.2.up.bias", "*.norm.weight")  # in blocks in which each rank has positions of its own
TRAINED = ("embed.weight", "head", "scale")  # the head is tied with the embedding


class Block(nn.Module):
    """A residual block of attention and a pair of linear layers, which ranks split, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = (
            nn.LayerNorm(8),
            Attention(GPTConfig(vocabulary=13, context=6, width=8, heads=2, layers=4)),
        )
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a tied output layer, whose logits are scaled."""

    def __init__(self, mixture: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.mixture = zs.moe.MoE(8, 12, 4, router="mixtral") if mixture else nn.Identity()
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((13,), 1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.mixture(x)) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(seed: int = 0, mixture: bool = False) -> Model:
    torch.manual_seed(seed)
    model = Model(mixture)
    model.blocks[0].requires_grad_(False)
    model.blocks[3].attention.requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    for block in model.blocks:
        block.norm.weight.requires_grad_(False)
    return model


def batch(step: int, rank: int, ranks: int) -> Tensor:
    """A data rank's part of the tokens [8, 7] of a step."""
    return torch.randint(13, (8, 7), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def own_of(model: Model, ignored: tuple[str, ...]) -> list[nn.Parameter]:
    """The ignored parameters that the user trains."""
    every = {
        "embed.weight": model.embed.weight,
        "scale": model.scale,
        "LayerNorm": [b for block in model.blocks[1:] for b in (block.norm.bias, *block.first.parameters())],
    }
    found = [every[name] for name in ignored if name in every]
    return [p for each in found for p in (each if isinstance(each, list) else [each])]


def plain(mixture: bool, ignored: tuple[str, ...]) -> PlainRun:
    model = build(mixture=mixture)
    batches = [batch(step, 0, 1) for step in range(STEPS)]
    return loop_of_two(model, own_of(model, ignored), (OWN, OTHERS), 0.05, batches)


def train(mesh: zs.Mesh, settings: dict[str, Any], ignored: tuple[str, ...], mixture: bool, folder: str) -> Any:
    model = build(mixture=mixture)
    own = own_of(model, ignored)
    plan = zs.Plan(ignored=ignored, clip_norm=0.05, **settings)
    example = (batch(0, 0, 4),) if plan.pipelined else None
    engine = zs.Engine(model, OTHERS, plan, mesh=mesh, example=example)
    if not plan.pipelined and ignored[0].startswith("blocks.0"):
        assert type(model.blocks[0].up.weight) is nn.Parameter and model.blocks[0].up.weight.shape == (12, 8)
        assert FROZEN[1] not in ignored or model.blocks[2].up.weight.shape == (12, 8)  # its bias is ignored
        assert model.blocks[1].up.weight.shape == (12 // plan.tensor.ranks, 8)
    mine, losses = OWN(own) if own else None, []
    for step in range(STEPS):
        result = engine.train_step((batch(step, engine.data_rank, engine.data_ranks),))
        assert result.loss is not None
        losses.append(float(result.loss))
        average(mesh, own, engine.data_ranks * plan.tensor.ranks)
        if mine is not None:
            mine.step()
            mine.zero_grad()
        if step == 1:
            engine.save(folder, wait=True)
    table = {row.category: row for row in engine.memory().rows if row.tier == "device"}["parameters"]
    assert table.planned_bytes == table.measured_bytes - (table.padding_bytes or 0)
    engine.check_replicas()
    ended = losses, engine.state_dict()
    walked = dict(engine.weights())
    assert walked.keys() >= ended[1].keys() - {"head.weight"}
    assert all(torch.equal(value, ended[1][name]) for name, value in walked.items())
    engine.load(folder)
    assert not torch.equal(engine.state_dict()["blocks.1.up.weight"], ended[1]["blocks.1.up.weight"])
    engine.load_state_dict(ended[1])
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in ended[1].items())
    return ended


ALONE = {"tensor_parallel": zs.TensorParallel(2, sequence=False)}
CASES: dict[str, tuple[int, dict[str, Any], tuple[str, ...], bool]] = {
    "frozen": (2, {"tensor_parallel": 2, "zero": 0}, FROZEN, False),
    "frozen, own positions": (4, {"tensor_parallel": 2, "zero": 2}, APART, False),
    "trained, own positions": (4, {"tensor_parallel": 2, "zero": 1}, APART + TRAINED, False),
    "trained, own positions, stage 3": (4, {"tensor_parallel": 2, "zero": 3}, APART + TRAINED, False),
    "trained, whole positions": (2, {**ALONE, "zero": 1, "microbatches": 2}, FROZEN + TRAINED, False),
    "trained, stage 3": (4, {**ALONE, "zero": 3, "transport": "network"}, FROZEN + TRAINED, False),
    "trained norms": (2, {**ALONE, "zero": 0}, ("LayerNorm", "blocks.0"), False),
    "stages": (
        4,
        {"tensor_parallel": 2, "pipeline_parallel": 2, "zero": 1, "microbatches": 2},
        (*APART, "scale"),
        False,
    ),
    "experts": (2, {"expert_parallel": 2, "zero": 1}, (*FROZEN, *TRAINED), True),
    "experts and tensor": (4, {"expert_parallel": 2, "zero": 2, **ALONE}, (*FROZEN, "scale"), True),
}


@pytest.mark.parametrize("case", CASES)
def test_ignored_parameters_stay_whole(pool: Pool, case: str, tmp_path: Path) -> None:
    ranks, settings, ignored, mixture = CASES[case]
    answers = pool.run(train, ranks, settings, ignored, mixture, str(tmp_path / "saved"))
    follows_plain_loop(answers, plain(mixture, ignored))


def moved(mesh: zs.Mesh, settings: dict[str, Any], source: str, folder: str) -> Any:
    """A step, and a checkpoint; or what a checkpoint of another plan holds, and the step after it."""
    model = build(7 if source else 0)
    plan = zs.Plan(ignored=(*FROZEN, "scale"), **settings)
    engine = zs.Engine(model, OTHERS, plan, mesh=mesh, example=(batch(0, 0, 4),) if plan.pipelined else None)
    if source:
        engine.load(source)
    else:
        engine.train_step((batch(0, engine.data_rank, engine.data_ranks),))
    before = engine.state_dict()
    if folder:
        engine.save(folder, wait=True)
        engine.export(f"{folder}-exported")
    loss = engine.train_step((batch(1, engine.data_rank, engine.data_ranks),)).loss
    assert loss is not None
    return before, float(loss)


MOVES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 2}),
    "tensor": (2, {"tensor_parallel": 2, "zero": 1}),
    "tensor and stages": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "microbatches": 2}),
}


@pytest.mark.parametrize("first", MOVES)
def test_checkpoints_move_between_plans(pool: Pool, first: str, tmp_path: Path) -> None:
    saved, exported = tmp_path / "saved", build(3)
    before, loss = pool.run(moved, *MOVES[first], "", str(saved))[0]
    whole = zs.Engine(exported, OTHERS, zs.Plan())
    whole.load_weights(f"{saved}-exported")
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    for ranks, settings in MOVES.values():
        for found, again in pool.run(moved, ranks, settings, str(saved), ""):
            assert all(torch.equal(found[name], value) for name, value in before.items())
            assert again == pytest.approx(loss, rel=1e-5)


class Blocks(nn.Module):
    """Blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def on_meta(mesh: zs.Mesh) -> Any:
    """The weights that an engine gives a model on the meta device, with ignored parameters and without."""
    states = []
    for ignored in ((), ("blocks.0", "blocks.2.up")):
        with torch.device("meta"):
            model = Blocks()
        plan = zs.Plan(tensor_parallel=zs.TensorParallel(2, sequence=False), ignored=ignored)
        states.append(zs.Engine(model, OTHERS, plan, mesh=mesh).state_dict())
    return states


def test_ignored_parameters_on_meta_get_the_values_of_a_plan_that_ignores_none(pool: Pool) -> None:
    for one, other in pool.run(on_meta, 2):
        assert one.keys() == other.keys() and all(torch.equal(other[name], value) for name, value in one.items())


def refused(mesh: zs.Mesh, settings: dict[str, Any], ignored: tuple[str, ...], mixture: bool) -> str:
    with pytest.raises(PlanError) as caught:
        zs.Engine(build(mixture=mixture), OTHERS, zs.Plan(ignored=ignored, **settings), mesh=mesh)
    return str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], bool, str]] = {
    "own positions": ({"tensor_parallel": 2}, ("blocks.1.norm.bias",), False, "sequence=False"),
    "a layer of the user's plan": (
        {"tensor_parallel": zs.TensorParallel(2, layers={"blocks.*.up": "column", "blocks.*.down": "row"})},
        ("blocks.1.up",),
        False,
        "'blocks.1.up' the style 'column', and the plan ignores",
    ),
    "nothing left to split": ({"tensor_parallel": 2}, ("blocks", "embed"), False, "the plan ignores its parameters"),
    "experts": ({"expert_parallel": 2}, ("mixture",), True, "routers and layers around may be ignored"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_name_the_way_out(pool: Pool, case: str) -> None:
    settings, ignored, mixture, said = REFUSED[case]
    for sentence in pool.run(refused, 2, settings, ignored, mixture):
        assert said in sentence
