"""Experts in MXFP4: values are those that transformers dequantises, under every layout, and each byte is read once."""

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file

import zeroshard as zs
from zeroshard.checkpoint.boxes import Box
from zeroshard.checkpoint.weights import Shards, files_of
from zeroshard.errors import CheckpointError
from zeroshard.interop.huggingface.mxfp4 import MicroscaledTensor

transformers = pytest.importorskip("transformers")
from interop.huggingface.families import batch, made  # noqa: E402

SGD = partial(torch.optim.SGD, lr=1e-2)
NAMES = tuple(f"model.layers.{n}.mlp.experts.{end}" for n in range(2) for end in ("gate_up_proj", "down_proj"))
PLANS: dict[str, dict[str, Any]] = {
    "stage 3 over the network": {"zero": 3, "transport": "network"},
    "two expert ranks": {"expert_parallel": 2, "zero": 1},
    "two tensor ranks": {"tensor_parallel": 2, "zero": 1},
    "two stages, bf16": {"pipeline_parallel": 2, "zero": 0, "microbatches": 2, "precision": "bf16"},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns that it dequantises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small GPT-OSS whose experts are random codes, as the files on the hub hold them."""
    path = tmp_path_factory.mktemp("packed")
    made("gpt-oss", hidden_size=64, intermediate_size=96).save_pretrained(path)
    tensors, draws = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in NAMES:
        experts, features, rows = tensors.pop(name).shape
        shape = (experts, rows, features // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=draws, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 127, shape, generator=draws, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def loaded(mesh: zs.Mesh | None, path: str, plan: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """The weights, and the bytes that this rank read."""
    example = batch("gpt-oss", 0, 2) if "pipeline_parallel" in plan else None
    engine = zs.from_pretrained(path, SGD, zs.Plan.from_dict(plan), mesh=mesh, example=example)
    assert engine.loaded is not None and not (engine.loaded.initialised or engine.loaded.unused)
    return engine.state_dict(), engine.loaded.bytes_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(packed: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    wanted = transformers.GptOssForCausalLM.from_pretrained(packed, dtype=dtype).state_dict()
    engine = zs.from_pretrained(packed, SGD, dtype=dtype)
    state, stored = engine.state_dict(), load_file(packed / "model.safetensors")
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
    for name in NAMES:
        whole = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=dtype)
        assert torch.equal(state[name], whole), name
    engine.export(tmp_path / "out")
    model = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("layout", PLANS)
def test_values_under_every_layout(pool: Pool, packed: Path, layout: str) -> None:
    whole, _ = loaded(None, str(packed), {})
    runs = pool.run(loaded, 2, str(packed), PLANS[layout])
    for state, _ in runs:
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], whole[name].to(state[name].dtype)) for name in whole)
    if layout == "stage 3 over the network":
        size = (packed / "model.safetensors").stat().st_size
        assert sum(nbytes for _, nbytes in runs) < 1.1 * size + 2**14  # two headers, and rows that slices share


def test_boxes_of_any_place(packed: Path) -> None:
    """Those that begin and end inside of blocks, too, in bands of rows."""
    tensor = MicroscaledTensor(Shards(packed, files_of(packed)), NAMES[0])
    whole, draws = torch.empty(tensor.shape), torch.Generator().manual_seed(1)
    tensor.fill(Box.whole(tuple(tensor.shape)), whole)
    for _ in range(20):
        ends = [sorted(torch.randint(0, n + 1, (2,), generator=draws).tolist()) for n in tensor.shape]
        box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
        values = torch.full(box.shape, torch.nan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zeroshard.interop.huggingface.mxfp4.BAND", 200)
            tensor.fill(box, values)
        assert torch.equal(values, whole[tuple(slice(low, high) for low, high in ends)])


def test_blocks_and_scales_that_do_not_fit(packed: Path, tmp_path: Path) -> None:
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{NAMES[0]}_scales"] = tensors[f"{NAMES[0]}_scales"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks' as \[4, 192, 2, 16\].*16 bytes for each scale"):
        zs.from_pretrained(tmp_path, SGD)


def test_linear_layers_in_4_bits_beside_experts_of_files_in_4_bits(packed: Path) -> None:
    """`quantized=` takes the weights that files' codes stand for; GPT-OSS's experts stay as they were read."""
    pytest.importorskip("bitsandbytes")
    optimizer = lambda ps: SGD([p for p in ps if p.requires_grad])  # noqa: E731
    state = zs.from_pretrained(packed, optimizer, quantized="nf4", missing="refuse").state_dict()
    plain, _ = loaded(None, str(packed), {})
    assert state["model.layers.0.self_attn.q_proj.weight"].dtype == torch.uint8
    assert all(torch.equal(state[name], plain[name]) for name in NAMES)
