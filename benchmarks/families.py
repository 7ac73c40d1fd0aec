"""Tiny models of families of transformers, made from their default configurations by a table of small sizes.

Benchmarks over many families import it; nothing is downloaded.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

VOCABULARY, ROWS, TOKENS = 64, 2, 9
KINDS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")  # of transformers' mappings from families to classes
SMALL: Mapping[str, Any] = {  # sizes by the names of fields
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "d_embed"), 32),
    **dict.fromkeys(("embed_dim", "dim_model", "lru_width", "input_embedding_size", "word_embed_proj_dim"), 32),
    "decoder_hidden_size": 32,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("n_inner", "dim_ff", "dff", "d_inner", "feed_forward_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "dim_head", "attention_head_size", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "index_head_dim", "attention_head_dim"), 8),
    **{"qk_rope_head_dim": 8, "rotary_dim": 4},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_window"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    **{"hidden_size_per_layer_input": 8, "laurel_rank": 4, "index_topk": 4, "index_n_heads": 4, "type_vocab_size": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False},
    **{"is_decoder": False, "use_mamba_kernels": False, "original_max_position_embeddings": 64},
}
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head", "swa_num_key_value_heads")
OFTEN_NONE = ("head_dim", "num_experts_per_tok", "n_routed_experts", "moe_intermediate_size", "n_group", "topk_group")
TURNS = ["sliding_attention", "full_attention"]
MAMBAS = ["linear_attention", "hybrid", "linear_attention"]
OF_FAMILIES: Mapping[str, Mapping[str, Any]] = {  # where the table does not do
    "bailing_hybrid": {
        **{"num_expert_group": 1, "layer_group_size": 2, "linear_head_dim": 8, "linear_num_heads": 4},
        **{"num_hidden_layers": 4, "layer_types": None, "mlp_layer_types": None},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"index_topk": 64},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "intermediate_size": 48, "num_kv_shared_layers": 2, "layer_types": TURNS * 2},
        "activation_sparsity_pattern": [0.0] * 4,
    },
    **{name: {"layer_types": TURNS} for name in ("gemma4_text", "gemma4_unified_text")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm3")},
    "mamba2": {"num_heads": 4, "head_dim": 16, "chunk_size": 4},
    "zamba": {
        **{"num_hidden_layers": 5, "layers_block_type": [*MAMBAS, *MAMBAS[1:]], "attention_hidden_size": 64},
        **{"attention_head_dim": 16, "n_mamba_heads": 2},
    },
    "zamba2": {
        **{"num_hidden_layers": 3, "layers_block_type": MAMBAS, "attention_hidden_size": 64, "n_mamba_heads": 4},
        **{"attention_head_dim": 16, "mamba_headdim": 16, "kv_channels": 8, "num_query_groups": 4, "adapter_rank": 4},
        "hybrid_layer_ids": [1],
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0},
    "neomme": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0} for kind in TURNS
        }
    },
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in TURNS}},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_hidden_layers": 4},
    "longcat_flash": {"zero_expert_num": 2, "ffn_hidden_size": 48},
    "jetmoe": {"kv_channels": 8},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "pad_token_id": 0},
    "roc_bert": {
        "pronunciation_vocab_size": 8,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 8,
        "shape_embed_dim": 8,
    },
    "qwen4_exp": {"hc_lowrank": 8, "ple_embed_dim": 8},
    "blt": {
        "encoder_hash_byte_group_vocab": VOCABULARY,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64, "head_dim": 16},
    },
    "reformer": {
        **{"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False, "num_buckets": 2},
        "local_attn_chunk_length": 3,
    },
    "xmod": {"default_language": "en_XX"},
    "qwen3_next": {"num_hidden_layers": 4},
    **{name: {"num_hidden_layers": 4} for name in ("qwen3_5", "qwen3_5_moe", "olmo_hybrid")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "nemotron_h": {"layers_block_type": ["attention", "mamba", "mlp", "attention"]},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
}
DRAWING = ("phimoe",)  # whose routers draw experts at random in training: they are evaluated
MODALITIES = "it needs images or sound to use all of its weights"
LEFT_OUT: Mapping[str, str] = {
    "dbrx": "its own forward fails with its default configuration",
    **dict.fromkeys(("git", "musicgen", "musicgen_melody", "nemo_speechlm", "voxtral_realtime"), MODALITIES),
    **dict.fromkeys(("got_ocr2", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "fuyu", "ultravbert"), MODALITIES),
    **dict.fromkeys(("musicflamingo", "audioflamingo3", "qwen2_audio", "moss_transcribe_diarize"), MODALITIES),
    **dict.fromkeys(("modernvbert", "t5gemma2", "glmasr", "qwen3_asr", "granite_speech", "vibevoice_asr"), MODALITIES),
    **dict.fromkeys(("granite_speech_plus", "perceiver", "phi4_multimodal", "voxtral"), MODALITIES),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it reads keys and values of another model"),
    "luke": "its embedding of entities has a size of its own, 128 million",
    "encoder-decoder": "a pair of two others",
}  # fmt: skip


def names() -> list[str]:
    """The families of language models, by `model_type`; of those with one class, the first."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for name, made in _mapping(kind).items():
            if name not in LEFT_OUT and name not in found.values():
                found.setdefault(made, name)
    return list(found.values())


