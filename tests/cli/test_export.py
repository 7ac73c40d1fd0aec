"""`zeroshard export`: files that load under the model's own names, in transformers too, made a tensor at a time."""

import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved import Normed, damage, save_run
from pool import Pool
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import CheckpointDisk, Reader
from zeroshard.checkpoint.stream import BLOCK
from zeroshard.cli import export as export_command
from zeroshard.cli.main import main


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run folder of two ranks, and the state dict that it ended with."""
    run = tmp_path_factory.mktemp("saved") / "a"
    return run, pool.run(save_run, 2, str(run))[0]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(["export", *words])
    assert stopped.value.code == 2
    assert sorted(Path().rglob("*")) == before
    return capsys.readouterr().err


Saved = tuple[Path, dict[str, torch.Tensor]]


def test_all_names_of_the_state_dict(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    run, weights = saved
    main(["export", str(run), "--to", "safetensors"])
    (file,) = Path("step-00000002-safetensors").iterdir()
    assert file.name == "model.safetensors"
    found = load_file(file)
    assert found.keys() == weights.keys()
    assert all(
        torch.equal(found[name], values) and found[name].dtype == values.dtype for name, values in weights.items()
    )
    Normed().load_state_dict(found)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    out = capsys.readouterr().out
    assert f"Step 2 of {run}/checkpoints/step-00000002: {len(weights)} tensors, float32, int64" in out
    assert str(file) in out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_shards_and_dtypes(saved: Saved, dtype: str) -> None:
    run, weights = saved
    checkpoint = run / "checkpoints" / "step-00000001"
    main(["export", str(checkpoint), "--out", "new/w", "--dtype", dtype, "--max-shard-size", "300B"])
    index = json.loads(Path("new/w/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    assert {path.name for path in Path("new/w").iterdir()} == {*files, "model.safetensors.index.json"}
    held = {name: (file, values) for file in files for name, values in load_file(Path("new/w") / file).items()}
    assert {name: file for name, (file, _) in held.items()} == index["weight_map"]
    assert held.keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(values.nbytes for _, values in held.values())
    for file in files:
        inside = [values.nbytes for other, values in held.values() if other == file]
        assert sum(inside) <= 300 or len(inside) == 1
    main(["export", str(checkpoint), "--out", "whole"])
    for name, values in load_file("whole/model.safetensors").items():
        target = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype] if values.is_floating_point() else torch.int64
        assert torch.equal(held[name][1], values.to(target)) and held[name][1].dtype == target


class Leaves(nn.Module):
    """Of every shape that may be awkward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.full((3,), 70_000.0))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(2**40))


def test_awkward_shapes_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    model = Leaves()
    zs.Engine(model, torch.optim.SGD, zs.Plan(), mesh=zs.Mesh()).save("c", wait=True)
    main(["export", "c"])
    Leaves().load_state_dict(load_file("c-safetensors/model.safetensors"))
    assert load_file("c-safetensors/model.safetensors")["count"] == 2**40
    shutil.rmtree("c-safetensors")
    assert "'wide' has values that are not finite in fp16" in refusal(capsys, "c", "--dtype", "fp16")
    main(["export", "c", "--dtype", "bf16"])


def save_gpt2(mesh: zs.Mesh, path: str) -> Any:
    """Train a GPT-2 for a step and save it; its logits and its weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=29, n_positions=32, n_embd=12, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config)
    engine = zs.Engine(model, torch.optim.AdamW, zs.Plan(zero=3), mesh=mesh)
    tokens = torch.arange(20).view(2, 10)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save(path, wait=True)
    model.eval()
    with torch.no_grad():
        return engine(input_ids=tokens).logits, engine.state_dict()


@pytest.mark.parametrize("most", ["5GB", "8KB"])
def test_transformers_loads_its_model(pool: Pool, most: str, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    logits, weights = pool.run(save_gpt2, 2, str(Path.cwd() / "c"))[0]
    main(["export", "c", "--out", "w", "--max-shard-size", most])
    assert "transformers.GPT2LMHeadModel.from_pretrained('w')" in capsys.readouterr().out
    assert len(list(Path("w").glob("*.safetensors"))) == 1 or most == "8KB"
    model, facts = transformers.AutoModelForCausalLM.from_pretrained("w", output_loading_info=True)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert not facts["missing_keys"] and not facts["unexpected_keys"] and not facts["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=torch.arange(20).view(2, 10)).logits, logits)
    assert all(torch.equal(values, weights[name]) for name, values in model.state_dict().items())
    model.save_pretrained("theirs")
    assert load_file("theirs/model.safetensors").keys() == {
        name for file in Path("w").glob("*.safetensors") for name in load_file(file)
    }
    main(["export", "c", "--out", "half", "--dtype", "bf16"])
    assert transformers.AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16


def test_weights_that_the_user_shares_are_written_under_each_name() -> None:
    """`from_pretrained` ties those of the class alone, and would draw the others anew."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, tie_word_embeddings=True, **sizes))
    model.model.layers[1].mlp = model.model.layers[0].mlp
    engine = zs.Engine(model, torch.optim.AdamW, zs.Plan(zero=3), mesh=zs.Mesh())
    tokens = torch.arange(8).view(2, 4)
    engine.train_step({"input_ids": tokens, "labels": tokens})
    engine.save("c", wait=True)
    engine.export("live")
    main(["export", "c", "--out", "stored"])
    wanted = engine.state_dict()
    for folder in ("live", "stored"):
        again, facts = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not facts["missing_keys"] and not facts["unexpected_keys"], folder
        assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items()), folder
        assert "lm_head.weight" not in load_file(f"{folder}/model.safetensors")
    assert {name for name, _ in engine.weights(names="transformers")} == set(load_file("live/model.safetensors"))


