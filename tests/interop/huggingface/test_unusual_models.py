"""Models whose classes make values in other ways than most: by an outer model, or without regard to the meta device."""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.huggingface.families import GROUPED, TEXT, VOCABULARY, batch
from plain_loop import plain_loop
from safetensors.torch import load_file, save_file

import zeroshard as zs
from zeroshard.cli.main import main

transformers = pytest.importorskip("transformers")
SGD = partial(torch.optim.SGD, lr=0.1)
HYBRID = {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "a buffer in files that nothing initialises": ("ApertusForCausalLM", GROUPED),
    "a buffer that the outer model fills": ("FalconH1ForCausalLM", HYBRID),
    "parameters that the constructor draws": ("DiffLlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "parameters without values on the host": (
        "XLNetLMHeadModel",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 20, "dropout": 0.0},
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns about settings of small models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(name: str, folder: Path, **settings: Any) -> Any:
    """A model of transformers with random values, written to a folder."""
    kind = getattr(transformers, name)
    torch.manual_seed(3)
    model = kind(kind.config_class(**settings)).float()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("case", MODELS)
def test_loaded_trained_and_written_as_by_transformers(case: str, tmp_path: Path) -> None:
    name, settings = MODELS[case]
    plain = made(name, tmp_path / "a", **settings)
    engine = zs.from_pretrained(tmp_path / "a", SGD, zs.Plan(zero=3))
    state, buffers = engine.state_dict(), dict(engine.model.named_buffers())
    assert [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)] == []
    assert [name for name, value in plain.named_buffers() if not torch.equal(buffers[name], value)] == []
    losses = [engine.train_step(batch("llama", step)).loss for step in range(3)]
    steps = [[batch("llama", step)] for step in range(3)]
    wanted = plain_loop(plain.train(), SGD, steps, lambda model, part: model(**part).loss).losses
    assert losses == pytest.approx(wanted, rel=1e-5)
    engine.export(tmp_path / "b")
    again, facts = type(plain).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(facts.values())
    state = engine.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


def test_values_that_the_files_lack_are_drawn_by_the_class(tmp_path: Path) -> None:
    """As transformers does, although the constructor draws outside of the meta device."""
    name, settings = MODELS["parameters without values on the host"]
    plain = made(name, tmp_path / "a", **settings)
    file = tmp_path / "a" / "model.safetensors"
    values = {key: value for key, value in load_file(file).items() if not key.endswith("layer.1.rel_attn.q")}
    save_file(values, file, {"format": "pt"})
    engine = zs.from_pretrained(tmp_path / "a", SGD, missing="initialise")
    assert engine.loaded is not None and engine.loaded.initialised == ("transformer.layer.1.rel_attn.q",)
    drawn = engine.state_dict()["transformer.layer.1.rel_attn.q"]
    assert float(drawn.std()) == pytest.approx(plain.config.initializer_range, rel=0.2)


def test_a_tied_weight_is_written_under_the_name_that_transformers_keeps(tmp_path: Path) -> None:
    """A class that makes its head before its base: files under the head's name have no embeddings for the base."""
    settings = {**TEXT, "pad_token_id": 1, "type_vocab_size": 2}
    plain = made("CamembertForMaskedLM", tmp_path / "a", **settings)
    engine = zs.from_pretrained(tmp_path / "a", SGD, zs.Plan(zero=3))
    engine.export(tmp_path / "b")
    engine.save(tmp_path / "saved", wait=True)
    main(["export", str(tmp_path / "saved"), "--out", str(tmp_path / "c")])
    wanted = load_file(tmp_path / "a" / "model.safetensors").keys()
    for folder in ("b", "c"):
        assert load_file(tmp_path / folder / "model.safetensors").keys() == wanted, folder
        base = transformers.AutoModel.from_pretrained(tmp_path / folder)
        assert torch.equal(base.embeddings.word_embeddings.weight, plain.roberta.embeddings.word_embeddings.weight)
    assert {name for name, _ in engine.weights(names="transformers")} == wanted


def test_merged_adapters_are_written_under_those_names_too(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made("CamembertForMaskedLM", tmp_path / "a", **TEXT, type_vocab_size=2)
    adapters = peft.LoraConfig(r=2, target_modules=["query"])
    engine = zs.from_pretrained(tmp_path / "a", SGD, zs.Plan(zero=3), adapters=adapters)
    engine.export(tmp_path / "b", merge=True)
    wanted = load_file(tmp_path / "a" / "model.safetensors").keys()
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == wanted
