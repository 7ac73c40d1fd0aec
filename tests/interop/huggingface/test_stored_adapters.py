"""Adapters of finished checkpoints: `zeroshard export` writes the files of a running engine, and peft's own sums."""

import json
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.adapters import ADAPTERS, adapted, attach, base, batch, engine_of, rows_of
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.checkpoint import Reader
from zeroshard.cli.main import main
from zeroshard.errors import CheckpointError, CheckpointWarning, DamagedError, ModelError
from zeroshard.interop.huggingface.stored_adapters import CheckpointWeights, planned_adapters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
Plan = dict[str, Any]
NETWORK = {"zero": 3, "transport": "network", "precision": "bf16"}
STAGES, EXPERTS = {"pipeline_parallel": 2, "microbatches": 2}, {"zero": 1, "expert_parallel": 2}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """peft warns of adapters that are loaded, and of configurations that it writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def several() -> nn.Module:
    """A model with two adapters, of which the second is active and scaled by the root of its rank."""
    model: Any = attach(base("llama"), "dora")
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_rslora=True,
                                                init_lora_weights=False, task_type="CAUSAL_LM"))  # fmt: skip
    model.set_adapter("second")
    return model


def taken_in() -> nn.Module:
    """A model of transformers that took adapters in itself, without peft's model around it."""
    model: Any = base("llama")
    torch.manual_seed(5)
    for name, layers in (("default", ["q_proj", "down_proj"]), ("second", ["v_proj"])):
        model.add_adapter(peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False), name)
    model.set_adapter("default")
    return model


def write(mesh: zs.Mesh | None, name: str, plan: Plan, folder: Path) -> dict[str, Tensor]:
    """A checkpoint after a step over a base in files, with the folders of the engine; returns all weights."""
    engine = engine_of(mesh, {"several": several, "taken in": taken_in}.get(name, partial(adapted, name))(), **plan)
    engine.load_weights(folder / "base")
    engine.train_step(rows_of(batch(0), engine.data_rank, engine.data_ranks))
    engine.save(folder / "saved", wait=True)
    engine.export(folder / "adapter", adapters=True)
    engine.export(folder / "merged", merge=True)
    return engine.state_dict()


def same(one: Path, other: Path) -> bool:
    """Whether two folders have the same files, byte for byte."""
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def export(folder: Path, *words: str, to: str = "out") -> Path:
    """Run the command; returns its folder."""
    main(["export", str(folder / "saved"), "--out", str(folder / to), *words])
    return folder / to


@pytest.mark.parametrize("name", [*ADAPTERS, "several"])
def test_files_are_those_of_the_engine_and_sums_those_of_peft(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = base(ADAPTERS.get(name, ("llama",))[0])
    plain.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    weights = write(None, name, {}, tmp_path)
    left = set(Reader(tmp_path / "saved").facts["base"]["tensors"])
    assert len(left) > len(dict(plain.named_parameters())) - 2  # all of the base
    assert same(export(tmp_path, "--merge"), tmp_path / "merged")
    assert f"{type(plain).__name__}.from_pretrained" in capsys.readouterr().out
    active = "second" if name == "several" else "default"
    assert same(export(tmp_path, "--adapter", active, to="alone"), tmp_path / "adapter")
    assert "peft.PeftModel.from_pretrained" in capsys.readouterr().out
    model: Any = several() if name == "several" else adapted(name)
    model.load_state_dict(weights)
    found = type(plain).from_pretrained(tmp_path / "out").state_dict()  # type: ignore[attr-defined]
    for key, value in model.merge_and_unload().state_dict().items():
        assert torch.equal(found[key], value), key
    again = peft.PeftModel.from_pretrained(base(ADAPTERS.get(name, ("llama",))[0]), tmp_path / "alone").state_dict()
    trained = [key for key in again if ".default." in key]
    assert trained
    for key in trained:
        assert torch.equal(again[key], weights[key.replace(".default.", f".{active}.")]), key


def test_a_model_that_took_adapters_in_itself(tmp_path: Path) -> None:
    """As `add_adapter` of transformers makes it; the files are those of peft's model around the same base."""
    plain: Any = base("llama")
    plain.save_pretrained(tmp_path / "base")
    weights = write(None, "taken in", {}, tmp_path)
    assert same(export(tmp_path, "--merge"), tmp_path / "merged")
    assert same(export(tmp_path, "--adapter", "default", to="alone"), tmp_path / "adapter")
    model: Any = peft.PeftModel.from_pretrained(plain, tmp_path / "alone")
    state = model.state_dict()
    trained = {key: value for key, value in state.items() if ".default." in key}
    assert len(trained) == 8
    assert all(torch.equal(value, weights[key.removeprefix("base_model.model.")]) for key, value in trained.items())
    found = type(plain).from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(found[key], value) for key, value in model.merge_and_unload().state_dict().items())
    loaded: Any = base("llama")
    loaded.load_adapter(str(tmp_path / "alone"))
    ours = {key: value for key, value in loaded.state_dict().items() if ".default." in key}
    assert len(ours) == 8 and all(torch.equal(value, weights[key]) for key, value in ours.items())


