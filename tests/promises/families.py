"""Twenty families of unlike build in toy size, from configurations of transformers and from the models of the tests."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LAYERS = 29, 5
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
TEXT = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "max_position_embeddings": 32,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**TEXT, **SHAPE, "num_key_value_heads": 1}
EXPERTS = {"num_experts_per_tok": 2}
IMAGES = {**SHAPE, **NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_labels": 3}
TWO_SIDES = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # the model, its configuration, and their values
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),  # norm first, no bias
    "gpt2": (
        *("GPT2LMHeadModel", "GPT2Config"),
        {**TEXT, "n_positions": 32, "n_embd": 16, "n_layer": LAYERS, "n_head": 2},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **SHAPE}),  # attention beside the layers
    "bert": ("BertForMaskedLM", "BertConfig", {**TEXT, **SHAPE, **NO_DROPOUT}),  # norm last
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),  # norms at the ends of branches
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}),  # norms at both ends, tied
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),  # both branches behind one norm
    "opt": (
        *("OPTForCausalLM", "OPTConfig"),
        {**TEXT, **SHAPE, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**TEXT, "hidden_size": 16, "n_layer": LAYERS, "n_head": 2}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**TEXT, **SHAPE}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**TEXT, **SHAPE}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "qwen2-moe": (
        *("Qwen2MoeForCausalLM", "Qwen2MoeConfig"),
        {**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "mamba": (
        *("MambaForCausalLM", "MambaConfig"),
        {**TEXT, "hidden_size": 16, "num_hidden_layers": LAYERS, "state_size": 4, "time_step_rank": 2},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGES),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        {**TEXT, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": LAYERS, "num_heads": 2,
         "decoder_start_token_id": 0},
    ),
    "bart": (
        *("BartForConditionalGeneration", "BartConfig"),
        {**TEXT, **TWO_SIDES, "d_model": 16, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "dropout": 0.0,
         "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**TEXT, **SHAPE, **NO_DROPOUT, "embedding_size": 8}),
}  # fmt: skip


class Residual(nn.Module):
    """Convolutions, with batch norms or group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.before, self.between = nn.GroupNorm(2, 6), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.between(self.first(F.relu(self.before(x))))))


class ConvolutionNet(nn.Module):
    """A residual net of convolutions; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([Residual() for _ in range(LAYERS)])

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Mixer(nn.Module):
    """Layers over positions, then over features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.positions = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 10))
        self.features = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.second(x))


class MixerNet(nn.Module):
    """A net without attention; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)
        self.blocks = nn.ModuleList([Mixer() for _ in range(LAYERS)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


OWN = {"convolution": ConvolutionNet, "mixer": MixerNet}
NAMES = (*FAMILIES, *OWN)


def build(name: str) -> nn.Module:
    """A family's model, with weights of a seed."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]()
    import transformers

    model, config, values = FAMILIES[name]
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values)).train()
    return made


def batch(name: str, rows: int) -> dict[str, Tensor]:
    """Rows of ten tokens, or of images."""
    if name in ("vit", "convolution"):
        return {"pixel_values": torch.randn(rows, 3, 8, 8), "labels": torch.randint(3, (rows,))}
    tokens = torch.randint(3, WORDS, (rows, 10))
    return {"input_ids": tokens, "labels": tokens}
