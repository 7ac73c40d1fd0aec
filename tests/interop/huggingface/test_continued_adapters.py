"""Adapters in a folder of peft are trained further as peft does it, under any plan; files of others are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adapters import ADAMW, adapted, base, batch, rows_of
from plain_loop import plain_loop
from pool import Pool
from safetensors.torch import load_file, save_file
from selection import by_default

import zeroshard as zs
from zeroshard.errors import CheckpointError, ModelError, ZeroshardError

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*LlamaRMSNorm"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Specified to not (save|load) vera_A and vera_B"),
]
LAYERS = ["q_proj", "v_proj"]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KINDS: dict[str, Callable[[], Any]] = {
    "copies": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, modules_to_save=["lm_head", "embed_tokens"]),
    "embeddings": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    "biases": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, bias="all"),
    "orthogonal": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, init_lora_weights="orthogonal"),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=LAYERS, use_dora=True),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=LAYERS),
    "vera drawn": lambda: peft.VeraConfig(r=4, target_modules=LAYERS, save_projection=False),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=LAYERS),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=LAYERS),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


def trained(parameters: Any) -> torch.optim.Optimizer:
    return ADAMW([p for p in parameters if p.requires_grad])


def losses_of(model: Any, first: int, count: int = 3) -> list[float]:
    """The losses of a plain loop."""
    steps = [[batch(step)] for step in range(first, first + count)]
    return plain_loop(model.train(), ADAMW, steps, lambda model, part: model(**part).loss).losses


def written(folder: Path, model: Any) -> None:
    """Files of the base, and of adapters after some steps."""
    family = "mixtral" if "Mixtral" in type(model.get_base_model()).__name__ else "llama"
    base(family).save_pretrained(folder / "base")  # type: ignore[operator]
    losses_of(model, 0)
    model.save_pretrained(folder / "adapter")


def by_peft(folder: Path) -> Any:
    """The adapters in files, on the base in files, for training."""
    kind = "mixtral" if "Mixtral" in (folder / "base" / "config.json").read_text() else "llama"
    return peft.PeftModel.from_pretrained(base(kind), folder / "adapter", is_trainable=True)


def continued(mesh: zs.Mesh | None, folder: Path, out: Path | None, **plan: Any) -> list[float]:
    """The losses of three more steps."""
    settings = zs.Plan(**plan)
    example = rows_of(batch(0), 0, 4) if settings.pipelined else None
    engine = zs.from_pretrained(
        folder / "base", trained, settings, adapters=folder / "adapter", mesh=mesh, example=example
    )
    assert any("lora_A" in name or "default" in name for name in engine.loaded.read)
    parts = [rows_of(batch(step), engine.data_rank, engine.data_ranks) for step in range(5, 8)]
    losses = [engine.train_step(part).loss for part in parts]
    if out is not None:
        engine.export(out, adapters=True)
    return [float("nan") if loss is None else float(loss) for loss in losses]


@pytest.mark.parametrize("kind", by_default(KINDS, "copies", "dora", "vera", "oft", "norms"))
def test_they_go_on_as_with_peft(tmp_path: Path, kind: str) -> None:
    written(tmp_path, peft.get_peft_model(base("llama"), KINDS[kind]()))
    again = by_peft(tmp_path)
    wanted = losses_of(again, 5)
    assert continued(None, tmp_path, tmp_path / "out", zero=3) == pytest.approx(wanted, rel=1e-5)
    again.save_pretrained(tmp_path / "theirs")
    found, theirs = load_file(tmp_path / "out" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS)
    assert theirs.keys() - found.keys() <= {"base_model.model.lm_head.weight"}  # which peft adds beside embeddings
    for name, value in found.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, plan",
    [
        ("lora", {"zero": 3, "transport": "network"}),
        ("head", {"zero": 2}),
        ("dora", {"pipeline_parallel": 2, "microbatches": 2}),
        ("lora", {"tensor_parallel": 2}),
        ("experts", {"expert_parallel": 2, "zero": 2}),
    ],
)
def test_they_go_on_under_any_plan(pool: Pool, tmp_path: Path, name: str, plan: dict[str, Any]) -> None:
    written(tmp_path, adapted(name))
    wanted = losses_of(by_peft(tmp_path), 5)
    results = pool.run(on_ranks, 2, tmp_path, plan)
    losses = torch.tensor(results).nanmean(0)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-4)


def on_ranks(mesh: zs.Mesh, folder: Path, plan: dict[str, Any]) -> list[float]:
    return continued(mesh, folder, None, **plan)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path], Any], type[ZeroshardError], str]] = {
    "no configuration": (
        lambda at: (at / CONFIG).unlink(),
        ModelError,
        r"adapter' has no adapter_config\.json; give a folder that save_pretrained of peft or engine\.export",
    ),
    "no file": (lambda at: (at / WEIGHTS).unlink(), CheckpointError, "adapter has no safetensors file"),
    "a pickle": (
        lambda at: (at / WEIGHTS).rename(at / "adapter_model.bin"),
        CheckpointError,
        r"adapter_model\.bin may be a pickle",
    ),
    "a kind that peft lacks": (
        lambda at: (at / CONFIG).write_text(json.dumps({"peft_type": "NEWEST"})),
        ModelError,
        r"peft reads no configuration from .*adapter_config\.json: ",
    ),
    "a missing tensor": (
        lambda at: changed(at, lambda tensors: tensors.pop(A)),
        CheckpointError,
        f"it lacks '{A}'. Give the base on which they were trained",
    ),
    "a further tensor": (
        lambda at: changed(at, lambda tensors: tensors.update(further=torch.zeros(2))),
        CheckpointError,
        "it holds 'further', which the model does not have",
    ),
    "another rank": (
        lambda at: changed(at, lambda tensors: tensors.update({A: torch.zeros(3, 16)})),
        CheckpointError,
        rf"adapter_model\.safetensors is of other adapters .*'{A}' is \(3, 16\) there and \(2, 16\) here",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_of_others_are_refused(tmp_path: Path, case: str) -> None:
    change, error, message = WRONG[case]
    written(tmp_path, adapted("lora"))
    change(tmp_path / "adapter")
    with pytest.raises(error, match=message):
        continued(None, tmp_path, None)


def test_prompts_are_read_and_what_is_computed_from_an_encoder_is_not(tmp_path: Path) -> None:
    settings = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    written(tmp_path, peft.get_peft_model(base("llama"), peft.PromptTuningConfig(**settings)))
    engine = zs.from_pretrained(tmp_path / "base", trained, adapters=tmp_path / "adapter")
    (stored,) = load_file(tmp_path / "adapter" / WEIGHTS).values()
    assert torch.equal(engine.state_dict()["prompt_encoder.default.embedding.weight"], stored)
    shutil.rmtree(tmp_path / "adapter")
    written(tmp_path, peft.get_peft_model(base("llama"), peft.PromptEncoderConfig(**settings, encoder_hidden_size=8)))
    with pytest.raises(ModelError, match=r"by P_TUNING hold values that are computed .* engine\.load\(checkpoint\)"):
        zs.from_pretrained(tmp_path / "base", trained, adapters=tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["pissa", "olora", "osf"])
def test_adapters_that_change_their_base_are_refused(tmp_path: Path, kind: str) -> None:
    config = (
        peft.OSFConfig(target_modules=LAYERS)
        if kind == "osf"
        else peft.LoraConfig(r=2, target_modules=LAYERS, init_lora_weights=kind)
    )
    written(tmp_path, peft.get_peft_model(base("llama"), config))
    with pytest.raises(ModelError, match=r"[Aa]ttach .* to a base (with values|that has them)|PeftModel"):
        zs.from_pretrained(tmp_path / "base", trained, adapters=tmp_path / "adapter")


def test_a_folder_of_adapters_as_the_model_is_named_with_its_base(tmp_path: Path) -> None:
    written(tmp_path, peft.get_peft_model(base("llama"), peft.LoraConfig(r=2, target_modules=LAYERS)))
    table = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(table | {"base_model_name_or_path": "llama-8b"}))
    with pytest.raises(ModelError, match=r"of adapters.*zs\.from_pretrained\('llama-8b', \.\.\., adapters='.*adapter'"):
        zs.from_pretrained(tmp_path / "adapter", trained)