@pytest.mark.parametrize("name, plan", [("dora", NETWORK), ("lora", STAGES), ("experts", EXPERTS)])
def test_they_are_the_same_under_any_plan(pool: Pool, tmp_path: Path, name: str, plan: Plan) -> None:
    base(ADAPTERS[name][0]).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    pool.run(write, 2, name, plan, tmp_path)
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"was read from .*/base, and that is not there\. Name .* --base-folder"):
        planned(tmp_path)
    moved = ("--base-folder", str(tmp_path / "elsewhere"))
    assert same(export(tmp_path, "--merge", *moved), tmp_path / "merged")
    assert same(export(tmp_path, "--adapter", "default", *moved, to="alone"), tmp_path / "adapter")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_adapters_that_are_views_of_each_other_are_refused(device: str) -> None:
    """Those that peft makes on tied layers: each is the transpose of another."""
    with torch.device(device):
        plain: Any = base("llama")
        plain.config.tie_word_embeddings = True
        plain.tie_weights()
        tied = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
        model = peft.get_peft_model(plain, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **tied))
    with pytest.raises(ModelError, match=r"'.*lm_head\.lora_B.* are parameters over .*Leave out ensure_weight_tying"):
        engine_of(None, model)


def planned(folder: Path, **facts: Any) -> None:
    """Read all tensors of a merged export, without the process of the command."""
    from zeroshard.interop.huggingface.stored_adapters import ExportSizes

    reader = Reader(folder / "saved")
    reader.facts.update(facts)
    plan, read = planned_adapters(reader, None, None, ExportSizes(None, "5GB"))
    for group in plan.groups:
        for slot in group.sources:
            read(slot)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a checkpoint of adapters and of its base."""
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    write(None, "lora", {}, tmp_path)
    return tmp_path


def test_another_base_and_wrong_words_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as error:
            export(saved, *words)
        assert error.value.code == 2 and not (saved / "out").exists()
        return capsys.readouterr().err

    assert "engine.save(path, base=True); or export it with --merge" in refusal()
    assert "--merge and --adapter ask for two folders" in refusal("--merge", "--adapter", "default")
    assert "add --merge or --adapter NAME" in refusal("--base-folder", str(saved / "base"))
    assert "--dtype is for whole models" in refusal("--adapter", "default", "--dtype", "bf16")
    assert "There is no adapter 'other'; the model has 'default'" in refusal("--adapter", "other")
    state = load_file(saved / "base" / "model.safetensors")
    norm = state["model.norm.weight"]
    save_file(state | {"model.norm.weight": norm + 1}, saved / "base" / "model.safetensors")
    assert "is another base than that of" in refusal("--merge")
    del state["model.norm.weight"]
    save_file(state, saved / "base" / "model.safetensors")
    assert "does not hold the values of 'base_model.model.model.norm.weight' [16]" in refusal("--merge")


def test_facts_are_not_trusted(saved: Path) -> None:
    facts = Reader(saved / "saved").facts
    adapters, config = facts["adapters"], facts["config"]
    with pytest.raises(DamagedError, match=r"adapters is .*must be a class, by name a configuration"):
        planned(saved, adapters=adapters | {"active": ["other"]})
    with pytest.raises(CheckpointError, match="is of a Linear, which is no model of transformers"):
        planned(saved, adapters=adapters | {"class": "Linear"})
    with pytest.raises(
        CheckpointError, match=r"transformers and peft cannot build the model .* the versions of the run"
    ):
        planned(saved, adapters=adapters | {"configs": {"default": {"peft_type": "unheard"}}})
    with pytest.raises(CheckpointError, match=r"holds \[32, 16\] where the model that was built has '.*' \[32, 24\]"):
        planned(saved, config=config | {"hidden_size": 24})
    with pytest.raises(CheckpointError, match="has no configuration of adapters"):
        planned(saved, adapters=None)


def test_one_tensor_is_in_memory(saved: Path) -> None:
    """No tensor of the model is kept: each is read when it is asked for."""
    reader = Reader(saved / "saved")
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(reader.facts["config"]))
    with torch.device("meta"):
        model = peft.get_peft_model(model, peft.LoraConfig(**reader.facts["adapters"]["configs"]["default"]))
    weights = CheckpointWeights(reader, model, None)
    assert not any(isinstance(value, Tensor) for value in vars(weights).values())
    assert all(not row.boxes for row in weights.table) and weights._files._drawn == {}


def test_parameters_of_the_base_that_are_trained_are_named(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    model = adapted("lora")
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    model.get_parameter("base_model.model.lm_head.weight").requires_grad_(True)
    engine = engine_of(None, model)
    engine.load_weights(tmp_path / "base")
    engine.train_step(batch(0))
    engine.save(tmp_path / "saved", wait=True)
    with pytest.warns(
        CheckpointWarning, match=r"'default': 'base_model.model.model.norm.weight'\. export\(folder, mer"
    ):
        engine.export(tmp_path / "adapter", adapters=True)
    engine.export(tmp_path / "merged", merge=True)
    with pytest.warns(CheckpointWarning, match="base_model.model.model.norm.weight"):
        assert same(export(tmp_path, "--adapter", "default", to="alone"), tmp_path / "adapter")
    assert same(export(tmp_path, "--merge"), tmp_path / "merged")
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(held["base_model.model.lm_head.weight"], engine.state_dict()["base_model.model.lm_head.weight"])


def grown(mesh: zs.Mesh | None, folder: Path, ties: bool, plan: Plan) -> dict[str, Tensor]:
    """The weights of an engine over a base with further tokens, whose folders it has written."""
    config = transformers.AutoConfig.from_pretrained(folder / "base", vocab_size=40, tie_word_embeddings=ties)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    engine = zs.from_pretrained(
        folder / "base", lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad]), zs.Plan.from_dict(plan),
        mesh=mesh, model=model, missing="initialise",
        adapters=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )  # fmt: skip
    engine.train_step(rows_of(batch(0), engine.data_rank, engine.data_ranks))
    engine.save(folder / "saved", wait=True)
    engine.export(folder / "adapter", adapters=True)
    engine.export(folder / "merged", merge=True)
    return engine.state_dict()


@pytest.mark.parametrize("ties", [False, True])
def test_embeddings_that_grew_are_in_the_files_of_the_adapter(pool: Pool, tmp_path: Path, ties: bool) -> None:
    """As peft's `save_embedding_layers` has it; a base with as many rows takes them."""
    plain: Any = base("llama")
    plain.config.tie_word_embeddings = ties
    if ties:
        plain.tie_weights()
    plain.save_pretrained(tmp_path / "base")
    weights, _ = pool.run(grown, 2, tmp_path, ties, NETWORK | {"precision": "fp32"})
    plain.resize_token_embeddings(40)
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").state_dict()
    assert again.keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in again.items())
    assert same(export(tmp_path, "--adapter", "default", to="alone"), tmp_path / "adapter")
    assert same(export(tmp_path, "--merge"), tmp_path / "merged")
    merged = type(plain).from_pretrained(tmp_path / "merged")
    assert merged.get_input_embeddings().weight.shape == (40, 16)


