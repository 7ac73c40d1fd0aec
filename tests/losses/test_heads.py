"""`Plan(loss_chunk=...)` on several ranks: stages of ZeRO, pipelines, tied heads, precision, and the planner."""

from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from planner.rehearsed import SHAPE, run, task
from pool import Pool
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.planner.predict.rehearse import rehearse
from zeroshard.train.gpt import GPT

transformers = pytest.importorskip("transformers")
VOCABULARY, STEPS = 29, 3
TEXT = {
    "vocab_size": VOCABULARY, "use_cache": False, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "use_cache": False, "n_positions": 32, "n_embd": 12, "n_layer": 4, "n_head": 2,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TEXT),
    "gpt2": ("GPT2Config", GPT2),  # tied
    "gemma2": ("Gemma2Config", {**TEXT, "head_dim": 6, "final_logit_softcapping": 2.0}),  # tied
    "qwen3": ("Qwen3Config", {**TEXT, "head_dim": 6}),
}
NETWORK = {"transport": "network"}
CUT = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters"}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"zero": 0}),
    "zero3": (2, {"zero": 3, **NETWORK}),
    "zero3, head a unit": (2, {"zero": 3, "units": ("lm_head",), **NETWORK}),
    "zero3, shared": (2, {"zero": 3}),
    "stages": (2, {"zero": 0, **CUT}),
    "gpipe": (2, {"zero": 0, "pipeline_parallel.schedule": "gpipe", **CUT}),
    "zb-h1": (2, {"zero": 0, "pipeline_parallel.schedule": "zb-h1", **CUT}),
    "stages, zero3": (4, {"zero": 3, **CUT, **NETWORK}),
    "offloaded": (2, {"zero": 3, "offload": "optimizer,parameters,activations", **NETWORK}),
}


def model_of(name: str, device: str) -> Any:
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))


def tokens(step: int, rows: int = 4) -> dict[str, Tensor]:
    found = torch.randint(2, VOCABULARY, (rows, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": found, "labels": found}


def part(step: int, data_rank: int, data_ranks: int) -> dict[str, Tensor]:
    return {name: one.chunk(data_ranks)[data_rank] for name, one in tokens(step).items()}


def trained(mesh: zs.Mesh, name: str, plan: dict[str, Any], device: str = "cpu") -> Any:
    """Losses of this rank's rows in training and in evaluation, and the weights."""
    stages = plan.get("pipeline_parallel", 1)
    settings = {"microbatches": 2, "seed": 5, **plan}
    model = model_of(name, device)
    initialise = model._init_weights if device == "meta" else None
    example = tokens(0, 2) if stages > 1 else None
    engine = zs.Engine(
        model, OPTIMIZERS["sgd"], zs.Plan.from_dict(settings), mesh=mesh, initialise=initialise, example=example
    )
    ranks, rank = engine.data_ranks, engine.data_rank
    losses = []
    for step in range(STEPS):
        result = engine.train_step(part(step, rank, ranks))
        assert result.loss is not None
        losses.append(result.loss.item())
    with torch.no_grad():
        losses.append(engine(**part(STEPS, rank, ranks)).loss.item())
    return losses, engine.state_dict()


MATRIX = [*(("llama", plan) for plan in PLANS), *((name, "zero3") for name in CONFIGS if name != "llama")]
MATRIX += [("gpt2", plan) for plan in ("stages", "gpipe", "stages, zero3")] + [("gemma2", "stages")]


SHOWN = [("llama", "zero3, head a unit"), ("llama", "zb-h1"), ("llama", "offloaded")]
SHOWN += [("gpt2", "stages"), ("gemma2", "zero3")]


@pytest.mark.parametrize("case", by_default(MATRIX, *SHOWN), ids="-".join)
def test_a_model_trains_as_with_its_logits(pool: Pool, case: tuple[str, str]) -> None:
    name, plan = case
    ranks, settings = PLANS[plan]
    expected = pool.run(trained, ranks, name, settings)
    found = pool.run(trained, ranks, name, {**settings, "loss_chunk": 3})
    for (losses, weights), (others, theirs) in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-6)
        assert weights.keys() == theirs.keys()
        for key, value in weights.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", by_default(["llama", "gpt2"], "gpt2"))
def test_a_model_on_meta_is_cut(pool: Pool, name: str) -> None:
    plan = {"zero": 0, **CUT}
    expected = pool.run(trained, 2, name, plan, "meta")[0]
    found = pool.run(trained, 2, name, {**plan, "loss_chunk": 3}, "meta")[0]
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("precision", by_default(["bf16", "fp16"], "fp16"))
def test_a_model_trains_in_16_bits(pool: Pool, precision: str) -> None:
    plan = {"zero": 2, "precision": precision}
    expected = pool.run(trained, 2, "llama", plan)[0]
    found = pool.run(trained, 2, "llama", {**plan, "loss_chunk": 3})[0]
    assert found[0] == pytest.approx(expected[0], rel=1e-2)


def chunk_of_built_in(mesh: zs.Mesh, chunk: int | None) -> tuple[int | None, float]:
    torch.manual_seed(0)
    engine = zs.Engine(GPT(SHAPE), OPTIMIZERS["sgd"], zs.Plan(zero=3, loss_chunk=chunk, **NETWORK), mesh=mesh)
    drawn = torch.randint(SHAPE.vocabulary, (2, 16))
    result = engine.train_step({"tokens": drawn, "targets": drawn})
    assert result.loss is not None
    return engine.model.head.loss_chunk, result.loss.item()


def test_the_built_in_model_takes_the_chunk_of_the_plan(pool: Pool) -> None:
    (default, loss), (given, other) = (pool.run(chunk_of_built_in, 2, chunk)[0] for chunk in (None, 5))
    assert (default, given) == (None, 5)
    assert other == pytest.approx(loss, rel=1e-6)


PLANNED: list[dict[str, Any]] = [{"zero": 3, **NETWORK}, {"zero": 0, "microbatches": 2, **CUT}]


@pytest.mark.parametrize("plan", by_default(PLANNED, PLANNED[0]))
def test_the_planner_counts_the_memory_of_chunks(pool: Pool, plan: dict[str, Any], whole: bool) -> None:
    chunked = {**plan, "loss_chunk": 16}
    real = pool.run(run, 2, chunked, "sgd", 8, 6)
    for rank in range(2 if whole else 1):
        peaks = [rehearse(task("sgd"), zs.Plan.from_dict(one), rank, 2, 8).peak_bytes for one in (chunked, plan)]
        assert peaks[0] == pytest.approx(real[rank]["peak"], rel=0.001)
        assert peaks[0] <= peaks[1]
