"""Files that do not fit a model: one sentence for each, with the file, the tensor and the way out; and new parts."""

import importlib.util
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.shard_file import ShardFile
from zeroshard.errors import CheckpointError, ConfigError, ModelError, OptimizerError, ZeroshardError
from zeroshard.interop.huggingface.loading import build
from zeroshard.interop.huggingface.pretrained import PretrainedValues

transformers = pytest.importorskip("transformers")
from interop.huggingface.families import folder, made  # noqa: E402

FILE = "model.safetensors"
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.0.mlp.experts.2.down_proj.weight"
Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns about its own deprecations and settings of small models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def changed(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the tensors of the one file."""

    def apply(path: Path) -> None:
        tensors = load_file(path / FILE)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / FILE)

    return apply


def header(change: Callable[[str], str]) -> Change:
    """Change the text of the file's header, whose length stays."""

    def apply(path: Path) -> None:
        content = (path / FILE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        text = change(content[8 : 8 + length].decode()).encode()
        (path / FILE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return apply


def configured(**settings: Any) -> Change:
    """Change the configuration."""

    def apply(path: Path) -> None:
        table = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(table | settings))

    return apply


def sharded(change: Callable[[dict[str, str], Path], object]) -> Change:
    """Write one file per few tensors with an index, and change the index or the files."""

    def apply(path: Path) -> None:
        tensors = load_file(path / FILE)
        (path / FILE).unlink()
        names = sorted(tensors)
        where = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
        for file in set(where.values()):
            save_file({name: tensors[name] for name in names if where[name] == file}, path / file)
        change(where, path)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return apply


def swapped(tensors: dict[str, Any], name: str, value: Any) -> None:
    tensors[name] = value(tensors[name]) if name in tensors else value(None)


def cut_short(path: Path) -> None:
    content = (path / FILE).read_bytes()
    (path / FILE).write_bytes(content[:-100])


def pickled(path: Path) -> None:
    torch.save(load_file(path / FILE), path / "pytorch_model.bin")
    (path / FILE).unlink()


SHARD = "model-00002-of-00002.safetensors"
WRONG: dict[str, tuple[str, Change, str]] = {  # family, change of its folder, the error
    "a parameter without a value": (
        "llama", changed(lambda t: t.pop(NORM)),
        rf"of another model than LlamaForCausalLM \(llama\): it lacks '{NORM}'.* missing=\"initialise\"",
    ),
    "a value without a parameter": (
        "llama", changed(lambda t: swapped(t, "model.extra.weight", lambda _: torch.ones(2))),
        r"holds 'model.extra.weight', which the model does not have.* strict=False",
    ),
    "a wrong shape": (
        "llama", changed(lambda t: swapped(t, NORM, lambda v: v[:8])),
        rf"{FILE} is of another model .*'{NORM}' is \(8,\) there and \(16,\) here.* strict=False and missing",
    ),
    "too few rows of the vocabulary": (
        "llama", changed(lambda t: swapped(t, EMBED, lambda v: v[:20])),
        rf"'{EMBED}' is \(20, 16\) there and \(29, 16\) here.* missing=\"initialise\" to draw the further rows",
    ),
    "a tied weight that differs": (
        "qwen2", changed(lambda t: swapped(t, HEAD, lambda _: t[EMBED] + 1)),
        rf"{FILE} holds other values under '({HEAD}|{EMBED})' than under '({EMBED}|{HEAD})'.*tie_word_embeddings",
    ),
    "a file that is cut short": ("llama", cut_short, rf"{FILE} is cut short: it has [\d,]+ bytes, and '.*' ends at"),
    "an empty file": (
        "llama", lambda path: (path / FILE).write_bytes(b""), rf"{FILE} cannot be read: it has 0 bytes and no header",
    ),
    "a pointer of Git LFS": (
        "llama", lambda path: (path / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid 1\n"),
        rf"{FILE} is a pointer of Git LFS.* git lfs pull",
    ),
    "a damaged header": ("llama", header(lambda text: "{" + text[2:]), rf"{FILE} cannot be read: its header is dam"),
    "a shape that is not that of the bytes": (
        "llama", header(lambda text: text.replace('"shape":[16]', '"shape":[15]', 1)),
        rf"{FILE} is damaged: '.*' has 64 bytes there, and \[15\] of F32 has 60",
    ),
    "a name twice in a file": (
        "llama", header(lambda text: text.replace("layers.1.input_layernorm", "layers.0.input_layernorm")),
        r"header is damaged .*'model.layers.0.input_layernorm.weight' stands twice in it",
    ),
    "a missing shard": (
        "llama", sharded(lambda where, path: (path / SHARD).unlink()), rf"{SHARD} cannot be read .*Copy it again",
    ),
    "an index that names an absent tensor": (
        "llama", sharded(lambda where, path: where.update({"model.more": SHARD})),
        rf"{SHARD} lacks 'model.more', which .* says it holds",
    ),
    "an index that leaves its folder": (
        "llama", sharded(lambda where, path: where.update({NORM: "../x.safetensors"})),
        rf"index.json says that '{NORM}' is in '\.\./x.safetensors', which is no name of a safetensors file",
    ),
    "no files": ("llama", lambda path: (path / FILE).unlink(), r"has no safetensors file"),
    "pickles": (
        "llama", pickled, r"pytorch_model.bin may be a pickle.* safetensors.torch.save_file or save_pretrained",
    ),
    "integers": (
        "llama", changed(lambda t: swapped(t, NORM, lambda v: v.to(torch.int8))),
        rf"{FILE} holds '{NORM}' as torch.int8 and the model has torch.float32.* not quantized",
    ),
    "an expert that is missing": (
        "mixtral", changed(lambda t: t.pop("model.layers.0.block_sparse_moe.experts.2.w2.weight")),
        r"lack 'model.layers.0.block_sparse_moe.experts.2.w2.weight', and hold other weights of these 4 experts",
    ),
    "an expert of another shape": (
        "qwen3-moe", changed(lambda t: swapped(t, EXPERT, lambda v: v[:8])),
        rf"'{EXPERT}'.* do not make up 'model.layers.0.mlp.experts.down_proj'",
    ),
    "scales of another shape": (
        "llama", changed(lambda t: t.update({
            "model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn),
            "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 3)})),
        r"'model.layers.0.mlp.up_proj.weight' as \[20, 16\] and '.*_scale_inv' as \[3, 3\], which is neither",
    ),
}  # fmt: skip
WRONG_MODELS: dict[str, tuple[Change, str]] = {
    "no configuration": (lambda path: (path / "config.json").unlink(), "has no config.json; give the folder"),
    "code in the folder": (
        configured(model_type="unheard", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}),
        "names code of its own, which is not run",
    ),
    "an unknown class": (configured(architectures=["Unheard"]), "names Unheard, which transformers does not have"),
    **{
        f"weights of {method}": (
            configured(quantization_config={"quant_method": method, "bits": 4}),
            rf"quantised by {method}, which is not read; .*from which they were made",
        )
        for method in ("awq", "gptq", "auto-round", "torchao")
    },
    "4-bit weights of compressed-tensors": (
        configured(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        r"quantised by compressed-tensors \(pack-quantized\), which is not read.*CompressedTensorsConfig\(deq",
    ),
}  # fmt: skip


def copied(family: str, path: Path, change: Change) -> Path:
    target = path / "changed"
    shutil.copytree(folder(family), target)
    change(target)
    return target


def load(path: Path, **options: Any) -> zs.Engine:
    return zs.from_pretrained(path, partial(torch.optim.SGD, lr=0.1), **options)


@pytest.mark.parametrize("case", WRONG)
def test_files_of_another_model_are_refused(tmp_path: Path, case: str) -> None:
    family, change, message = WRONG[case]
    with pytest.raises(CheckpointError) as found:
        load(copied(family, tmp_path, change))
    assert re.search(message, str(found.value)), str(found.value)


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_configurations_that_name_no_model_are_refused(tmp_path: Path, case: str) -> None:
    change, message = WRONG_MODELS[case]
    with pytest.raises(ModelError, match=message):
        load(copied("llama", tmp_path, change))


def test_a_class_of_another_family_is_refused() -> None:
    with pytest.raises(ModelError, match=r"family 'llama', and GPT2LMHeadModel needs .* 'gpt2'"):
        load(folder("llama"), model=transformers.GPT2LMHeadModel)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=29))
    with pytest.raises(CheckpointError, match=r"another model than GPT2LMHeadModel \(gpt2\): it lacks .* and holds"):
        load(folder("llama"), model=model)


def refused_on(mesh: zs.Mesh, path: str) -> str:
    """The error of a rank, where rank 1 finds no files."""
    with pytest.raises(CheckpointError) as found:
        load(Path(path) if mesh.rank == 0 else Path("absent"), mesh=mesh)
    return str(found.value)


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    messages = pool.run(refused_on, 2, str(folder("llama")))
    assert messages[0] == messages[1] and messages[0].startswith("absent does not exist")


def test_options_and_paths_are_checked() -> None:
    with pytest.raises(ModelError, match="missing is 'draw'; it is one of 'refuse', 'initialise'"):
        load(folder("llama"), missing="draw")
    with pytest.raises(ModelError, match="has no option 'stict'; it has strict, missing, dtype"):
        load(folder("llama"), stict=False)
    with pytest.raises(CheckpointError, match="not looked up: download the folder first"):
        load(Path("meta-llama/Llama-3.2-1B"))


def test_a_model_with_values_of_its_own_is_refused() -> None:
    """As one that was built outside of the meta device: its values would stay in place of the file's."""
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder("llama")))
    with pytest.raises(CheckpointError, match=r"'.*' has values in the model, and .* gives others\. Build .*\"meta\""):
        load(folder("llama"), model=model)
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine = load(folder("llama"), model=model, strict=False)
    assert engine.loaded is not None and set(engine.loaded.unused) == set(own) and engine.loaded.read == ()
    assert all(torch.equal(value, own[name]) for name, value in engine.state_dict().items())


def test_dtypes_are_given_as_such_or_by_name(tmp_path: Path) -> None:
    for name in ("bf16", "bfloat16", torch.bfloat16):
        engine = load(folder("llama"), dtype=name)
        assert {value.dtype for value in engine.state_dict().values()} == {torch.bfloat16}
    for wrong in ("bf17", torch.int8, 16):
        with pytest.raises(ConfigError, match=r"dtype is .*; it must be a floating-point one, such as torch.bfloat16"):
            load(folder("llama"), dtype=wrong)
    load(folder("llama")).export(tmp_path / "out", dtype="bf16")
    assert {value.dtype for value in load_file(tmp_path / "out" / FILE).values()} == {torch.bfloat16}


def test_a_file_in_place_of_the_folder_is_named() -> None:
    with pytest.raises(ModelError, match=r"model.safetensors is a file of weights without a config.json; give its fo"):
        load(folder("llama") / FILE)


def test_a_class_for_other_families_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"cannot build AutoModelForSeq2SeqLM from .*Unrecognized conf") as found:
        load(folder("llama"), model=transformers.AutoModelForSeq2SeqLM)
    assert "\n" not in str(found.value)


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], type[ZeroshardError], str]] = {
    "no path": (
        {"path": None},
        ModelError,
        "path is a NoneType; give the folder of a model that save_pretrained wrote",
    ),
    "a model": ({"path": nn.Linear(2, 2)}, ModelError, r"path is a Linear; .* goes to zs\.Engine\(model, optimizer"),
    "an optimizer of another model": (
        {"optimizer": torch.optim.AdamW([torch.zeros(2)])},
        OptimizerError,
        r"The AdamW holds parameters of another model.* Give a function of the parameters, such as functools",
    ),
    "strictness in words": ({"strict": "no"}, ModelError, "strict is 'no'; it is True or False"),
    "adapters as a table": ({"adapters": {"r": 8}}, ModelError, r"adapters is a dict; give .* peft\.LoraConfig\(r=16"),
    "a dtype by its old name": ({"torch_dtype": "auto"}, ModelError, r"has no option 'torch_dtype'; .* Pass dtype=\."),
    "a map of devices": ({"device_map": "auto"}, ModelError, "has no option 'device_map'.*The plan says where"),
    "an option of the model": (
        {"attn_implementation": "eager"},
        ModelError,
        r'build it under torch\.device\("meta"\) and pass it as model=',
    ),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named_with_the_way_out(case: str) -> None:
    given, error, message = WRONG_ARGUMENTS[case]
    words: dict[str, Any] = {"path": folder("llama"), "optimizer": torch.optim.AdamW, **given}
    with pytest.raises(error, match=message):
        zs.from_pretrained(words.pop("path"), words.pop("optimizer"), **words)


def test_adapters_that_peft_refuses_are_named() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(
        ModelError, match=r"peft refuses adapters=LoraConfig\(\.\.\.\): Target modules .*'absent'.* not f"
    ):
        load(folder("llama"), adapters=peft.LoraConfig(target_modules=["absent"]))
    with pytest.raises(ModelError, match=r"adapters='lora' has no adapter_config\.json; give a folder"):
        load(folder("llama"), adapters="lora")


def model_of(kind: str, family: str, **settings: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder(family))
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return getattr(transformers, kind).from_config(config, dtype=torch.float32)


def test_a_new_head_is_drawn_and_listed() -> None:
    model = model_of("AutoModelForSequenceClassification", "llama", num_labels=3)
    with pytest.raises(CheckpointError, match=r"lacks 'score.weight' and holds 'lm_head.weight'"):
        load(folder("llama"), model=model_of("AutoModelForSequenceClassification", "llama", num_labels=3))
    engine = load(folder("llama"), model=model, missing="initialise", strict=False)
    assert engine.loaded is not None
    assert engine.loaded.initialised == ("score.weight",) and engine.loaded.unused == (HEAD,)
    state, given = engine.state_dict(), made("llama").state_dict()
    assert 0.01 < state["score.weight"].std() < 0.04  # initializer_range is 0.02
    assert all(torch.equal(value, given[name]) for name, value in state.items() if name != "score.weight")


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2's output layer is its embedding
def test_rows_of_new_tokens_are_drawn(family: str) -> None:
    engine = load(folder(family), model=model_of("AutoModelForCausalLM", family, vocab_size=40), missing="initialise")
    assert engine.loaded is not None and engine.loaded.initialised == ()
    assert set(engine.loaded.partly) == ({EMBED, HEAD} if family == "llama" else {EMBED})
    given = made(family).state_dict()
    for name in (EMBED, HEAD):
        rows = engine.state_dict()[name]
        assert torch.equal(rows[:29], given[name]) and 0.01 < rows[29:].std() < 0.04


def test_weights_that_are_left_out_do_not_change_the_others(tmp_path: Path) -> None:
    path = copied("llama", tmp_path, changed(lambda t: swapped(t, NORM, lambda v: v[:8])))
    engine = load(path, strict=False, missing="initialise")
    assert engine.loaded is not None and engine.loaded.unused == (NORM,) and engine.loaded.initialised == (NORM,)
    assert torch.equal(engine.state_dict()[NORM], torch.ones(16))


@pytest.mark.parametrize("shape", [(), (1,), (20, 1), (2, 1), (20,)])
def test_scaled_8_bit_weights_are_multiplied_out(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Factors of the tensor, of rows, and of blocks, here of 10 x 16."""
    name = "model.layers.0.mlp.up_proj.weight"
    stored = made("llama").state_dict()[name].to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    key = f"{name}_scale_inv" if shape == (2, 1) else f"{name}_scale"
    path = copied("llama", tmp_path, changed(lambda t: t.update({name: stored, key: scale})))
    configured(quantization_config={"quant_method": "fp8", "weight_block_size": [10, 16]})(path)
    factors = scale.reshape(-1, 1).repeat_interleave(20 // max(1, scale.numel()), 0) if scale.numel() > 1 else scale
    assert torch.equal(load(path).state_dict()[name], stored.float() * factors)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_8_bit_weights_of_compressed_tensors(tmp_path: Path, kind: torch.dtype) -> None:
    """One factor per row beside floating-point or whole-number codes, whose zero may be given as 0."""
    name = "model.layers.1.mlp.down_proj.weight"
    stored = (made("llama").state_dict()[name] * 100).to(kind)
    scale = torch.rand((len(stored), 1), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    points, beside = torch.zeros(scale.shape, dtype=torch.int8), {f"{name}_scale": scale}
    path = copied(
        "llama", tmp_path, changed(lambda t: t.update({name: stored, **beside, f"{name}_zero_point": points}))
    )
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    configured(quantization_config=settings)(path)
    whole = stored.float() * scale.float()
    assert torch.equal(load(path).state_dict()[name], whole)
    if importlib.util.find_spec("bitsandbytes"):
        quantize = importlib.import_module("bitsandbytes").functional.quantize_4bit
        trained = lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1)  # noqa: E731
        codes = zs.from_pretrained(path, trained, quantized="nf4").state_dict()[name]
        assert torch.equal(codes, quantize(whole, quant_type="nf4", compress_statistics=True)[0])
    changed(lambda t: t.update({f"{name}_zero_point": points + 3}))(path)
    with pytest.raises(CheckpointError, match=rf"'{name}' in codes whose zeros are in '{name}_zero_point'"):
        load(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_files_become_masters_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "half"
    model = made("llama").to(dtype)
    model.save_pretrained(path)
    engine = load(path, plan=zs.Plan(precision="bf16"))
    engine.save(tmp_path / "step-00000001", wait=True)
    kept = zs.checkpoint.WeightFiles(tmp_path / "step-00000001", {})
    for name, value in model.state_dict().items():
        assert torch.equal(kept.whole(f"weight:{name}").view(value.shape), value.float()), name


def test_files_of_several_dtypes_and_configurations_without_one(tmp_path: Path) -> None:
    """Values are those of transformers; `dtype="auto"` takes the first dtype in the files."""
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    mixed = changed(lambda t: t.update({name: v.to(kinds[n % 4]) for n, (name, v) in enumerate(sorted(t.items()))}))
    path = copied("llama", tmp_path, mixed)
    wanted = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    state = load(path, plan=zs.Plan(zero=3)).state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    configured(dtype=None, torch_dtype=None)(path)
    changed(lambda t: t.update({name: value.bfloat16() for name, value in t.items()}))(path)
    (path / "pytorch_model.bin").write_bytes(b"a pickle beside safetensors files is not opened")
    assert {value.dtype for value in load(path, dtype="auto").state_dict().values()} == {torch.bfloat16}


def test_names_of_earlier_versions_and_values_under_two_names(tmp_path: Path) -> None:
    """Files of BERT with gamma and beta, positions as a buffer, and the tied output layer."""

    def old(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[new] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    state, wanted = load(copied("bert", tmp_path, changed(old))).state_dict(), made("bert").state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_files_of_a_base_model_and_of_one_with_a_head(tmp_path: Path) -> None:
    """The prefix of the base is added, or left out."""
    whole = {f"model.{name}": v for name, v in load(folder("llama"), model=transformers.AutoModel, strict=False)
             .state_dict().items()}  # fmt: skip
    given = made("llama").state_dict()
    assert whole.keys() == given.keys() - {HEAD} and all(torch.equal(whole[name], given[name]) for name in whole)
    plain = transformers.AutoModel.from_pretrained(folder("llama"))
    plain.save_pretrained(tmp_path / "base")
    engine = load(tmp_path / "base", model=transformers.AutoModelForCausalLM, missing="initialise")
    assert engine.loaded is not None and engine.loaded.initialised == (HEAD,)
    assert all(torch.equal(engine.state_dict()[name], whole[name]) for name in whole)


def test_tied_weights_are_compared_before_more_is_read(tmp_path: Path) -> None:
    """A few rows show that they differ; the rest of the file is not read for it."""
    shutil.copytree(folder("qwen2"), tmp_path / "model")
    changed(lambda tensors: swapped(tensors, HEAD, lambda _: tensors[EMBED] + 1))(tmp_path / "model")
    model = build(tmp_path / "model", None)
    read: list[int] = []
    fill = ShardFile.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ShardFile, "fill", lambda self, name, box, into: (read.append(box.numel), fill(self, name, box, into))
        )
        with pytest.raises(CheckpointError, match="holds other values under"):
            PretrainedValues(tmp_path / "model", model, True, "refuse")
    assert sum(read) == 2 * model.get_parameter(EMBED).shape[1]  # the first row of both
