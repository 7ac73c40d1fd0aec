"""Experts as modules that are called only with tokens: without any in a step they stay, as in a plain loop."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from moe.mixed import WIDTH
from zeroshard.moe.experts.families import find_experts

EXPERTS, STEPS, ROWS = 4, 4, 4  # expert number = token number; rows of each data rank
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.3),
    "sgd": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1),
}
Settings = Mapping[str, Any]


class Listed(nn.ModuleList):
    """Experts as transformers lists them: those without tokens are not called."""

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D], [T, 1], [T, 1]."""
        output = torch.zeros_like(x)
        for number in top_k_index.unique().tolist():
            rows = (top_k_index == number).any(-1)
            output[rows] = self[number](x[rows]) * top_k_weights[rows]
        return output


class Block(nn.Module):
    """A residual block, whose tokens go to the experts of their numbers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        make = lambda: nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))  # noqa: E731
        self.experts = Listed(make() for _ in range(EXPERTS))

    def forward(self, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.norm(x).flatten(0, 1)
        mixed = self.experts(tokens, numbers.reshape(-1, 1), self.gate(tokens).sigmoid())
        return x + mixed.view_as(x), numbers


class Numbered(nn.Module):
    """Two such blocks; `shared` calls the first one twice, the second time with the other experts."""

    def __init__(self, hidden: int = 6, shared: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.shared = nn.Embedding(EXPERTS, WIDTH), nn.Linear(WIDTH, 1), shared
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))

    def forward(self, numbers: Tensor) -> Tensor:
        """The loss of [B, T]."""
        x = self.embed(numbers)
        for block in self.blocks:
            x, numbers = block(x, numbers)
        if self.shared:
            x, numbers = self.blocks[0](x, EXPERTS - 1 - numbers)
        return F.softplus(self.head(x)).mean()


def batch(step: int, data_rank: int) -> Tensor:
    """Expert 1 never gets a token; 3 in the first step alone; 2 in step 2 alone, from the last row of the last rank."""
    numbers = torch.zeros(ROWS, 3, dtype=torch.int64)
    if step == 0:
        numbers[:, 1] = 3
    if step == 2 and data_rank % 2:
        numbers[-1, 2] = 2
    return numbers


def build(model: Settings) -> Numbered:
    torch.manual_seed(0)
    return Numbered(**model)


@functools.cache
def plain(options: tuple[tuple[str, Any], ...], optimizer: str, data_ranks: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a loop in one process, on the rows of all ranks at once."""
    net = build(dict(options))
    updates, losses = OPTIMIZERS[optimizer](net.parameters()), []
    for step in range(STEPS):
        updates.zero_grad()
        loss = net(torch.cat([batch(step, rank) for rank in range(data_ranks)]))
        loss.backward()
        updates.step()
        losses.append(float(loss.detach()))
    return losses, net.state_dict()


def follow(mesh: zs.Mesh, runs: list[tuple[Settings, Settings, str]]) -> list[Any]:
    """What one rank sees of several runs: losses, weights, planned and measured elements."""
    seen = []
    for model, plan, name in runs:
        engine = zs.Engine(
            build(model), OPTIMIZERS[name], zs.Plan.from_dict({"transport": "network", **plan}), mesh=mesh,
            loss=lambda output, _: output, example=batch(0, 0)[:1],
        )  # fmt: skip
        results = [engine.train_step(batch(step, engine.data_rank)) for step in range(STEPS)]
        engine.flush()
        engine.check_replicas()
        wire = {r.purpose: (r.planned_elements, r.measured_elements) for r in engine.traffic()}
        seen.append(([each.loss for each in results], engine.state_dict(), wire))
    return seen


TWO = {"expert_parallel": 2}
HALVES = {**TWO, "microbatches": 2}
BIG = {"hidden": 2049}  # matrices that are no small parameters
AGAIN = {"recompute": "blocks"}
STREAMED = {**TWO, "zero": 3, "offload": "optimizer,parameters"}
Run = tuple[Settings, Settings, str]
RUNS: dict[str, tuple[int, list[Run]]] = {
    "stages": (2, [({}, {**TWO, "zero": zero}, name) for zero in range(4) for name in OPTIMIZERS]),
    "big": (2, [(BIG, {**HALVES, "zero": 0}, "sgd"), (BIG, {**HALVES, "zero": 3}, "adamw")]),
    "accumulation": (
        2,
        [({}, {**HALVES, "reduce_every": "step"}, "adamw"), ({}, {**HALVES, **AGAIN, "zero": 2}, "sgd")],
    ),
    "offload": (2, [({}, {**TWO, "zero": 2, "offload": "optimizer"}, "adamw"), (BIG, STREAMED, "adamw")]),
    "shared": (2, [({"shared": True}, {**TWO, "zero": 3}, "sgd"), ({}, {**TWO, "transport": "shared"}, "adamw")]),
    "data ranks": (4, [({}, {**TWO, "zero": 2}, "adamw")]),
    "pipeline": (4, [({}, {**HALVES, "zero": zero, "pipeline_parallel": 2}, "adamw") for zero in (0, 1)]),
}


@pytest.mark.parametrize("case", RUNS)
def test_experts_without_tokens_stay_as_they_are(pool: Pool, case: str) -> None:
    ranks, runs = RUNS[case]
    everyone = pool.run(follow, ranks, runs)
    for number, (model, plan, name) in enumerate(runs):
        data_ranks = ranks // plan.get("pipeline_parallel", 1)
        losses, weights = plain(tuple(model.items()), name, data_ranks)
        seen = [mine[number] for mine in everyone]
        for step, loss in enumerate(losses):
            found = [float(mine[0][step]) for mine in seen if mine[0][step] is not None]
            assert sum(found) / len(found) == pytest.approx(loss, rel=1e-6), (plan, name, step)
        for _, state, wire in seen:
            for key, value in weights.items():
                torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-6, msg=f"{plan}, {name}: {key}")
            if not model.get("shared"):  # a unit that is used twice is gathered more often than planned
                more = {
                    name: counts for name, counts in wire.items() if counts[0] is not None and counts[0] < counts[1]
                }
                assert not more, plan  # nothing was reduced twice, because it came late


def test_the_model_is_one_of_listed_experts_and_some_never_get_tokens() -> None:
    found = find_experts(build({}))
    assert [(len(each.modules), each.stacked) for each in found] == [(EXPERTS, ())] * 2
    before, (_, after) = build({}).state_dict(), plain((), "adamw", 2)
    keys = [f"blocks.0.experts.{number}.0.weight" for number in range(EXPERTS)]
    assert [torch.equal(before[key], after[key]) for key in keys] == [False, True, False, False]


def resume(mesh: zs.Mesh, folder: str) -> bool:
    """Whether a new engine goes on from a checkpoint as the engine that wrote it, bit for bit."""
    plan = zs.Plan(**TWO, zero=2, transport="network")
    make = lambda: zs.Engine(build({}), OPTIMIZERS["adamw"], plan, mesh=mesh, loss=lambda output, _: output)  # noqa: E731
    first = make()
    for step in range(2):
        first.train_step(batch(step, mesh.rank))
    first.save(folder)
    second = make()
    second.load(folder)
    for engine in (first, second):
        for step in range(2, STEPS):
            engine.train_step(batch(step, mesh.rank))
    states = second.state_dict()
    return all(torch.equal(value, states[name]) for name, value in first.state_dict().items())


def test_a_run_with_experts_that_have_no_optimizer_states_yet_is_resumed(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resume, 2, str(tmp_path / "saved")) == [True, True]
