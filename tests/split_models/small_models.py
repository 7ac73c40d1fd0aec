"""Small models of every family that tensor parallelism splits, on the meta device."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

VOCABULARY = 257  # which neither 2 nor 4 divides
LAYERS = 2
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {
    **TEXT,
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 8},
    "max_position_embeddings": 64,
}
FALCON: dict[str, Any] = {**TEXT, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 8}


def family(name: str, device: str = "meta", **changes: Any) -> Any:
    """A model of a family, with other values of its configuration; "gpt" is the built-in one."""
    with torch.device(device):
        if name == "gpt":
            return GPT(GPTConfig(vocabulary=VOCABULARY, context=64, width=32, heads=4, layers=LAYERS))
        import transformers

        model, config, values = FAMILIES[name]
        made = getattr(transformers, config)(**{**values, **changes})
        return getattr(transformers, model)(made)


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**TEXT, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "num_key_value_heads": 4, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**LLAMA, "num_key_value_heads": 2}),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),  # one KV head
    "falcon-groups": (
        *("FalconForCausalLM", "FalconConfig"),
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-heads": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": False}),
    "opt": (
        *("OPTForCausalLM", "OPTConfig"),
        {**TEXT, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "bert": (
        *("BertForMaskedLM", "BertConfig"),
        {**TEXT, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64},
    ),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        {**TEXT, "d_model": 32, "d_kv": 4, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
}  # fmt: skip


class Branch(nn.Module):
    """A block: some module on the residual stream, behind a norm."""

    def __init__(self, inner: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Two blocks of a class."""

    def __init__(self, make: Callable[[], nn.Module], block: Callable[[nn.Module], nn.Module] = Branch) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(make()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda x, block: block(x), self.blocks, x)
