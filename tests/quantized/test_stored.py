"""Exports of checkpoints with quantised weights: bit for bit what bitsandbytes makes of the codes, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.huggingface.test_quantized import PLANS, adapters, batch, folder, optimizer, settings
from pool import Pool
from safetensors.torch import load_file
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import Reader
from zeroshard.cli.export import planned
from zeroshard.cli.main import main
from zeroshard.errors import CheckpointError, DamagedError

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def behind(module: Any) -> torch.Tensor:
    """The weight of a layer, by the functions of bitsandbytes over the layer's own objects."""
    weight = module.weight.detach()
    if isinstance(module, bnb.nn.Linear4bit):
        values: torch.Tensor = bnb.functional.dequantize_4bit(weight, module.weight.quant_state)
    else:
        values = bnb.functional.int8_vectorwise_dequant(weight, module.state.SCB)
    return values


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_exports_are_bit_equal_to_the_layers_and_load(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(kind)
    config.bnb_4bit_compute_dtype = torch.bfloat16
    engine = zs.from_pretrained(folder("llama"), optimizer, quantized=config, dtype=torch.bfloat16)
    engine.train_step(batch(0))
    saved, out = tmp_path / "step-00000001", tmp_path / "out"
    engine.save(saved, wait=True, base=True)
    main(["export", str(saved), "--to", "safetensors", "--out", str(out), "--dtype", "bf16"])
    assert "LlamaForCausalLM.from_pretrained" in capsys.readouterr().out
    found = load_file(out / "model.safetensors")
    assert {values.dtype for values in found.values()} == {torch.bfloat16}
    layers = {n: m for n, m in engine.model.named_modules() if isinstance(m, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))}
    assert len(layers) == 14
    for name, module in layers.items():
        assert torch.equal(found[f"{name}.weight"], behind(module).to(torch.bfloat16)), name
    model, report = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.dtype == torch.bfloat16
    engine.export(tmp_path / "by engine", dtype=torch.bfloat16)
    same = load_file(tmp_path / "by engine" / "model.safetensors")
    assert same.keys() == found.keys() and all(torch.equal(same[name], found[name]) for name in same)


def save(mesh: zs.Mesh, files: str, plan: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    """A checkpoint of two ranks, and the whole weights of its engine."""
    engine = zs.from_pretrained(
        files, optimizer, zs.Plan.from_dict(plan), mesh=mesh, quantized="nf4", adapters=adapters(),
        example=batch(0),
    )  # fmt: skip
    engine.save(Path(path), wait=True, base=True)
    return {name: values.clone() for name, values in engine.weights()}


@pytest.mark.parametrize("family, plan", [("llama", "two stages"), ("mixtral", "expert ranks")])
def test_checkpoints_of_ranks_with_adapters(
    pool: Pool, family: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages have other layers each, stacks of experts are divided, and adapters keep their names."""
    saved = tmp_path / "step-00000000"
    expected, _ = pool.run(save, 2, str(folder(family)), PLANS[plan], str(saved))
    main(["export", str(saved), "--out", str(tmp_path / "out"), "--dtype", "fp32"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert any(".lora_A." in name for name in found) and not any("absmax" in name for name in found)
    for name in [name for name in expected if name.endswith("experts.gate_up_proj")]:  # single experts in files
        for part, whole in (("w1", "gate_up_proj"), ("w2", "down_proj"), ("w3", "gate_up_proj")):
            single = name.replace("mlp.experts.gate_up_proj", "block_sparse_moe.experts.{}." + part + ".weight")
            joined = torch.stack([found.pop(single.format(expert)) for expert in range(4)])
            stack = expected[name.replace("gate_up_proj", whole)].float()
            assert torch.equal(joined, stack.chunk(2, 1)[part == "w3"] if part != "w2" else stack)
    renamed = {name.replace("block_sparse_moe", "mlp"): values for name, values in found.items()}
    others = {name: values for name, values in expected.items() if ".experts." not in name}
    assert renamed.keys() == others.keys()
    assert all(torch.equal(renamed[name], values.float()) for name, values in others.items())
    if family == "llama":
        config = transformers.AutoConfig.from_pretrained(folder(family))
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters())
        model.load_state_dict(found)
        assert "model.load_state_dict(" in capsys.readouterr().out
        engine = zs.Engine(peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters()), optimizer)
        engine.load_weights(tmp_path / "out")
        assert all(torch.equal(values, found[name]) for name, values in engine.weights())


class Turned(nn.Module):
    """A layer of bitsandbytes that is made from a transposed weight, as transformers does with `Conv1D`."""

    def __init__(self) -> None:
        super().__init__()
        base = bnb.nn.Linear4bit(64, 48, bias=False, compute_dtype=torch.float32, quant_type="fp4")
        base.source_cls = transformers.pytorch_utils.Conv1D
        self.base, self.out = base.requires_grad_(False).to("cpu"), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.base(x))
        return out


@pytest.fixture
def small(tmp_path: Path) -> tuple[zs.Engine, Path]:
    """An engine with one layer of 4-bit codes, and its checkpoint."""
    engine = zs.Engine(Turned(), optimizer)
    engine.save(tmp_path / "saved", wait=True)
    return engine, tmp_path / "saved"


def test_transposed_weights_are_written_as_they_were(small: tuple[zs.Engine, Path], tmp_path: Path) -> None:
    engine, saved = small
    main(["export", str(saved), "--out", str(tmp_path / "out")])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"base.weight", "out.weight", "out.bias"}
    assert torch.equal(found["base.weight"], behind(engine.model.base).T)
    again = zs.Engine(Turned(), optimizer)
    again.load(saved)
    assert torch.equal(behind(again.model.base), behind(engine.model.base))


@pytest.mark.parametrize(
    "change, error, match",
    [
        (None, CheckpointError, r"'base\.weight' and 0 more quantised weights.*engine\.export\(out\)"),
        ({"shape": [4800, 64]}, DamagedError, r"'weight:base\.weight' is torch\.uint8 .*needs 153,600 elements"),
        ({"blocksize": 4096}, DamagedError, r"'weight:base\.weight_absmax' is .*; use another checkpoint"),
        ({"blocksize": 7}, DamagedError, "quantised is .*must be by weight null, or a type"),
        ({"double": 1}, DamagedError, "quantised is .*must be"),
        ({"type": "int8", "shape": None, "double": False}, DamagedError, r"no 'base\.weight_SCB'"),
        ({"layout": "stack"}, CheckpointError, "more quantised weights"),
    ],
)
def test_facts_are_not_trusted(
    change: dict[str, Any] | None, error: type[Exception], match: str, small: tuple[zs.Engine, Path]
) -> None:
    """Without facts, as earlier versions wrote them, codes are refused as before; wrong ones never reach a kernel."""
    reader = Reader(small[1])
    row = reader.facts["quantised"]["base.weight"]
    assert row == json.loads(json.dumps(row)) and row["shape"] == [48, 64]
    reader.facts["quantised"] = {} if change is None else {"base.weight": {**row, **change}}
    with pytest.raises(error, match=match):
        planned(reader, None, 2**30)


def test_weights_of_torchao_are_refused(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model[0].requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), lambda module, name: name == "0")
    zs.Engine(model, optimizer).save(tmp_path / "saved", wait=True)
    with pytest.raises(CheckpointError, match=r"'0\.weight' and 0 more quantised weights"):
        planned(Reader(tmp_path / "saved"), None, 2**30)