def live(mapped: set[int]) -> int:
    """Bytes of all tensors that anybody holds, but for those mapped from a file; of sharers, the largest counts."""
    sizes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
            place = tensor.untyped_storage().data_ptr()
            sizes[place] = max(sizes.get(place, 0), tensor.nbytes)
    return sum(nbytes for place, nbytes in sizes.items() if place not in mapped)


@pytest.mark.parametrize("words", [[], ["--dtype", "bf16", "--max-shard-size", "9MB"]])
def test_one_tensor_is_in_memory(
    words: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    size, count = 2 * BLOCK, 3
    model = nn.ParameterList([nn.Parameter(torch.full((size // 4,), float(n))) for n in range(count)])
    zs.Engine(model, torch.optim.SGD, zs.Plan(), mesh=zs.Mesh()).save("c", wait=True)
    del model
    gc.collect()
    gc.freeze()  # what is there already is not counted
    request.addfinalizer(gc.unfreeze)
    mapped: set[int] = set()
    before, seen, block = live(mapped), [], Reader._block

    class Watched(CheckpointDisk):
        def reached(self, operation: str, path: Path) -> None:
            seen.append(live(mapped) - before)

    def watched(*args: Any) -> Any:
        values = block(*args)
        mapped.add(values.untyped_storage().data_ptr())
        seen.append(live(mapped) - before)
        return values

    monkeypatch.setattr(export_command, "CheckpointDisk", Watched)
    monkeypatch.setattr(Reader, "_block", watched)
    main(["export", "c", *words])
    assert len(seen) > 2 * 2 * count  # between blocks read, and between blocks written
    assert size // 2 <= max(seen) <= size + BLOCK
    files = sorted(Path("c-safetensors").glob("*.safetensors"))
    found = {name: values for file in files for name, values in load_file(file).items()}
    assert all((values == int(name)).all() for name, values in found.items())
    everything = sum(values.nbytes for values in found.values())
    assert live(mapped) - before == everything >= count * size // 2  # the meter would see more


def test_nothing_is_overwritten(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    Path("w").mkdir()
    assert "--out is w, which exists, and nothing is overwritten" in refusal(capsys, str(saved[0]), "--out", "w")


def test_damage_leaves_nothing_behind(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(saved[0] / "checkpoints" / "step-00000002", "c")
    damage(Path("c"))
    assert "is damaged in 'weight:" in refusal(capsys, "c")


@pytest.mark.parametrize(
    "words, part",
    [
        (["nowhere"], "nowhere is no checkpoint: there is no such folder"),
        (["."], "has no MANIFEST.json"),
        ([], "PATH must be given"),
        (["RUN", "--dtype", "fp8"], "dtype"),
        (["RUN", "--to", "pickle"], "--to"),
        (["RUN", "--max-shard-size", "5 elephants"], "--max-shard-size is '5 elephants'; write a size such as"),
        (["RUN", "--max-shard-size", "0"], "--max-shard-size is '0'"),
        (["RUN", "--out", "file/w"], "file/w cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], part: str, saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert part in refusal(capsys, *[str(saved[0]) if word == "RUN" else word for word in words])


def test_quantised_weights_need_their_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    base = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(64, 1)).to("cpu")
    engine = zs.Engine(model, lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1))
    engine.save(tmp_path / "step-00000001", wait=True)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "bitsandbytes", None)
        said = refusal(capsys, str(tmp_path / "step-00000001"))
    assert "needs the package bitsandbytes" in said and 'pip install "zeroshard[quantized]"' in said
