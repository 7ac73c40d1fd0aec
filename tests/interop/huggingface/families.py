"""Small models of transformers' families, written to folders as `save_pretrained` does."""

import functools
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 29
TEXT = {
    "vocab_size": VOCABULARY, "use_cache": False, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
GPT2 = {
    "vocab_size": VOCABULARY, "use_cache": False, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "vocab_size": VOCABULARY, "use_cache": False, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2,
    "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    **TEXT, "num_key_value_heads": 2, "moe_intermediate_size": 12, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
VIT = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False, "dropout": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # class of the model, settings of its configuration
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {**TEXT, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2,
                                          "moe_intermediate_size": 12}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3ForCausalLM", {**TEXT, "num_key_value_heads": 1, "original_max_position_embeddings": 32}),
    "olmo2": ("Olmo2ForCausalLM", {**TEXT, "num_key_value_heads": 1}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "gpt-oss": ("GptOssForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2,
                                      "sliding_window": 8}),
    "t5": ("T5ForConditionalGeneration", T5),
    "bert": ("BertForMaskedLM", BERT),
    "vit": ("ViTForImageClassification", VIT),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
}  # fmt: skip


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def kind_of(family: str) -> Any:
    """The class of a family's model."""
    return getattr(transformers, FAMILIES[family][0])


def made(family: str, **more: Any) -> Any:
    """A model of a family with random values in all of its parameters and persistent buffers."""
    kind = kind_of(family)
    torch.manual_seed(3)
    model = kind(kind.config_class(**{**FAMILIES[family][1], **more}))
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=draws) / 8)
    return model


@functools.cache
def folder(family: str) -> Path:
    """The folder of a family's model, written once."""
    path = Path(_root().name) / family
    made(family).save_pretrained(path)
    return path


def batch(family: str, step: int, rows: int = 4) -> dict[str, Tensor]:
    """A batch with its labels, from which the model computes its loss."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (rows, 10), generator=draws)
    if family == "vit":
        labels = torch.randint(0, 3, (rows,), generator=draws)
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=draws), "labels": labels}
    if family == "whisper":
        return {"input_features": torch.randn(rows, 8, 32, generator=draws), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}
