"""Small models of the families of transformers that have experts, built from configurations."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zeroshard.moe.exchange.dispatch import combine, gather_gates, gather_rows, order_of
from zeroshard.moe.experts.families import FoundExperts, find_experts
from zeroshard.moe.routing.record import Routing

VOCABULARY = 29
TEXT: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": None},
    **{"pad_token_id": 0, "use_cache": False},
}


def mixtral(experts: int = 4, choices: int = 2, **options: Any) -> nn.Module:
    """Gated experts, stacked; normalised gates."""
    config = transformers.MixtralConfig(
        **TEXT, intermediate_size=24, num_local_experts=experts, num_experts_per_tok=choices, **options
    )
    return transformers.MixtralForCausalLM(config)


def qwen3_moe(experts: int = 4, choices: int = 2, **options: Any) -> nn.Module:
    """As Mixtral, with other names; the first layer is dense."""
    config = transformers.Qwen3MoeConfig(
        **TEXT, intermediate_size=24, moe_intermediate_size=12, head_dim=8, num_experts=experts,
        num_experts_per_tok=choices, mlp_only_layers=[0], decoder_sparse_step=1, **options,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3(experts: int = 4, choices: int = 2, **options: Any) -> nn.Module:
    """Group-limited sigmoid gates, and a shared expert; the first layer is dense."""
    config = transformers.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 2}, intermediate_size=24, moe_intermediate_size=12, n_routed_experts=experts,
        num_experts_per_tok=choices, n_group=2, topk_group=2, n_shared_experts=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, **options,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss(experts: int = 4, choices: int = 2, **options: Any) -> nn.Module:
    """Interleaved and clamped gates, biases, transposed weights."""
    config = transformers.GptOssConfig(
        **TEXT, intermediate_size=24, num_local_experts=experts, num_experts_per_tok=choices, head_dim=8,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"], **options,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


def olmoe(experts: int = 4, choices: int = 2, **options: Any) -> nn.Module:
    """Gates that are not normalised."""
    config = transformers.OlmoeConfig(
        **TEXT, intermediate_size=24, num_experts=experts, num_experts_per_tok=choices, **options
    )
    return transformers.OlmoeForCausalLM(config)


def switch_transformers(experts: int = 4, choices: int = 1, **options: Any) -> nn.Module:
    """Experts in modules, one choice, a capacity for each sequence."""
    assert choices == 1
    settings: dict[str, Any] = {"expert_capacity": 64, "router_jitter_noise": 0.0, **options}
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=experts, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, use_cache=False, **settings,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    made.__name__: made for made in (mixtral, qwen3_moe, deepseek_v3, gpt_oss, olmoe, switch_transformers)
}


def seeded(name: str, **options: Any) -> Any:
    """A model with weights drawn from a fixed seed, all of them random, so that routers choose."""
    torch.manual_seed(0)
    model = FAMILIES[name](**options)
    generator = torch.Generator().manual_seed(1)
    std = 0.15 if name == "switch_transformers" else 0.3  # its attention does not divide by the root of the features
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or not parameter.any():
                parameter.normal_(0, std, generator=generator)
    return model


def route(found: FoundExperts) -> Any:
    """A forward that does what ranks which exchange rows do, on all experts at once."""

    def forward(x: Tensor, routing: Routing) -> Tensor:
        order = order_of(routing, found.experts)
        rows = found.compute(gather_rows(x, order), order.counts, gather_gates(routing.gates, order))
        return combine(rows, order)

    return forward


def routed(model: Any) -> Any:
    """The model with such forwards."""
    for found in find_experts(model):
        found.install(route(found))
    return model


def words(step: int, rows: int = 4, length: int = 9) -> dict[str, Any]:
    """Rows of tokens that are to be continued."""
    tokens = torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def llama4() -> nn.Module:
    """Rows of every expert, scaled by its gate."""
    config = transformers.Llama4TextConfig(
        **TEXT, intermediate_size=24, intermediate_size_mlp=24, head_dim=8, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, moe_layers=[1],
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


def dbrx() -> nn.Module:
    """Experts one below the other in matrices."""
    config = transformers.DbrxConfig(
        vocab_size=VOCABULARY, d_model=16, n_heads=2, n_layers=2, max_seq_len=32,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.DbrxForCausalLM(config)


def jetmoe() -> nn.Module:
    """Each of the experts' products in a module of its own; attention has experts too."""
    text = {name: value for name, value in TEXT.items() if name != "num_attention_heads"}
    config = transformers.JetMoeConfig(
        **text, kv_channels=8, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.JetMoeForCausalLM(config)


def nllb_moe() -> nn.Module:
    """Experts with a dropout of their outputs."""
    config = transformers.NllbMoeConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_experts=4, encoder_sparse_step=1,
        decoder_sparse_step=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.NllbMoeForConditionalGeneration(config)


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {  # with the experts that an error names
    "llama4": (llama4, "'model.layers.1.feed_forward.experts' (Llama4TextExperts)"),
    "dbrx": (dbrx, "'transformer.blocks.0.ffn.experts.mlp' (DbrxExpertGLU)"),
    "jetmoe": (jetmoe, "'model.layers.0.mlp.input_linear' (JetMoeParallelExperts)"),
    "nllb_moe": (nllb_moe, "'model.encoder.layers.0.ffn.experts' (NllbMoeExperts)"),
}
