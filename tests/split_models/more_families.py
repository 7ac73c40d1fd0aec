"""Small models of families whose attention is unlike the usual one, and models that are written in other ways."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from split_models.small_models import TEXT
from torch import Tensor, nn
from torch.nn import functional as F

V = 64
B: dict[str, Any] = {**TEXT, "vocab_size": V}
L: dict[str, Any] = {
    **B,
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "max_position_embeddings": 64,
}
G: dict[str, Any] = {**L, "num_key_value_heads": 2}
KINDS = ["sliding_attention", "full_attention"]
SHARED: dict[str, Any] = {
    **{**G, "num_hidden_layers": 4, "head_dim": 8, "layer_types": KINDS * 2, "sliding_window": 4},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V},
}
GEMMA3N: dict[str, Any] = {**SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
LATENT: dict[str, Any] = {
    **{**G, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1},
}
NEMOTRON: dict[str, Any] = {
    **{**B, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_groups": 2},
    **{"intermediate_size": 48, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 4},
    **{"layers_block_type": ["attention", "mamba", "mlp", "attention"], "expand": 1, "use_mamba_kernels": False},
    "max_position_embeddings": 64,
}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPTJ: dict[str, Any] = {**B, "n_embd": 32, "n_layer": 2, "n_positions": 64, "rotary_dim": 4, **QUIET}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3n-1": ("Gemma3nForCausalLM", "Gemma3nTextConfig", {**GEMMA3N, "num_key_value_heads": 1}),
    "gemma3n-2": ("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", {**SHARED, "global_head_dim": 8}),
    "nemotron-h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", G),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", {**G, "sliding_window": 4}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**G, **EXPERTS}),
    "flex-olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", {**G, **EXPERTS}),
    "gpt-oss": (
        *("GptOssForCausalLM", "GptOssConfig"),
        {**G, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**B, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPTJ, "n_head": 4}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPTJ, "n_head": 8, "n_ctx": 64}),
    "codegen-4": ("CodeGenForCausalLM", "CodeGenConfig", {**GPTJ, "n_head": 4, "n_ctx": 64}),
    "mpt": (
        *("MptForCausalLM", "MptConfig"),
        {**B, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.05}},
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", G),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", {**L, "qk_layernorm": True}),
    "qwen3-next": (
        *("Qwen3NextForCausalLM", "Qwen3NextConfig"),
        {
            **G,
            **EXPERTS,
            "num_hidden_layers": 1,
            "head_dim": 8,
            "layer_types": KINDS[1:],
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "laguna": (
        *("LagunaForCausalLM", "LagunaConfig"),
        {
            **G,
            **EXPERTS,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "sliding_window": 4,
        },
    ),
    "deepseek-v32": (
        *("DeepseekV32ForCausalLM", "DeepseekV32Config"),
        {**LATENT, "index_topk": 4, "index_n_heads": 4, "index_head_dim": 8, "head_dim": 4},
    ),
    "bitnet": ("BitNetForCausalLM", "BitNetConfig", G),
    "openai-gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", {**GPTJ, "n_head": 4}),
    "ctrl": ("CTRLLMHeadModel", "CTRLConfig", {**GPTJ, "n_head": 4, "dff": 48}),
    "albert": (
        *("AlbertForMaskedLM", "AlbertConfig"),
        {**L, "embedding_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "nystromformer": (
        *("NystromformerForMaskedLM", "NystromformerConfig"),
        {
            **L,
            "conv_kernel_size": 3,
            "num_landmarks": 64,
            "segment_means_seq_len": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**G, "use_qk_norm": True}),
}


def more_family(name: str, device: str = "meta") -> Any:
    """A model of a family, or one of OWN."""
    with torch.device(device):
        if name in OWN:
            return OWN[name]()
        import transformers

        model, config, values = FAMILIES[name]
        made = getattr(transformers, config)(**values)
        return getattr(transformers, model)(made)


class NanoAttention(nn.Module):
    """As nanoGPT writes it: one matrix for queries, keys and values, and a width that is read off the input."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = scores.softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]


class ConfiguredAttention(NanoAttention):
    """Heads and width stand in the configuration alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.n_head, self.n_embd
        self.cfg = config

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.cfg.n_embd, dim=2)
        shape = (*x.shape[:2], self.cfg.n_head, self.cfg.n_embd // self.cfg.n_head)
        q, k, v = (each.view(shape).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class NanoBlock(nn.Module):
    """Attention and an MLP behind norms."""

    def __init__(self, config: Any, attention: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(nn.Linear(config.n_embd, 48), nn.GELU(), nn.Linear(48, config.n_embd))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """As nanoGPT writes it: an embedding that is tied to the output layer, and a loss in the forward."""

    def __init__(self, attention: Callable[[Any], nn.Module] = NanoAttention, mixes: bool = False) -> None:
        super().__init__()
        config = SimpleNamespace(n_embd=32, n_head=4, vocab_size=V, block_size=64)
        blocks: list[nn.Module] = [NanoBlock(config, attention) for _ in range(2)]
        if mixes:
            blocks.insert(1, Neighbours())
        parts = {"wte": nn.Embedding(V, 32), "wpe": nn.Embedding(64, 32), "h": nn.ModuleList(blocks)}
        self.transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(32)})
        self.lm_head = nn.Linear(32, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        x = parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class ReadsWeight(NanoGPT):
    """Logits by the weight of the embedding, which is not called for them."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, _ = super().forward(idx)
        more = self.transformer.get_submodule("wte").get_parameter("weight").mean(1)
        return logits + more, None if targets is None else F.cross_entropy(
            (logits + more).flatten(0, 1), targets.flatten()
        )


class Neighbours(nn.Module):
    """A block without linear layers, which adds to each position the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(self.norm(x), (0, 0, 1, 0))[:, :-1]


class Reusing(NanoAttention):
    """Attention whose keys and values are those of the first layer, if there is one before."""

    first: Any = None

    def __init__(self, config: Any, store: dict[str, Any]) -> None:
        super().__init__(config)
        self.store, self.owns = store, not store
        store.setdefault("made", None)
        if not self.owns:
            self.q_proj, self.c_attn = nn.Linear(32, 32), None

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.owns:
            q, k, v = self.c_attn(x).view(b, t, 3, self.n_head, -1).unbind(2)
            self.store["made"] = k, v
        else:
            q, (k, v) = self.q_proj(x).view(b, t, self.n_head, -1), self.store["made"]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _reusing() -> nn.Module:
    store: dict[str, Any] = {}
    return NanoGPT(lambda config: Reusing(config, store))


OWN: dict[str, Callable[[], nn.Module]] = {
    "nano": NanoGPT,
    "configured": lambda: NanoGPT(ConfiguredAttention),
    "mixes": lambda: NanoGPT(mixes=True),
    "reusing": _reusing,
    "reads-weight": ReadsWeight,
}
