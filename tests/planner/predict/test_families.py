"""Peaks of families of transformers that no other test of the planner has, against a count of torch's allocations."""

from functools import partial
from typing import Any

import pytest
import torch
from planner.predict.test_shallow import ALONE, words
from planner.rehearsed import run_peak
from selection import by_default
from torch import nn

import zeroshard as zs
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask

TEXT: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
                        "intermediate_size": 128, "max_position_embeddings": 64, "use_cache": False}  # fmt: skip
FEWER_PAIRS: dict[str, Any] = {"num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {**FEWER_PAIRS, "sliding_window": None},
    "Qwen3": {**FEWER_PAIRS, "head_dim": 16},
    "Gemma2": {**FEWER_PAIRS, "head_dim": 16, "sliding_window": 32},
    "Phi3": FEWER_PAIRS,
    "GPTNeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 0},
    "Bloom": {"n_layer": 6, "n_head": 4},
    "Falcon": {"new_decoder_architecture": False, "alibi": False},
    "StableLm": FEWER_PAIRS,
    "Starcoder2": {**FEWER_PAIRS, "sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Olmo2": FEWER_PAIRS,
    "Cohere": FEWER_PAIRS,
    "Granite": FEWER_PAIRS,
    "Apertus": FEWER_PAIRS,
}
CASES = [(kind, precision) for kind in FAMILIES for precision in ("fp32", "bf16")]


def causal_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**TEXT, **FAMILIES[kind])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("case", by_default(CASES, ("Mistral", "bf16")), ids="-".join)
def test_peaks_are_those_of_runs(case: tuple[str, str]) -> None:
    kind, precision = case
    make, plan = partial(torch.optim.AdamW, lr=1e-3), zs.Plan(zero=0, precision=precision)
    job = TrainingTask(partial(causal_model, kind), words, make, 8, 48)
    predicted = predict(job, plan, ALONE, 8)
    assert predicted.peak_bytes == pytest.approx(run_peak(job, plan, 8), rel=0.005)


def test_parameters_made_by_torch_tensor_have_the_dtype_of_the_plan() -> None:
    """Tensors without values keep the values of such parameters, in the dtype in which they were made."""
    make, plan = partial(torch.optim.AdamW, lr=1e-3), zs.Plan(zero=0, precision="bf16")
    job = TrainingTask(partial(causal_model, "Apertus"), words, make, 8, 48)
    predicted = predict(job, plan, ALONE, 8, deep=True)
    assert predicted.mode == "fake"
    assert predicted.peak_bytes == pytest.approx(run_peak(job, plan, 8), rel=1e-5)
