"""Questions as people ask them: a model, cards, memory; and whether every weight can be trained there."""

from typing import Any, NamedTuple


def llama(width: int, inner: int, layers: int, heads: int, pairs: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """A configuration of Llama's family."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, head_dim=64),
    "llama-3b": llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "llama-7b": llama(4096, 11008, 32, 32, 32, 32000),
    "llama-8b": llama(4096, 14336, 32, 32, 8, 128256),
    "llama-13b": llama(5120, 13824, 40, 40, 40, 32000),
    "llama-70b": llama(8192, 28672, 80, 64, 8, 128256),
    "qwen-0.5b": llama(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True)
    | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "mixtral-8x7b": llama(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
    | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    "qwen3-30b-a3b": llama(
        *(2048, 6144, 48, 32, 4, 151936),
        **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"decoder_sparse_step": 1, "mlp_only_layers": []},
    )
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    "deepseek-v3": llama(
        *(7168, 18432, 61, 128, 128, 129280),
        **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64},
        **{"qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4},
    )
    | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
}
PUBLISHED = {  # parameters and those that a token uses, in billions, as the models' cards and papers give them
    "llama-1b": (1.24, 1.24),
    "llama-3b": (3.21, 3.21),
    "llama-7b": (6.74, 6.74),
    "llama-8b": (8.03, 8.03),
    "llama-13b": (13.0, 13.0),
    "llama-70b": (70.6, 70.6),
    "qwen-0.5b": (0.494, 0.494),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "deepseek-v3": (671, 37),
}


class Question(NamedTuple):
    """Some cards in nodes of eight, and the host memory of a node; `fits` is the answer, without a disk."""

    model: str
    card: str
    cards: int
    host: str | None
    fits: bool


QUESTIONS = [
    Question("gpt2", "RTX3090", 1, None, True),
    Question("gpt2-xl", "RTX3090", 1, "32GiB", True),
    Question("gpt2-xl", "RTX4090", 1, "16GiB", True),
    Question("gpt2-xl", "A100-40", 1, None, True),
    Question("gpt2-xl", "A100-80", 8, None, True),
    Question("qwen-0.5b", "RTX3090", 1, None, True),
    Question("llama-1b", "RTX4090", 1, "32GiB", True),
    Question("llama-1b", "A100-40", 1, None, True),
    Question("llama-3b", "RTX4090", 1, "64GiB", True),
    Question("llama-3b", "A100-80", 1, None, True),
    Question("llama-7b", "RTX4090", 1, "128GiB", True),
    Question("llama-7b", "RTX4090", 1, "64GiB", False),
    Question("llama-7b", "RTX3090", 2, "128GiB", True),
    Question("llama-7b", "A100-80", 1, "128GiB", True),
    Question("llama-7b", "A100-80", 2, "256GiB", True),
    Question("llama-7b", "H100-80", 8, None, True),
    Question("llama-8b", "RTX4090", 1, "192GiB", True),
    Question("llama-8b", "H200", 1, None, True),
    Question("llama-8b", "A100-40", 8, None, True),
    Question("llama-13b", "RTX4090", 1, "256GiB", True),
    Question("llama-13b", "A100-80", 1, "256GiB", True),
    Question("llama-13b", "A100-80", 8, None, True),
    Question("llama-70b", "H100-80", 8, "1024GiB", True),
    Question("llama-70b", "H100-80", 32, None, True),
    Question("llama-70b", "H200", 8, "2048GiB", True),
    Question("llama-70b", "A100-80", 1, "512GiB", False),
    Question("mixtral-8x7b", "H100-80", 16, None, True),
    Question("qwen3-30b-a3b", "H100-80", 8, "1024GiB", True),
    Question("qwen3-30b-a3b", "RTX4090", 1, "128GiB", False),
    Question("deepseek-v3", "H200", 1024, None, True),
]
