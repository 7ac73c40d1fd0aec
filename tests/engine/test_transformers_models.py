"""Hugging Face models, unmodified and built from a configuration, train as they do in one process, and generate."""

import functools
from typing import Any

import pytest
import torch
from engine.zoo import Case, alone, batch, check, engine_for, train
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs

transformers = pytest.importorskip("transformers")
VOCABULARY = 29
TEXT = {"vocab_size": VOCABULARY, "use_cache": False}
LLAMA = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def words(generator: torch.Generator) -> dict[str, Any]:
    """Four rows of ten tokens that are to be continued."""
    tokens = torch.randint(2, VOCABULARY, (4, 10), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def pairs(generator: torch.Generator) -> dict[str, Any]:
    """Four rows of tokens and their translations."""
    tokens = torch.randint(2, VOCABULARY, (4, 9), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1)[:, :7].contiguous()}


def images(generator: torch.Generator) -> dict[str, Any]:
    """Four images with their classes."""
    pixels = torch.randn(4, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(3, (4,), generator=generator)}


def gpt2() -> nn.Module:
    """Tied embeddings, dropout off."""
    config = transformers.GPT2Config(
        **TEXT, n_positions=32, n_embd=12, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Rotary positions, grouped queries, gated layers."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **LLAMA))


def llama_thrifty() -> nn.Module:
    """The same, recomputing its blocks in the way that the library offers."""
    model: Any = llama()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def mixtral() -> nn.Module:
    """A sparse mixture of four experts, two for each token."""
    config = transformers.MixtralConfig(**TEXT, **LLAMA, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    """An encoder and a decoder that share the embedding, and biases that the first block hands on to the others."""
    config = transformers.T5Config(
        **TEXT, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """A vision transformer with a class token."""
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, words),
    "llama": Case(llama, words),
    "llama-thrifty": Case(llama_thrifty, words),
    "mixtral": Case(mixtral, words),
    "t5": Case(t5, pairs),
    "vit": Case(vit, images),
}
PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3, "transport": "network"},
    "zero3-shared": {"zero": 3},
}
MATRIX = [*((name, plan) for name in CASES for plan in ("zero2", "zero3")), ("t5", "zero0"), ("mixtral", "zero1")]


@functools.cache
def reference(name: str) -> Any:
    """What the plain loop gives."""
    return alone(CASES[name])


def train_case(mesh: zs.Mesh, name: str, plan: str) -> Any:
    """Train one of these models on this rank."""
    return train(mesh, CASES[name], **PLANS[plan])


@pytest.mark.parametrize("name, plan", MATRIX)
def test_trains_as_in_one_process(pool: Pool, name: str, plan: str) -> None:
    check(pool.run(train_case, 2, name, plan), *reference(name))


def continuations(model: Any, rank: int) -> list[Tensor]:
    """What a model writes after two prompts, greedily and by beam search; the ranks write unlike lengths."""
    rows = torch.randint(2, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(rank))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(rows), "do_sample": False, "use_cache": True}
    return [
        model.generate(rows, max_new_tokens=4 + 3 * rank, **options),
        model.generate(rows, max_new_tokens=3, num_beams=2, **options),
    ]


def train_and_write(mesh: zs.Mesh, name: str, plan: str) -> list[Tensor]:
    """Tokens that a model writes after two steps; it goes on training afterwards."""
    case = CASES[name]
    engine = engine_for(mesh, case, **PLANS[plan])
    written: list[Tensor] = []
    for step in range(3):
        engine.train_step(batch(case, step, mesh.rank, mesh.ranks))
        if step == 1:
            with engine.gathered(), torch.no_grad():
                written = continuations(engine.model, mesh.rank)
    return written


@pytest.mark.parametrize(
    "name, plan", [("gpt2", "zero2"), ("gpt2", "zero3"), ("gpt2", "zero3-shared"), ("t5", "zero3")]
)
def test_generates_inside_gathered(pool: Pool, name: str, plan: str) -> None:
    """Also where the ranks write unlike many tokens."""
    case = CASES[name]
    written = pool.run(train_and_write, 2, name, plan)
    states: list[dict[str, Tensor]] = []

    def watch(model: nn.Module, step: int) -> None:
        if step == 2:
            states.append(model.state_dict())
            for rank, found in enumerate(written):
                for tokens, expected in zip(found, continuations(model, rank), strict=True):
                    assert tokens.tolist() == expected.tolist()

    alone(case, before_step=watch)
    assert states