def quantised(folder: Path, kind: str | None, targets: list[str]) -> None:
    """A checkpoint of adapters over a base in 4 or 8 bits, and the folders that its engine wrote."""
    from interop.huggingface.test_quantized import batch as words
    from interop.huggingface.test_quantized import optimizer

    adapters = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    engine = zs.from_pretrained(folder / "base", optimizer, quantized=kind, adapters=adapters)
    engine.train_step(words(0))
    engine.save(folder / "saved", wait=True)
    engine.export(folder / "merged", merge=True)
    engine.export(folder / "adapter", adapters=True)


@pytest.mark.parametrize("family, kind", [("llama", "nf4"), ("llama", "int8"), ("mixtral", "fp4"), ("gpt2", "nf4")])
def test_a_base_that_was_quantised_while_it_was_read(tmp_path: Path, family: str, kind: str) -> None:
    """It is quantised again to the same codes, which its digests show; stacks and transposed weights, too."""
    pytest.importorskip("bitsandbytes")
    from interop.huggingface.families import made
    from interop.huggingface.test_quantized import folder

    if family == "gpt2":
        made(family, n_embd=64).save_pretrained(tmp_path / "base")
    else:
        shutil.copytree(folder(family), tmp_path / "base")
    quantised(tmp_path, kind, ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj"])
    facts = Reader(tmp_path / "saved").facts
    assert facts["quantised"] and facts["base"]["tensors"]
    assert same(export(tmp_path, "--merge"), tmp_path / "merged")
    assert same(export(tmp_path, "--adapter", "default", to="alone"), tmp_path / "adapter")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("family, kind", [("llama", "nf4"), ("llama", "int8"), ("gpt2", "nf4")])
def test_a_base_whose_files_hold_codes(tmp_path: Path, family: str, kind: str) -> None:
    """Files that transformers wrote with bitsandbytes: their codes are read, not made again."""
    pytest.importorskip("bitsandbytes")
    from interop.huggingface.families import made
    from interop.huggingface.test_quantized import folder, settings

    if family == "gpt2":
        made(family, n_embd=64).save_pretrained(tmp_path / "plain")
    plain = tmp_path / "plain" if family == "gpt2" else folder(family)
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(plain, quantization_config=settings(kind), device_map="cpu").save_pretrained(tmp_path / "base")
    quantised(tmp_path, None, ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj"])
    assert Reader(tmp_path / "saved").facts["base"]["tensors"]
    assert same(export(tmp_path, "--merge"), tmp_path / "merged")
    assert same(export(tmp_path, "--adapter", "default", to="alone"), tmp_path / "adapter")


OWN = """
import peft
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def adapted(r=2):
    settings = {"target_modules": r"blocks\\.\\d", "init_lora_weights": False, "use_dora": True}
    return peft.get_peft_model(Net(), peft.LoraConfig(r=r, **settings))


def other():
    return peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["head"]), adapter_name="other")


def wider():
    return adapted(r=3)


def number():
    return 3
"""


@pytest.mark.parametrize("files", [True, False])
def test_a_model_of_the_users_own_is_made_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: bool
) -> None:
    """With or without adapters around it; its base left out as it was read from files, or in the checkpoint."""
    (code := tmp_path / f"own_{files}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = __import__(code.stem)
    torch.manual_seed(3)
    plain, model = module.Net(), module.adapted()
    engine = engine_of(None, model)
    if files:
        values = {key: value for key, value in plain.state_dict().items() if "head" not in key}
        save_file(values, tmp_path / "base.safetensors")
        engine.load_weights(tmp_path / "base.safetensors")
    engine.train_step(batch(0))
    engine.save(tmp_path / "saved", wait=True)
    engine.export(tmp_path / "adapter", adapters=True)
    engine.export(tmp_path / "merged", merge=True)
    assert bool(Reader(tmp_path / "saved").facts.get("base")) == files
    own = str(code)
    for number, name in enumerate(("Net", "adapted")):
        assert same(export(tmp_path, "--merge", "--model", f"{own}:{name}", to=f"m{number}"), tmp_path / "merged")
        words = ("--adapter", "default", "--model", f"{own}:{name}")
        assert same(export(tmp_path, *words, to=f"a{number}"), tmp_path / "adapter")
    whole = module.adapted()
    whole.load_state_dict(engine.state_dict())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for key, value in whole.merge_and_unload().state_dict().items():
        assert torch.equal(merged[key], value), key

    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as error:
            export(tmp_path, *words)
        assert error.value.code == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "cannot be built from the manifest. Name the code that makes it, --model" in refusal("--merge")
    assert "--model is the code of a base with adapters; add --merge" in refusal("--model", own)
    assert "has the adapters default, and the given model is a PeftModel with others (other)" in refusal(
        "--merge", "--model", f"{own}:other"
    )
    assert "where the model that was built has" in refusal("--merge", "--model", f"{own}:wider")
    assert "names no class or function" in refusal("--merge", "--model", "Net")
    assert "it must return an nn.Module" in refusal("--merge", "--model", f"{own}:number")
