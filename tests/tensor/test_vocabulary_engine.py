"""Engines that split embedding and output layer, over stages of ZeRO and of pipelines, beside engines that do not."""

from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from pool import Pool
from selection import by_default
from split_models.vocabularies import Widths, seeded
from torch import Tensor

import zeroshard as zs
from tensor.test_vocabulary_models import MODELS, V

transformers = pytest.importorskip("transformers")
STEPS = 3
CUT = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "zero": 0}
NETWORK = {"transport": "network"}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks that the vocabulary is not split over, and the plan
    "zero0": (1, {"zero": 0}),
    "zero0, network": (1, {"zero": 0, **NETWORK}),
    "zero2": (2, {"zero": 2}),
    "zero3": (2, {"zero": 3, **NETWORK}),
    "zero3, head a unit": (2, {"zero": 3, "units": ("lm_head",), **NETWORK}),
    "offloaded": (1, {"zero": 3, "offload": "optimizer,parameters,activations", **NETWORK}),
    "1f1b": (2, CUT),
    "gpipe": (2, {**CUT, "pipeline_parallel.schedule": "gpipe"}),
    "zb-h1": (2, {**CUT, "pipeline_parallel.schedule": "zb-h1"}),
    "chunks of rows": (1, {"zero": 0, "loss_chunk": 3}),
}
LAYERS = {"num_hidden_layers": 2, "n_layer": 2, "num_key_value_heads": 2}
MATRIX = [*(("llama", plan) for plan in PLANS), ("gpt2", "1f1b"), ("gpt2", "zb-h1"), ("gpt2", "zero3")]
MATRIX += [("gemma2", "1f1b"), ("t5", "zero0"), ("t5", "zero3"), ("bert", "zero2"), ("bert", "gpipe")]
SHOWN = [*(("llama", plan) for plan in ("zero0", "zero3, head a unit", "offloaded", "zb-h1", "chunks of rows"))]
SHOWN += [("gpt2", "1f1b"), ("t5", "zero0")]


def model_of(name: str) -> Any:
    kind, config, settings, _, _ = MODELS[name]
    settings = {**settings, **{key: value for key, value in LAYERS.items() if key in settings}}
    seeded(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


def part(step: int, data_rank: int, data_ranks: int) -> dict[str, Tensor]:
    tokens = torch.randint(2, V, (4, 10), generator=torch.Generator().manual_seed(step))
    own = tokens.chunk(data_ranks)[data_rank]
    return {"input_ids": own, "labels": own}


def trained(mesh: zs.Mesh, name: str, plan: dict[str, Any], ranks: int) -> Any:
    """Losses in training and in evaluation, norms, weights, and operations that made tensors of all classes."""
    settings: dict[str, Any] = {"microbatches": 2, "seed": 5, "clip_norm": 0.5, **plan}
    if ranks > 1:
        settings |= {"tensor_parallel": ranks, "tensor_parallel.sequence": False}
    staged = plan.get("pipeline_parallel", 1) > 1
    example = part(0, 0, 2) if staged else None
    engine = zs.Engine(model_of(name), OPTIMIZERS["sgd"], zs.Plan.from_dict(settings), mesh=mesh, example=example)
    data_ranks, data_rank = engine.data_ranks, engine.data_rank
    losses, norms = [], []
    with Widths(V) as wide:
        for step in range(STEPS):
            result = engine.train_step(part(step, data_rank, data_ranks))
            assert result.loss is not None
            losses.append(result.loss.item())
            norms.append(result.grad_norm)
    if not staged:
        with torch.no_grad():
            losses.append(engine(**part(STEPS, data_rank, data_ranks)).loss.item())
    return losses, norms, engine.state_dict(), wide.found


@pytest.mark.parametrize("case", by_default(MATRIX, *SHOWN), ids="-".join)
def test_an_engine_with_a_split_vocabulary_trains_as_one_without(pool: Pool, case: tuple[str, str]) -> None:
    name, plan = case
    others, settings = PLANS[plan]
    expected = pool.run(trained, others, name, settings, 1)
    found = pool.run(trained, 2 * others, name, settings, 2)
    for rank, (losses, norms, weights, wide) in enumerate(found):
        theirs = expected[rank // 2]
        assert losses == pytest.approx(theirs[0], rel=2e-6)
        assert norms == pytest.approx(theirs[1], rel=1e-5)
        assert not wide
        assert weights.keys() == theirs[2].keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, theirs[2][key], rtol=1e-5, atol=1e-6)
