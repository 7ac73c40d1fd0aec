"""Folders of `torch.distributed.checkpoint`: each rank takes its slices of the model, and no code in them runs."""

import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine.models import build
from pool import Pool
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zeroshard as zs
from zeroshard.checkpoint.pickled_records import PickledRecord, read_records
from zeroshard.errors import CheckpointError

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Normed(nn.Module):
    """Parameters of one to three dimensions, a scalar, and buffers; FSDP slices no scalars."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.mix = nn.Conv1d(6, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5) if scalar else torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.mix(self.embed(tokens).transpose(1, 2))) * self.scale).square().mean()


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = ADAMW(model.parameters())
    for _ in range(2):
        model(torch.arange(12).view(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def write_alone(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Train a model, save it beside its optimizer; its state dict."""
    weights, states = get_state_dict(model, trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optim": states, "step": 2}, checkpoint_id=folder, no_dist=True)
    return {name: values.clone() for name, values in model.state_dict().items()}


def load(mesh: zs.Mesh, zero: int, folder: str, scalar: bool = True) -> Any:
    torch.manual_seed(1 + mesh.rank)
    engine = zs.Engine(Normed(scalar), ADAMW, zs.Plan(zero=zero), mesh=mesh)
    engine.load_weights(folder)
    return engine.state_dict()


@pytest.mark.parametrize("zero", [1, 3])
def test_slices_of_a_folder(pool: Pool, zero: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = write_alone(Normed(), tmp_path / "c")
    for state in pool.run(load, 2, zero, str(tmp_path / "c")):
        assert state.keys() == expected.keys()
        assert all(torch.equal(values, expected[name]) for name, values in state.items())


def write_sharded(mesh: zs.Mesh, folder: str) -> dict[str, torch.Tensor]:
    """Train under FSDP2 on four ranks and save."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Normed(scalar=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (mesh.ranks,)))
    weights, states = get_state_dict(model, trained(model))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in weights.items()}


def test_what_fsdp_saved_on_four_ranks_is_loaded(pool: Pool, tmp_path: Path) -> None:
    expected, *_ = pool.run(write_sharded, 4, str(tmp_path / "c"))
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 4
    states = [load(zs.Mesh(), 0, str(tmp_path / "c"), False), *pool.run(load, 2, 3, str(tmp_path / "c"), False)]
    for state in states:
        assert all(torch.equal(values, expected[name]) for name, values in state.items())


def go_on(mesh: zs.Mesh, zero: int, folder: str, **plan: Any) -> Any:
    """Take weights and moments, and train on; the weights after each of two steps."""
    torch.manual_seed(1 + mesh.rank)
    engine = zs.Engine(Normed(), ADAMW, zs.Plan(zero=zero, **plan), mesh=mesh)
    engine.load_weights(folder, states=True)
    found = []
    for _ in range(2):
        engine.train_step(torch.arange(12).view(2, 6))
        found.append(engine.state_dict())
    return found


@pytest.mark.parametrize("plan", [{}, {"offload": "optimizer"}])
def test_moments_of_adam_go_on(pool: Pool, plan: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normed()
    write_alone(model, tmp_path / "c")
    optimizer = trained_on(model, tmp_path / "c")
    expected = []
    for _ in range(2):
        model(torch.arange(12).view(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append({name: values.clone() for name, values in model.state_dict().items()})
    for states in pool.run(go_on_with, 2, 3, str(tmp_path / "c"), plan):
        for state, wanted in zip(states, expected, strict=True):
            assert all(torch.allclose(state[name], values, rtol=1e-5, atol=1e-6) for name, values in wanted.items())


def trained_on(model: nn.Module, folder: Path) -> torch.optim.Optimizer:
    """A plain optimizer with the states of a folder."""
    optimizer = ADAMW(model.parameters())
    weights, states = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": weights, "optim": states}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return optimizer


def go_on_with(mesh: zs.Mesh, zero: int, folder: str, plan: dict[str, Any]) -> Any:
    return go_on(mesh, zero, folder, **plan)


def test_states_that_are_not_there(tmp_path: Path) -> None:
    model = Normed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointError, match="holds no optimizer states of this model's parameters"):
        go_on(zs.Mesh(), 0, str(tmp_path / "c"))
    engine = zs.Engine(model, ADAMW, mesh=zs.Mesh())
    engine.export(tmp_path / "w")
    with pytest.raises(CheckpointError, match=r"reads optimizer states of folders of torch\.distributed\.checkpoint"):
        engine.load_weights(tmp_path / "w", states=True)


class Danger:
    """Its unpickling would leave a mark."""

    def __reduce__(self) -> Any:
        return (exec, (f"raise SystemExit('unpickled {Path()}')",))


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def wrong_file(folder: Path) -> None:
    found = metadata(folder)
    next(iter(found.storage_data.values())).relative_path = "x"
    for info in found.storage_data.values():
        info.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def no_model(folder: Path) -> None:
    found = metadata(folder)
    found.state_dict_metadata = {k: v for k, v in found.state_dict_metadata.items() if k.startswith("optim")}
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def lost_chunk(folder: Path) -> None:
    found = metadata(folder)
    found.state_dict_metadata["model.embed.weight"].chunks = []
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def extension(folder: Path) -> None:
    found = metadata(folder)
    for info in found.storage_data.values():
        info.transform_descriptors = ["zstd"]
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def cut_short(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:20_000])


WRONG: dict[str, tuple[Any, str]] = {
    "pickled code": (lambda c: (c / ".metadata").write_bytes(pickle.dumps(Danger())), "is of another form"),
    "half metadata": (lambda c: (c / ".metadata").write_bytes((c / ".metadata").read_bytes()[:500]), "no whole pickle"),
    "empty metadata": (lambda c: (c / ".metadata").write_bytes(b""), "no whole pickle"),
    "another folder": (wrong_file, "is said to be in '../elsewhere', outside of the folder"),
    "no model": (no_model, "holds no tensors of a model, but 'optim"),
    "a chunk is lost": (lost_chunk, "holds 0 of the"),
    "an extension": (extension, r"was written through \['zstd'\]"),
    "a file is lost": (lambda c: (c / "__0_0.distcp").unlink(), "cannot be read .No such file or directory"),
    "a file is cut short": (cut_short, "as torch.save writes it"),
    "of Megatron": (
        lambda c: (c / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'),
        r"is a checkpoint of Megatron-LM \(metadata.json names its sharded_backend\).* with Megatron's own converter",
    ),
    "several of Megatron": (
        lambda c: (c / "latest_checkpointed_iteration.txt").write_text("100"),
        "is a folder of checkpoints of Megatron-LM .*converter, and give that folder",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_folders_are_refused(case: str, tmp_path: Path) -> None:
    write_alone(Normed(), tmp_path / "c")
    damage, message = WRONG[case]
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        load(zs.Mesh(), 0, str(tmp_path / "c"))


def test_another_model_is_named(tmp_path: Path) -> None:
    write_alone(Normed(), tmp_path / "c")
    engine = zs.Engine(build("Plain"), ADAMW, mesh=zs.Mesh())
    with pytest.raises(CheckpointError, match=r"is of another model: it lacks 'blocks\.0\.down\.bias'"):
        engine.load_weights(tmp_path / "c")


def test_pickles_are_records() -> None:
    value = {"a": [1, (2, 3.5, None)], "b": {True, "x"}, 7: torch.Size([2, 3]), "c": b"raw", "d": "long" * 100}
    for protocol in (2, 3, 4, 5):
        found = read_records(pickle.dumps(value, protocol))
        size = found.pop(7)
        assert isinstance(size, PickledRecord) and (size.name, size.args) == ("torch.Size", ((2, 3),))
        assert {key: each for key, each in found.items() if key not in "bc"} == {"a": value["a"], "d": value["d"]}
    danger = read_records(pickle.dumps(Danger()))
    assert danger.name == "builtins.exec" and danger.args[0].startswith("raise SystemExit")
