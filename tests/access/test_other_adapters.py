"""Adapters of peft besides LoRA: they train, start, are exported and merged as peft has it, on the meta device too."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adapters import ADAMW, STEPS, base, batch, engine_of, rows_of
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

import zeroshard as zs
from zeroshard.cli.main import main
from zeroshard.errors import ModelError, PlanError

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*LlamaRMSNorm"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]
LAYERS = ["q_proj", "v_proj"]
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
KINDS: dict[str, Callable[[], Any]] = {
    "ia3": lambda: peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=LAYERS),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=LAYERS),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=LAYERS, total_step=20, tinit=1, tfinal=5),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=LAYERS),
    "vblora": lambda: peft.VBLoRAConfig(r=2, num_vectors=16, vector_length=8, topk=2, target_modules=LAYERS),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=LAYERS),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
    "encoder": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8),
}
ADAPTER = ["--adapter", "default"]
PROMPTS = ("prompt", "prefix", "encoder")  # beside the weights
OF_BASE = {  # initial values that are computed from the base's
    "norms": KINDS["norms"],
    "rows": lambda: peft.PromptTuningConfig(**PROMPT, prompt_tuning_init="SAMPLE_VOCAB"),
    "osf": lambda: peft.OSFConfig(target_modules=LAYERS),
    "singular vectors": lambda: peft.TinyLoraConfig(target_modules=LAYERS),
}


def attached(kind: str) -> Any:
    model = base("llama")
    torch.manual_seed(5)
    return peft.get_peft_model(model, KINDS[kind]())


def trained(parameters: Any) -> torch.optim.Optimizer:
    return ADAMW([p for p in parameters if p.requires_grad])


def logits_of(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=batch(9)["input_ids"]).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_they_train_and_are_exported_as_with_peft(tmp_path: Path, kind: str) -> None:
    model, plain = attached(kind), attached(kind).train()
    engine, optimizer = engine_of(None, model, zero=3), trained(plain.parameters())
    for step in range(STEPS):
        loss = plain(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(engine.train_step(batch(step)).loss, loss.detach(), rtol=1e-5, atol=1e-6)
    engine.export(tmp_path / "adapter", adapters=True)
    again = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "adapter")
    wanted = logits_of(plain)
    assert (wanted[:, -batch(9)["input_ids"].shape[1] :] - logits_of(base("llama"))).abs().max() > 1e-5
    torch.testing.assert_close(logits_of(again), wanted, rtol=1e-5, atol=1e-5)
    if kind in PROMPTS:
        with pytest.raises(PlanError, match=r"of this model are beside them \(prompts, prefixes\)"):
            engine.export(tmp_path / "merged", merge=True)
    else:
        engine.export(tmp_path / "merged", merge=True)
        merged = type(base("llama")).from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(logits_of(merged), wanted, rtol=1e-5, atol=1e-5)


def made_on_meta(mesh: zs.Mesh | None, kind: str, folder: Path, out: Path, **plan: Any) -> tuple[float, Any, Any]:
    """The first loss of an engine with the weights of a folder, and all weights before and after a step.

    The adapter after it, and merged weights, are exported.
    """
    settings = zs.Plan(**plan) if plan else zs.Plan()
    example = batch(0) if settings.pipelined else None
    engine = zs.from_pretrained(folder, trained, settings, adapters=KINDS[kind](), mesh=mesh, example=example)
    first, whole = engine.state_dict(), batch(0)
    loss = float(engine.train_step(rows_of(whole, engine.data_rank, engine.data_ranks)).loss)
    engine.export(out / "adapter", adapters=True)
    if kind not in PROMPTS:
        engine.export(out / "merged", merge=True)
    return loss, first, engine.state_dict()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OF_BASE])
def test_on_the_meta_device_they_begin_as_peft_has_it(tmp_path: Path, kind: str) -> None:
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    loss, first, last = made_on_meta(None, kind, tmp_path / "base", tmp_path / "adapter")
    on_host = attached(kind)
    assert first.keys() == on_host.state_dict().keys()
    for name, value in on_host.state_dict().items():
        if not value.is_floating_point() or value.unique().numel() == 1 or ".base_layer." in name:
            assert torch.equal(first[name], value), name  # indices, constants and the base
        elif value.numel() > 30:  # drawn
            assert 0.5 < first[name].std() / value.std() < 2, name
    if kind not in PROMPTS:  # adapters begin with those outputs
        assert loss == pytest.approx(on_host.train()(**batch(0)).loss.item(), rel=0.01)
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize(
    "kind, plan",
    [
        ("vera", "shared"),
        ("vblora", "network"),
        ("prompt", "network"),
        ("prefix", "tensor"),
        ("loha", "tensor"),
        ("oft", "stages"),
        ("vblora", "stages"),
    ],
)
def test_they_start_and_train_alike_under_any_plan(pool: Pool, tmp_path: Path, kind: str, plan: str) -> None:
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    settings: dict[str, Any] = {
        "network": {"zero": 3, "transport": "network"},
        "shared": {"zero": 3},
        "tensor": {"tensor_parallel": 2},
        "stages": {"pipeline_parallel": 2, "microbatches": 2},
    }[plan]
    _, first, last = made_on_meta(None, kind, tmp_path / "base", tmp_path / "alone")
    here = pool.run(on_ranks, 2, kind, tmp_path, settings)
    for _, begun, ended in here:
        assert all(torch.equal(begun[name], value) for name, value in first.items())
        for name, value in last.items():
            torch.testing.assert_close(ended[name], value, rtol=1e-4, atol=1e-5)
    for file in (tmp_path / "alone").glob("*/*.safetensors"):
        wanted, found = load_file(file), load_file(tmp_path / "ranks" / file.relative_to(tmp_path / "alone"))
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def on_ranks(mesh: zs.Mesh, kind: str, folder: Path, plan: dict[str, Any]) -> tuple[float, Any, Any]:
    return made_on_meta(mesh, kind, folder / "base", folder / "ranks", **plan)


@pytest.mark.parametrize("kind", ["ia3", "vera", "oft", "fourier", "vblora"])
def test_a_checkpoint_is_exported_as_the_engine_does(tmp_path: Path, kind: str) -> None:
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    engine = zs.from_pretrained(tmp_path / "base", trained, adapters=KINDS[kind]())
    engine.train_step(batch(0))
    engine.save(tmp_path / "saved", wait=True)
    for name, asked, words in (("merged", {"merge": True}, ["--merge"]), ("adapter", {"adapters": True}, ADAPTER)):
        engine.export(tmp_path / "live" / name, **asked)
        main(["export", str(tmp_path / "saved"), *words, "--out", str(tmp_path / name)])
        (live,), (stored,) = ((tmp_path / part / name).glob("*.safetensors") for part in ("live", "."))
        wanted, found = load_file(live), load_file(stored)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in wanted.items()), name


@pytest.mark.parametrize("kind", OF_BASE)
def test_values_that_are_computed_from_the_base_need_one(tmp_path: Path, kind: str) -> None:
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"computes its initial values .* to a base with values, by .* to zs\.Engine"):
        zs.from_pretrained(tmp_path / "base", trained, adapters=OF_BASE[kind]())


def test_files_with_values_that_are_no_parameters_are_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(base("llama"), peft.ShiraConfig(r=2, target_modules=LAYERS))
    with pytest.raises(PlanError, match=r"by SHIRA have '.*shira_indices', which is no parameter or buffer"):
        engine_of(None, model).export(tmp_path / "adapter", adapters=True)


def test_biases_without_a_place_are_not_merged(tmp_path: Path) -> None:
    model = peft.get_peft_model(base("llama"), peft.LoraConfig(r=2, target_modules=LAYERS, lora_bias=True))
    with pytest.raises(PlanError, match=r"peft cannot merge: .*the base layer has no bias\. Export the adapter alone"):
        engine_of(None, model).export(tmp_path / "merged", merge=True)


def test_replicated_layers_are_written_apart_when_merged(tmp_path: Path) -> None:
    """Layers that share frozen weights and have adapters of their own (`layer_replication`)."""
    config = peft.LoraConfig(r=2, target_modules=LAYERS, layer_replication=[[0, 2], [1, 2]], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(None, peft.get_peft_model(base("llama"), config))
    engine.train_step(batch(0))
    engine.export(tmp_path / "merged", merge=True)
    merged: Any = type(base("llama")).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.num_hidden_layers == 3
    torch.testing.assert_close(logits_of(merged), logits_of(engine.model), rtol=1e-5, atol=1e-5)
