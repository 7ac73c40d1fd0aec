"""`engine.export()`: folders that `from_pretrained` of transformers reads bit for bit, in the names of each family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved import Normed
from pool import Pool
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import CheckpointDisk
from zeroshard.checkpoint.export import OF_INPUTS
from zeroshard.cli.main import main
from zeroshard.errors import CheckpointError, ConfigError, PlanError

transformers = pytest.importorskip("transformers")
TEXT = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NARROW = {
    **TEXT, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32,
}  # fmt: skip
ROUTED = {**NARROW, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**TEXT, "n_positions": 32, "n_embd": 12, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", NARROW),
    "mistral": ("MistralForCausalLM", NARROW),
    "qwen2": ("Qwen2ForCausalLM", NARROW),
    "qwen3": ("Qwen3ForCausalLM", NARROW),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {**ROUTED, "num_experts": 4}),
    "mixtral": ("MixtralForCausalLM", {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma 2": ("Gemma2ForCausalLM", NARROW),
    "gemma 3": ("Gemma3ForCausalLM", NARROW),
    "phi-3": ("Phi3ForCausalLM", NARROW),
    "olmo2": ("Olmo2ForCausalLM", NARROW),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        {
            **{key: value for key, value in NARROW.items() if key != "head_dim"},
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "num_key_value_heads": 4,
        },
    ),
    "gpt-oss": ("GptOssForCausalLM", {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2},
    ),
    "bert": (
        "BertForMaskedLM",
        {
            "vocab_size": 32,
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 20,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "image_size": 8,
            "patch_size": 4,
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 20,
            "num_labels": 3,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 32,
            "d_model": 12,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}


def made(family: str, seed: int = 0) -> Any:
    """A small model of a family."""
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    return kind(kind.config_class(**settings))


def engine_of(model: nn.Module, mesh: zs.Mesh | None = None, **plan: Any) -> zs.Engine:
    plan = plan or {"zero": 0}
    return zs.Engine(model, torch.optim.SGD, zs.Plan(**plan), mesh=mesh or zs.Mesh())


def held(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the files of a folder."""
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_come_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = made(family)
    model.save_pretrained(tmp_path / "theirs")
    engine = engine_of(model)
    engine.export(tmp_path / "ours", shard_size="6KB")
    theirs, ours = held(tmp_path / "theirs"), held(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(values, ours[name]) and values.dtype == ours[name].dtype for name, values in theirs.items())
    again, facts = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not facts["missing_keys"] and not facts["unexpected_keys"] and not facts["mismatched_keys"]
    state = engine.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(values, state[name]) for name, values in again.state_dict().items())
    texts = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "ours")]
    assert {k: v for k, v in texts[0].items() if k != "_name_or_path"} == {
        k: v for k, v in texts[1].items() if k != "_name_or_path"
    }
    generates = (tmp_path / "theirs" / "generation_config.json").exists()
    assert generates == (tmp_path / "ours" / "generation_config.json").exists()
    if generates:
        both = [json.loads((tmp_path / f / "generation_config.json").read_text()) for f in ("theirs", "ours")]
        assert both[0] == both[1]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_names_of_the_family_one_by_one(family: str) -> None:
    model = made(family)
    found = dict(engine_of(model).weights(names="transformers"))
    state = model.state_dict()
    assert (found.keys() == state.keys()) == (family == "llama")
    if family == "mixtral":
        expert = found["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
        assert torch.equal(expert, state["model.layers.1.mlp.experts.gate_up_proj"][3, 24:])


def write(mesh: zs.Mesh, family: str, plan: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """Take a step, export in two dtypes, and train on."""
    model = made(family, mesh.rank)
    tokens = torch.arange(1, 21).view(2, 10)
    engine = zs.Engine(
        model, torch.optim.AdamW, zs.Plan.from_dict(plan), mesh=mesh, example={"input_ids": tokens, "labels": tokens}
    )
    for _ in range(2):
        engine.train_step({"input_ids": tokens, "labels": tokens})
    engine.export(Path(folder) / "kept")
    engine.export(Path(folder) / "half", dtype=torch.bfloat16, shard_size="8KB")
    state = engine.state_dict()
    engine.train_step({"input_ids": tokens, "labels": tokens})
    with pytest.raises(CheckpointError, match="half exists, and nothing is overwritten"):
        engine.export(Path(folder) / "half")
    return state


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero 3, bf16": ("llama", {"zero": 3, "precision": "bf16"}),
    "stages": ("llama", {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 2}),
    "experts": ("qwen3 moe", {"expert_parallel": 2}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_write_one_folder(pool: Pool, plan: str, tmp_path: Path) -> None:
    family, settings = PLANS[plan]
    state, _ = pool.run(write, 2, family, settings, str(tmp_path))
    kind = type(made(family))
    whole = kind.from_pretrained(tmp_path / "kept").state_dict()
    for name, values in whole.items():
        assert values.dtype == torch.float32 and torch.equal(values.to(state[name].dtype), state[name]), name
    half = kind.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16 and len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    assert all(torch.equal(values, whole[name].bfloat16()) for name, values in half.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "kept"]  # no temporary folder is left


def test_tokenizer_and_template_come_from_the_folder_of_the_model(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path / "base")
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "tokenizer_config.json": '{"a": 1}'}
    for name, text in {**texts, "optimizer.bin": "no", "notes.txt": "no"}.items():
        (tmp_path / "base" / name).write_text(text)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    engine = engine_of(model)
    engine.export(tmp_path / "ours")
    engine.save(tmp_path / "c", wait=True)
    main(["export", str(tmp_path / "c"), "--out", str(tmp_path / "later")])
    for folder in ("ours", "later"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert names == {*texts, "config.json", "generation_config.json", "model.safetensors"}
        assert all((tmp_path / folder / name).read_text() == text for name, text in texts.items())
    assert "tokenizer*.json" in OF_INPUTS


def test_a_model_of_no_family_has_all_names_of_its_state_dict(tmp_path: Path) -> None:
    model = Normed()
    engine_of(model).export(tmp_path / "w")
    assert {path.name for path in (tmp_path / "w").iterdir()} == {"model.safetensors"}
    found = load_file(tmp_path / "w" / "model.safetensors")
    assert all(torch.equal(found[name], values) for name, values in model.state_dict().items())
    assert found.keys() == model.state_dict().keys()


def fill_the_disk(mesh: zs.Mesh, folder: str) -> str:
    """Rank 0's disk is full in the middle of the second tensor."""

    class Full(CheckpointDisk):
        writes = 0

        def reached(self, operation: str, path: Path) -> None:
            Full.writes += operation == "write"
            if operation == "write" and Full.writes == 3:
                raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroshard.access.whole_weights.CheckpointDisk", Full)
        engine = engine_of(Normed(), mesh, zero=3)
        try:
            engine.export(Path(folder) / "w")
        except CheckpointError as error:
            engine.export(Path(folder) / "again")
            return str(error)
    return ""


def test_a_full_disk_stops_all_ranks_and_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(fill_the_disk, 2, str(tmp_path))
    assert first == f"{tmp_path}/w cannot be written (No space left on device); name another folder."
    assert second == f"Rank 0: {first}"
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_wrong_uses(tmp_path: Path) -> None:
    engine = engine_of(Normed())
    with pytest.raises(ConfigError, match="shard_size is 'many'; write a size such as 500MB"):
        engine.export(tmp_path / "w", shard_size="many")
    with engine.gathered(), pytest.raises(PlanError, match=r"engine.export\(\) was called inside"):
        engine.export(tmp_path / "w")
    with engine.gathered(), torch.no_grad():
        next(engine.model.parameters()).fill_(70_000.0)
    with pytest.raises(CheckpointError, match="has values that are not finite in fp16"):
        engine.export(tmp_path / "w", dtype=torch.float16)
    assert not list(tmp_path.iterdir())
