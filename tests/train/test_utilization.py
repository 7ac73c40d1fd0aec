"""Model FLOPs of a run's model by the formula of its shape, and the figures made of them."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.doctor.profile import default_path
from zeroshard.train.config import TrainConfig
from zeroshard.train.model import build_model
from zeroshard.train.model_shape import shape_of
from zeroshard.train.utilization import Speed, Utilization, utilization_of

CPU = torch.device("cpu")
LENGTH = 64
LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
GPT2 = {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 64}


@pytest.mark.parametrize("table", [{**LLAMA, **HEADS}, {**LLAMA, **HEADS, "head_dim": 48}, GPT2])
def test_the_formula_is_within_a_percent_of_a_counted_run(table: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(table))
    built = build_model(str(tmp_path), 0, LENGTH)
    shape = shape_of(str(tmp_path))
    assert shape is not None
    whole, causal = shape.row_flops(LENGTH)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        built.loss(built.module, torch.zeros(1, LENGTH + 1, dtype=torch.long)).backward()
    assert whole == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert causal < whole


SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, **HEADS}
FEW = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 48},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**FEW, "num_experts": 4, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**FEW, "num_experts": 4, "head_dim": 32, "mlp_only_layers": []},
    "deepseek_v3": {**FEW, **LATENT, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_within_a_percent_of_a_counted_run(family: str, tmp_path: Path) -> None:
    """Grouped queries, windows, latent attention, and experts of which a token uses some."""
    pytest.importorskip("transformers")
    table = {"model_type": family, **SIZES, **FAMILIES[family], "experts_implementation": "eager"}
    (tmp_path / "config.json").write_text(json.dumps(table))
    built = build_model(str(tmp_path), 0, LENGTH)
    found = utilization_of(TrainConfig(model=str(tmp_path), sequence=LENGTH), built, CPU, 1)
    tokens = torch.randint(512, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        built.loss(built.module, tokens).backward()
    assert found.whole is not None and found.causal is not None
    assert found.whole * LENGTH == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert found.causal < found.whole


def test_a_built_in_model_is_as_counted_on_it() -> None:
    config = TrainConfig(model="tiny", sequence=LENGTH)
    built = build_model("tiny", 0, LENGTH)
    formula = utilization_of(config, built, CPU, 1)
    mixture = replace(config, experts=2)
    mixed = build_model("tiny", 0, LENGTH, mixture=mixture.mixture)
    routed = utilization_of(mixture, mixed, CPU, 1)
    assert formula.whole is not None and routed.whole is not None
    # one expert of two: the products of a dense layer, those of the router besides
    assert formula.whole == pytest.approx(routed.whole, rel=0.01)
    assert formula.causal == pytest.approx(routed.causal, rel=0.01)


def test_a_model_or_a_profile_that_cannot_be_used_leaves_figures_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(model="tiny", sequence=LENGTH)
    built = build_model("tiny", 0, LENGTH, mixture=replace(config, experts=2).mixture)
    built.module.lock = threading.Lock()  # type: ignore[assignment]  # no copy of it can be made
    assert utilization_of(config, built, CPU, 1) == Utilization(None, None, None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path({"XDG_CACHE_HOME": str(tmp_path)})
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = utilization_of(config, build_model("tiny", 0, LENGTH), CPU, 1)
    assert found.whole is not None and found.peak is None


def test_figures_follow_from_rates_and_are_left_out_where_they_are_unknown() -> None:
    known = Utilization(whole=6e9, causal=3e9, peak=100e12)
    speed = Speed(known, ranks=4)
    for tokens in (10_000, 40_000, 180_000):
        metrics = speed.step(tokens, 2.0)
    assert metrics["tokens_per_s"] == 90_000
    assert known.of(20_000, 4) == {"tflops_per_rank": 30.0, "mfu": 0.3}
    summary = speed.summary()
    assert summary["tokens_per_s"] == 20_000 and summary["tokens_per_s_per_rank"] == 5_000
    assert summary["mfu"] == 0.3 and summary["mfu_causal"] == pytest.approx(0.15)
    assert replace(known, peak=None).of(20_000, 4) == {"tflops_per_rank": 30.0}
    unknown = Speed(Utilization(None, None, None), ranks=4)
    assert unknown.summary()["tokens_per_s"] is None
    assert unknown.step(8, 2.0) == {"tokens_per_s": 4.0}
