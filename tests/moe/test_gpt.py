"""The built-in model with mixtures in the place of its feed-forward layers, under every layout."""

from typing import Any

import pytest
import torch
from pool import Pool

import zeroshard as zs
from zeroshard.moe.routing.balance import Losses
from zeroshard.moe.routing.gating import Gating
from zeroshard.moe.routing.router import Router
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig


def train(mesh: zs.Mesh, plans: list[dict[str, Any]]) -> list[tuple[list[float], list[str]]]:
    """Norms of three steps on four rows, and what an evaluation sends, under each plan."""
    found = []
    whole = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    for plan in plans:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocabulary=64, context=16, width=32, heads=2, layers=2))
        zs.moe.replace_ffn(model, every=1, experts=4, router="gshard")
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.gating = Gating(choices=2, normalise="before", losses=Losses(balance=0.1))
        of = zs.Plan.from_dict({"pipeline_parallel.balance": "parameters", **plan})
        example = {"tokens": whole[:1], "targets": whole[:1]}
        engine = zs.Engine(model, lambda p: torch.optim.SGD(p, lr=0.5), of, mesh=mesh, example=example)
        own = whole.chunk(engine.data_ranks)[engine.data_rank]
        norms = [engine.train_step({"tokens": own, "targets": own}).grad_norm for _ in range(3)]
        with torch.no_grad():
            engine(tokens=own, targets=own)
        found.append((norms, [str(purpose) for purpose, count in engine.sent_so_far.items() if count.calls]))
    return found


def test_layouts_agree(pool: Pool, whole: bool) -> None:
    """Two microbatches of two rows each, on as many data ranks or one behind the other."""
    plans: list[dict[str, Any]] = [
        {"zero": 3, "tensor_parallel": 2, "expert_parallel": 4},
        {"zero": 0, "expert_parallel": 2, "tensor_parallel": 2, "transport": "network"},
        {"pipeline_parallel": 2, "microbatches": 2, "tensor_parallel": 2, "expert_parallel": 2},
    ]
    (norms, _), *_ = train(zs.Mesh(), [{"microbatches": 2}])
    for answers in pool.run(train, 4, plans if whole else plans[2:]):
        for found, sent in answers:
            assert found == pytest.approx(norms, rel=1e-5)
            assert "exchange tokens" not in sent and "send to evaluate" in sent
