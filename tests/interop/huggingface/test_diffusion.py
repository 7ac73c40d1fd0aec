"""Models of diffusers from their folders and back, trained as in a plain loop."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_loop
from pool import Pool

import zeroshard as zs
from zeroshard.cli.main import main
from zeroshard.errors import CheckpointError, ModelError

diffusers = pytest.importorskip("diffusers")
SGD = partial(torch.optim.SGD, lr=0.1)
SIZES = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "convolutions": lambda: diffusers.UNet2DModel(
        **SIZES,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "positions": lambda: diffusers.DiTTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8
    ),
}


def made(kind: str) -> Any:
    torch.manual_seed(4)
    return MODELS[kind]()


def batch(kind: str, step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    more = {"class_labels": torch.tensor([1, 2])} if kind == "positions" else {}
    name = "hidden_states" if kind == "positions" else "sample"
    return {name: torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 40]), **more}


def loss_of(output: Any) -> torch.Tensor:
    return output.sample.square().mean()


def losses_of(model: Any, kind: str) -> list[float]:
    """The losses of a plain loop, without dropped labels."""
    steps = [[batch(kind, step)] for step in range(3)]
    return plain_loop(model.eval(), SGD, steps, lambda model, part: loss_of(model(**part))).losses


def trained(mesh: zs.Mesh | None, folder: Path, kind: str, shard_size: str = "5GB", **plan: Any) -> list[float]:
    """The losses of an engine of a folder, which writes another one."""
    engine = zs.from_pretrained(folder / "model", SGD, zs.Plan(**plan), mesh=mesh)
    engine.model.eval()
    losses = []
    for step in range(3):
        loss = loss_of(engine(**batch(kind, step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.export(folder / "out", shard_size=shard_size)
    return losses


def on_ranks(mesh: zs.Mesh, folder: Path, kind: str) -> list[float]:
    return trained(mesh, folder, kind, zero=3)


@pytest.mark.parametrize("kind", MODELS)
def test_in_trained_and_out(tmp_path: Path, kind: str) -> None:
    plain = made(kind)
    plain.save_pretrained(tmp_path / "model")
    wanted = losses_of(plain, kind)
    assert trained(None, tmp_path, kind, zero=2) == pytest.approx(wanted, rel=1e-5)
    again = type(plain).from_pretrained(tmp_path / "out")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    theirs, ours = (json.loads((tmp_path / where / "config.json").read_text()) for where in ("model", "out"))
    assert {key: ours[key] for key in theirs} == theirs


def test_buffers_that_no_file_holds_are_those_of_the_class_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    plain = made("positions")
    plain.save_pretrained(tmp_path / "model")
    wanted = losses_of(plain, "positions")
    for losses in pool.run(on_ranks, 2, tmp_path, "positions"):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_several_files_with_their_index(tmp_path: Path) -> None:
    plain = made("convolutions")
    plain.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    wanted = losses_of(plain, "convolutions")
    assert trained(None, tmp_path, "convolutions", shard_size="100KB") == pytest.approx(wanted, rel=1e-5)
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    again = type(plain).from_pretrained(tmp_path / "out")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("words", [[], ["--dtype", "bf16", "--max-shard-size", "30KB"]])
def test_a_checkpoint_is_exported_as_the_class_reads_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = made("convolutions")
    plain.save_pretrained(tmp_path / "model")
    engine = zs.from_pretrained(tmp_path / "model", SGD, zs.Plan(zero=2))
    engine.backward(loss_of(engine(**batch("convolutions", 0))))
    engine.step()
    engine.save(tmp_path / "saved", wait=True)
    main(["export", str(tmp_path / "saved"), "--out", str(tmp_path / "out"), *words])
    assert f"Load it with diffusers.UNet2DModel.from_pretrained('{tmp_path / 'out'}')" in capsys.readouterr().out
    wanted = engine.state_dict()
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16 if words else None)
    theirs, ours = (json.loads((tmp_path / where / "config.json").read_text()) for where in ("model", "out"))
    assert {key: ours[key] for key in theirs} == theirs
    assert all(torch.equal(value, wanted[name].to(value.dtype)) for name, value in again.state_dict().items())
    assert {value.dtype for value in again.state_dict().values()} == {torch.bfloat16 if words else torch.float32}
    assert len(list((tmp_path / "out").glob("diffusion_pytorch_model*.safetensors"))) == 1 or words


def test_adapters_are_merged_into_what_the_class_reads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    own = {"joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 16}
    model = diffusers.SD3Transformer2DModel(**SIZES, num_layers=1, num_attention_heads=2, pos_embed_max_size=8, **own)
    given = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 3, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([3, 40]),
    }
    before = model.eval()(**given).sample.detach()
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    engine = zs.Engine(model, SGD, zs.Plan(zero=2))
    engine.backward(loss_of(engine(**given)))
    engine.step()
    with torch.no_grad():
        wanted = engine(**given).sample
    assert not torch.allclose(wanted, before, rtol=1e-3)
    engine.export(tmp_path / "out", merge=True)
    again = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**given).sample, wanted, rtol=1e-4, atol=1e-5)


def test_the_class_may_be_given_and_the_dtype(tmp_path: Path) -> None:
    plain = made("convolutions")
    plain.save_pretrained(tmp_path / "model")
    engine = zs.from_pretrained(tmp_path / "model", SGD, model=type(plain), dtype=torch.bfloat16)
    found = engine.state_dict()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in plain.state_dict().items())


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    made("convolutions").save_pretrained(tmp_path / "model")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a pipeline of diffusers; give the folder of one model in it"):
        zs.from_pretrained(tmp_path / "pipeline", SGD)
    config = tmp_path / "model" / "config.json"
    table = json.loads(config.read_text())
    config.write_text(json.dumps(table | {"_class_name": "Newest2DModel"}))
    with pytest.raises(ModelError, match="names 'Newest2DModel', which diffusers does not have"):
        zs.from_pretrained(tmp_path / "model", SGD)
    config.write_text(json.dumps(table | {"block_out_channels": [16, 16]}))
    with pytest.raises(CheckpointError, match=r"is of another model than UNet2DModel: '.*' is \("):
        zs.from_pretrained(tmp_path / "model", SGD)
