"""Adapters written by a running engine: peft reads them bit for bit, and merged weights are those of peft."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adapters import ADAPTERS, adapted, attach, base, batch, engine_of, rows_of
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import ConfigError, ModelError, PlanError

peft = pytest.importorskip("peft")
PLANS: dict[str, dict[str, Any]] = {
    "shared": {"zero": 3},
    "network": {"zero": 3, "transport": "network"},
    "stages": {"pipeline_parallel": 2, "microbatches": 2},
    "experts": {"zero": 1, "expert_parallel": 2},
}


def export(mesh: zs.Mesh | None, name: str, plan: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Write adapter and merged weights after a step; returns all weights."""
    engine = engine_of(mesh, adapted(name), **plan)
    engine.train_step(rows_of(batch(0), engine.data_rank, engine.data_ranks))
    engine.export(folder / "adapter", adapters=True)
    engine.export(folder / "merged", merge=True)
    return engine.state_dict()


def check(name: str, weights: dict[str, Tensor], folder: Path) -> None:
    """Compare the two folders with peft's own model of these weights."""
    kind = ADAPTERS[name][0]
    model: Any = adapted(name)
    model.load_state_dict(weights)
    plain = base(kind)
    plain.load_state_dict(base_state(model, plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(plain, folder / "adapter")
    found = again.state_dict()
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(found[key], value), key
    merged = type(base(kind)).from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    wanted = model.merge_and_unload().state_dict()
    assert merged.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(merged[key], value), (key, (merged[key] - value).abs().max())


def base_state(model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """The frozen weights of a model under the names of its base."""
    from zeroshard.units.adapters import base_names

    named, held = base_names(model), model.state_dict()
    assert named is not None
    found = {named(key): value for key, value in held.items() if "modules_to_save" not in key}
    return {key: found[f"base_model.model.{key}"] for key in plain.state_dict()}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_and_merged_weights_are_those_of_peft(tmp_path: Path, name: str) -> None:
    check(name, export(None, name, {}, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "name, plan", [("lora", "network"), ("head", "shared"), ("lora", "stages"), ("experts", "experts")]
)
def test_they_are_the_same_under_any_plan(pool: Pool, tmp_path: Path, name: str, plan: str) -> None:
    weights, _ = pool.run(export, 2, name, PLANS[plan], tmp_path)
    check(name, weights, tmp_path)


@pytest.mark.parametrize(
    "targets, copies, ties",
    [
        (["embed_tokens", "q_proj"], None, False),
        (["lm_head"], None, False),
        (["embed_tokens", "lm_head"], None, False),
        (["q_proj"], ["embed_tokens"], False),
        (["q_proj"], ["lm_head"], False),
        (["q_proj"], None, True),
    ],
)
def test_tied_weights_with_one_adapter_are_two_when_merged(
    tmp_path: Path, targets: list[str], copies: list[str] | None, ties: bool
) -> None:
    """The merged model computes what the adapted one does; peft's own merge adds to both."""
    model: Any = base("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=copies, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights
        engine = engine_of(None, peft.get_peft_model(model, config))
    engine.train_step(batch(0))
    engine.export(tmp_path / "merged", merge=True)
    merged = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.tie_word_embeddings is ties
    words = batch(1)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(merged(words).logits, engine(input_ids=words).logits, rtol=1e-5, atol=1e-6)


def test_rows_of_embeddings_that_are_trained(tmp_path: Path) -> None:
    """`trainable_token_indices` of peft, beside LoRA: files of the base are read beneath, and peft reads the export."""
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    settings = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [1, 4], "task_type": "CAUSAL_LM"}
    engine = engine_of(None, peft.get_peft_model(base("llama"), peft.LoraConfig(**settings)))
    engine.load_weights(tmp_path / "base")
    engine.train_step(batch(0))
    engine.export(tmp_path / "adapter", adapters=True)
    again = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter").state_dict()
    weights = engine.state_dict()
    assert again.keys() == weights.keys() and all(torch.equal(again[key], weights[key]) for key in again)
    with pytest.raises(PlanError, match=r"merges adapters by LoRA and DoRA.*token_adapter' has a TrainableTokensLayer"):
        engine.export(tmp_path / "merged", merge=True)
    with pytest.raises(ModelError, match="trainable_token_indices is on the meta device"):
        zs.from_pretrained(tmp_path / "base", torch.optim.SGD, adapters=peft.LoraConfig(**settings))


def test_merged_weights_have_a_dtype_by_its_name(tmp_path: Path) -> None:
    engine = engine_of(None, adapted("lora"))
    for name, dtype in (("name", "bf16"), ("dtype", torch.bfloat16)):
        engine.export(tmp_path / name, merge=True, dtype=dtype)
    named, other = (load_file(tmp_path / each / "model.safetensors") for each in ("name", "dtype"))
    assert named.keys() == other.keys() and all(value.dtype == torch.bfloat16 for value in named.values())
    assert all(torch.equal(value, other[key]) for key, value in named.items())
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be a floating-point one"):
        engine.export(tmp_path / "other", merge=True, dtype="int8")


def test_adapters_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"for models of peft, and this one is a LlamaForCausalLM"):
        engine_of(None, base("llama")).export(tmp_path / "out", adapters=True)
    model: Any = attach(base("llama"), "lora")
    engine = engine_of(None, model)
    with pytest.raises(PlanError, match=r"no adapter 'other'; the model has 'default'"):
        engine.export(tmp_path / "out", adapters="other")
    with pytest.raises(PlanError, match="two folders; export twice"):
        engine.export(tmp_path / "out", adapters=True, merge=True)


def test_a_quantised_base_gives_its_adapter_and_the_sum_with_its_dequantised_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base("llama").save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **ADAPTERS["lora"][1])
    trained = lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad])  # noqa: E731
    engine = zs.from_pretrained(tmp_path / "base", trained, zs.Plan(), quantized="nf4", adapters=config)
    engine.export(tmp_path / "merged", merge=True)
    whole = dict(engine.weights())
    for name, value in type(base("llama")).from_pretrained(tmp_path / "merged").state_dict().items():
        if "norm" in name or "embed" in name:
            assert torch.equal(value, whole[f"base_model.model.{name}"]), name
        assert value.is_floating_point(), name
    engine.export(tmp_path / "adapter", adapters=True)
    again = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter").state_dict()
    for name, value in engine.state_dict().items():
        if "lora_" in name:
            assert torch.equal(again[name], value), name
