"""Narrowed models keep their kinds of parts in proportion, and as many blocks as a plan can cut."""

import json
from pathlib import Path

import pytest
import torch
from engine import models

import zeroshard as zs
from zeroshard.errors import ModelError
from zeroshard.verification.narrow import (
    config_of,
    depth,
    difference,
    language_factory,
    narrowed,
    shallow_factory,
    token_batch,
)

transformers = pytest.importorskip("transformers")
LARGE = {
    "LlamaConfig": {"num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096},
    "GPT2Config": {"n_embd": 1600, "n_head": 25, "n_layer": 48},
    "MixtralConfig": {},
    "Qwen3MoeConfig": {"num_experts": 128, "num_experts_per_tok": 8},
    "DeepseekV3Config": {},
    "Gemma2Config": {},
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_configuration_becomes_a_small_model_that_trains(kind: str) -> None:
    config = getattr(transformers, kind)(**LARGE[kind])
    small = narrowed(config, zs.Plan(pipeline_parallel=2))
    torch.manual_seed(0)
    model = language_factory(small)()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert small.num_hidden_layers == 4 and small.vocab_size < 1000
    loss = model(**token_batch(small.vocab_size, 2)).loss
    loss.backward()
    assert torch.isfinite(loss) and "vocab_size" in difference(config, small)


def test_heads_keep_their_proportion_and_a_batch_of_ones_own_its_words() -> None:
    config = transformers.LlamaConfig(num_key_value_heads=8, num_attention_heads=32, vocab_size=32000)
    small = narrowed(config, zs.Plan(), tokens=False)
    assert small.num_attention_heads == 2 * small.num_key_value_heads == 4
    assert small.vocab_size == 32000 and small.max_position_embeddings == config.max_position_embeddings


def test_a_path_an_object_and_what_is_neither(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert config_of(str(file)).hidden_size == config_of(tmp_path).hidden_size == 64  # type: ignore[union-attr]
    assert config_of(transformers.LlamaConfig()) is not None and config_of(models.Five) is None
    file.write_text("{}")
    with pytest.raises(ModelError, match="is no Hugging Face configuration"):
        config_of(file)


def test_many_like_blocks_become_as_many_as_the_plan_cuts() -> None:
    plan = zs.Plan(pipeline_parallel=zs.Pipeline(2, schedule="interleaved", virtual_stages=3), microbatches=2)
    assert depth(zs.Plan()) == 4 and depth(plan) == 6
    factory, text = shallow_factory(models.Deep, zs.Plan())
    assert len(factory().blocks) == 4 and text == "blocks 12 -> 4 blocks"  # type: ignore[arg-type]
    assert shallow_factory(models.Five, plan) == (models.Five, "")
