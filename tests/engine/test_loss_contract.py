"""Losses by sum with counts: every token weighs the same, wherever ranks, microbatches and stages have it."""

import itertools
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Deep, Five
from pool import Pool, WorkerError
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from zeroshard.errors import BatchError, NonFiniteError, PlanError

ROWS, LENGTH, IGNORED = 24, 6, -100
KINDS = ("padded", "packed", "unequal", "starved rank", "starved microbatch")
SIZES = {  # rows of each data rank, where they have unequally many
    1: [24],
    2: [7, 17],
    4: [5, 4, 9, 6],
}
TOLERANCE = 1e-6
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NETWORK = {"transport": "network"}
TWO = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters"}
PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0, "clip_norm": 0.5},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2, **NETWORK},
    "zero 2 once": {"zero": 2, **NETWORK, "reduce_every": "step"},
    "zero 3": {"zero": 3, **NETWORK, "clip_norm": 0.5},
    "states": {"zero": 2, "offload": "optimizer"},
    "states late": {"zero": 2, "offload": "optimizer", "offload.speculate": False},
    "streamed": {"zero": 3, "offload": "optimizer,parameters", **NETWORK},
    "activations": {"zero": 1, "offload": "activations"},
    "gpipe": {**TWO, "zero": 0, "pipeline_parallel.schedule": "gpipe"},
    "1f1b": {**TWO, "zero": 1, "clip_norm": 0.5},
    "1f1b zero 3": {**TWO, "zero": 3, **NETWORK},
    "interleaved": {
        **TWO,
        "zero": 0,
        "pipeline_parallel.schedule": "interleaved",
        "pipeline_parallel.virtual_stages": 2,
    },
    "zb-h1": {**TWO, "zero": 2, "pipeline_parallel.schedule": "zb-h1"},
    "1f1b states": {**TWO, "zero": 1, "offload": "optimizer"},
    "uneven": {**TWO, "zero": 0, "pipeline_parallel.replicas": (2, 1)},
}
SEVERAL = ("zero 2 once", "interleaved", "uneven")  # which need more than one microbatch
Batch = tuple[Tensor, Tensor]


def logits_of(model: Five, tokens: Tensor, labels: Tensor) -> Tensor:
    """A forward to the logits; `labels` are for the loss function."""
    return model.head(model.body(model.embed(tokens), 0))


def build() -> nn.Module:
    """A model that returns logits, the same every time."""
    torch.manual_seed(0)
    model = Five()
    model.forward = partial(logits_of, model)  # type: ignore[method-assign]
    return model


def token_sum(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As users write it."""
    labels = batch[1].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"), (labels >= 0).sum()


def whole_batch(step: int, kind: str, ranks: int) -> tuple[Batch, list[int]]:
    """The rows of a step, and how many of them each data rank has."""
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(13, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(13, (ROWS, LENGTH), generator=generator)
    sizes = [ROWS // ranks] * ranks
    if kind == "padded":
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
        labels = labels.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    elif kind == "packed":
        labels = labels.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.2, IGNORED)
    else:
        sizes = SIZES.get(ranks, sizes)
        labels[: {"unequal": 0, "starved rank": sizes[0] if ranks > 1 else 0, "starved microbatch": 2}[kind]] = IGNORED
    return (tokens, labels), sizes


def own_part(step: int, kind: str, rank: int, ranks: int) -> Batch:
    """The rows of one data rank."""
    (tokens, labels), sizes = whole_batch(step, kind, ranks)
    return tokens.split(sizes)[rank], labels.split(sizes)[rank]


def optimizer_of(name: str) -> Any:
    """The host's own Adam is for AdamW."""
    return ADAMW if "offload" in PLANS[name] else SGD


def train(mesh: zs.Mesh, name: str, microbatches: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and final weights of one step of each kind."""
    plan = zs.Plan.from_dict({**PLANS[name], "microbatches": microbatches})
    example = own_part(0, "padded", 0, ROWS // 2)
    engine = zs.Engine(build(), optimizer_of(name), plan, mesh=mesh, loss=token_sum, example=example)
    losses, norms = [], []
    for step, kind in enumerate(KINDS):
        result = engine.train_step(own_part(step, kind, engine.data_rank, engine.data_ranks))
        assert result.loss is not None
        losses.append(result.loss.item())
        norms.append(result.grad_norm)
    return losses, norms, engine.state_dict()


def train_all(mesh: zs.Mesh, cases: list[tuple[str, int]]) -> list[Any]:
    """The cases of one rank count, one after the other."""
    return [train(mesh, *case) for case in cases]


@cache
def plain(name: str, data_ranks: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in one process, on whole batches."""
    model, limit = build(), PLANS[name].get("clip_norm", float("inf"))
    optimizer, losses, norms = optimizer_of(name)(model.parameters()), [], []
    for step, kind in enumerate(KINDS):
        batch, _ = whole_batch(step, kind, data_ranks)
        total, count = token_sum(model(*batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        losses.append((total / count).item())
        optimizer.step()
    return losses, norms, model.state_dict()


def cases_of(ranks: int) -> list[tuple[str, int]]:
    """Every plan that so many ranks can carry out."""
    names = [name for name, plan in PLANS.items() if ranks % plan.get("pipeline_parallel", 1) == 0 and name != "uneven"]
    cases = itertools.product(["uneven"] if ranks == 3 else names, (1, 4))
    return [(name, count) for name, count in cases if count > 1 or name not in SEVERAL]


def assert_equal_to_one_process(name: str, data_ranks: int, found: Any) -> None:
    losses, norms, weights = plain(name, data_ranks)
    torch.testing.assert_close(found[0], losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found[1], norms, rtol=5 * TOLERANCE, atol=TOLERANCE)
    for key, weight in weights.items():
        torch.testing.assert_close(found[2][key], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{key}: {m}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_weighs_the_same(pool: Pool, ranks: int) -> None:
    cases = cases_of(ranks)
    everyone = pool.run(train_all, ranks, cases) if ranks > 1 else [train_all(zs.init_mesh(), cases)]
    wrong = []
    for rank, answers in enumerate(everyone):
        for (name, microbatches), found in zip(cases, answers, strict=True):
            stages = PLANS[name].get("pipeline_parallel", 1)
            try:
                assert_equal_to_one_process(name, 1 if name == "uneven" else ranks // stages, found)
            except AssertionError as error:
                wrong.append(f"{name} with {microbatches} microbatches on rank {rank}: {error}")
    assert not wrong, "\n".join(wrong)