def _mapping(kind: str) -> Mapping[str, str]:
    found: Mapping[str, str] = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
    return found


def small_config(kind: type, more: Mapping[str, Any]) -> Any:
    """A configuration of a class with small sizes; those of its parts too."""
    default = kind()
    given = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    values = {k: v for k, v in SMALL.items() if given.get(k) is not None or (k in OFTEN_NONE and k in given)}
    for name in given.keys() & {*KEY_HEADS}:
        values[name] = 4 if given[name] in (None, given.get("num_attention_heads")) else 2
    values |= {name: 0.0 for name, value in given.items() if "drop" in name and isinstance(value, float)}
    values |= {k: v for k, v in more.items() if not isinstance(v, Mapping) or k not in (default.sub_configs or {})}
    for name in default.sub_configs or {}:
        inner = getattr(default, name, None)
        if inner is not None and type(inner).sub_configs is not None:
            values[name] = small_config(type(inner), more.get(name, {})).to_dict()
    return kind(**values)


def build(name: str) -> nn.Module:
    """A tiny model of a family, with random weights from seed 0 and no dropout."""
    torch.manual_seed(0)
    kind = next(_mapping(kind)[name] for kind in KINDS if name in _mapping(kind))
    made: Any = getattr(transformers, kind)
    model: nn.Module = made(small_config(made.config_class, OF_FAMILIES.get(name, {})))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.train(name not in DRAWING)


def batch(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Tokens and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(3, VOCABULARY, (2, ROWS, TOKENS), generator=generator)
    named = inspect.signature(model.forward).parameters
    more = {"decoder_input_ids": tokens.flip(1)} if "decoder_input_ids" in named else {}
    return {"input_ids": tokens, "labels": labels, **more}


def weights_of(plain: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's weights."""
    return {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}


def distance(difference: float) -> float:
    """The size of a difference; infinite if it is no number, which `max` would pass over."""
    return math.inf if math.isnan(difference) else abs(difference)


def furthest(
    state: Mapping[str, Tensor], plain: nn.Module, before: Mapping[str, Tensor]
) -> tuple[str, float, float, float]:
    """The weight that is furthest from that of a plain loop after its step.

    Returns:
        its name and distance, infinite if it is no number; the furthest that a weight has moved in the step; and the
        largest weight.
    """
    after = {name: p.detach() for name, p in plain.named_parameters() if p.numel()}
    errors = {name: distance(float((state[name] - p).abs().max())) for name, p in after.items()}
    worst = max(errors, key=lambda name: errors[name])
    moved = max(float((p - before[name]).abs().max()) for name, p in after.items())
    return worst, errors[worst], moved, max(float(p.abs().max()) for p in after.values())
