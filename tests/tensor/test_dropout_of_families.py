"""Families of models with dropout train as in one process with exact numbers, and meet their own with fast ones."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from split_models.small_models import VOCABULARY, family
from torch import Tensor, nn

import zeroshard as zs

ROWS, TIME, STEPS = 3, 10, 3  # 4 ranks have 3, 3, 3 and 1 positions; of OPT, which flattens rows, 2 each
RATES: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2},
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gemma2": {"attention_dropout": 0.2},
    "phi3": {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "falcon": {"attention_dropout": 0.2, "hidden_dropout": 0.2},
    "falcon-groups": {"attention_dropout": 0.2, "hidden_dropout": 0.2},
    "opt": {"dropout": 0.2, "attention_dropout": 0.2},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
    "t5": {"dropout_rate": 0.2, "decoder_start_token_id": 0},
}
ADAM = partial(torch.optim.AdamW, lr=1e-3)


def model_of(name: str, attention: str) -> Any:
    torch.manual_seed(0)
    model = family(name, "cpu", **RATES.get(name, {}))
    if name == "gpt":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.2
    else:
        model.set_attn_implementation(attention)
    return model


def batch(name: str, step: int, rows: int = ROWS) -> dict[str, Tensor]:
    time = 8 if name == "opt" else TIME
    tokens = torch.randint(3, VOCABULARY, (rows, time), generator=torch.Generator().manual_seed(step))
    if name == "gpt":
        return {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    return {
        "input_ids": tokens,
        "labels": tokens,
        **({"attention_mask": torch.ones_like(tokens)} if name == "t5" else {}),
    }


def train(
    mesh: zs.Mesh | None,
    name: str,
    plan: dict[str, Any],
    attention: str = "sdpa",
    recompute: dict[str, bool] | None = None,
) -> list[float]:
    """The losses of some steps; `recompute` are arguments of torch's checkpoint around each block."""
    model = model_of(name, attention)
    if recompute is not None:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(recompute)
    torch.manual_seed(5 if mesh is None else mesh.rank)
    engine = zs.Engine(model, ADAM, zs.Plan.from_dict({"zero": 0, "rng": "exact", **plan}), mesh=mesh)
    losses = []
    for step in range(STEPS):
        result = engine.train_step(batch(name, step))
        assert result.loss is not None
        losses.append(float(result.loss))
    return losses


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", by_default(["gpt", *RATES], "gpt", "gpt2"))
def test_exact_dropout_is_that_of_one_process(pool: Pool, name: str, sequence: bool) -> None:
    pytest.importorskip("transformers")
    attention = "eager" if name in ("gemma2", "opt") else "sdpa"
    wanted = train(None, name, {}, attention)
    for ranks in (2, 4):
        split = {"tensor_parallel": ranks, "tensor_parallel.sequence": sequence}
        for losses in pool.run(train, ranks, name, split, attention):
            assert losses == pytest.approx(wanted, rel=1e-5), ranks


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", by_default(["gpt2", "bert", "t5", "llama"], "llama"))
def test_exact_dropout_of_recomputed_blocks_is_that_of_one_process(pool: Pool, name: str, reentrant: bool) -> None:
    attention = "sdpa" if name == "llama" else "eager"
    wanted = train(None, name, {"microbatches": 3}, attention)
    split = {"tensor_parallel": 2, "microbatches": 3}
    for losses in pool.run(train, 2, name, split, attention, {"use_reentrant": reentrant}):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", by_default(["gpt2", "opt", "t5"], "opt"))
def test_fast_dropout_of_recomputed_blocks_is_that_of_their_forward(pool: Pool, name: str, sequence: bool) -> None:
    """Losses of later steps depend on gradients, and so on the masks of the recomputation."""
    pytest.importorskip("transformers")
    split = {"tensor_parallel": 2, "tensor_parallel.sequence": sequence, "rng": "fast"}
    plain, twin = pool.run(train, 2, name, split, "eager")
    assert plain == twin
    assert plain[0] != pytest.approx(train(None, name, {}, "eager")[0], rel=1e-4)
    for losses in pool.run(train, 2, name, split, "eager", {"use_reentrant": False}):
        assert losses == pytest.approx(plain, rel=1e-6)
    forgets = {"use_reentrant": False, "preserve_rng_state": False}
    for losses in pool.run(train, 2, name, split, "eager", forgets):
        assert losses[0] == pytest.approx(plain[0], rel=1e-6) and losses[2] != pytest.approx(plain[2], rel=1e-5)


def train_in_stages(mesh: zs.Mesh | None, plan: dict[str, Any]) -> list[float]:
    """The losses of some steps of four rows in two microbatches."""
    torch.manual_seed(5 if mesh is None else mesh.rank)
    plan = {"zero": 0, "rng": "exact", "microbatches": 2, **plan}
    model, example = model_of("gpt", ""), batch("gpt", 0, 2)
    engine = zs.Engine(model, ADAM, zs.Plan.from_dict(plan), mesh=mesh, example=example)
    results = [engine.train_step(batch("gpt", step, 4)) for step in range(STEPS)]
    return [float(result.loss) for result in results]  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", by_default([False, True], True), ids=["whole", "sequence"])
def test_dropout_in_stages_of_two_ranks_each(pool: Pool, sequence: bool) -> None:
    """Exact numbers are those of one process, fast ones those of the forward, where a chunk is computed again too."""
    wanted = train_in_stages(None, {})
    split = {"tensor_parallel": 2, "tensor_parallel.sequence": sequence, "pipeline_parallel": 2}
    fast = []
    for recompute in ("off", "blocks"):
        for losses in pool.run(train_in_stages, 4, {**split, "recompute": recompute}):
            assert losses == pytest.approx(wanted, rel=1e-5)
        fast += pool.run(train_in_stages, 4, {**split, "recompute": recompute, "rng": "fast"})
    assert all(losses == pytest.approx(fast[0], rel=1e-6) for losses in fast)
    assert fast[0][0] != pytest.approx(wanted[0], rel=1e-4)
