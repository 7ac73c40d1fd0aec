"""Master weights that are made by their first use ([Note: late masters])."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from pool import Pool
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from zeroshard.optim.slices.updater import LateMasters

OVER = {"transport": "network"}
PLANS: list[dict[str, Any]] = [{"zero": 0}, {"zero": 1}, {"zero": 2, **OVER}, {"zero": 3, **OVER}]
OPTIMIZER = partial(torch.optim.AdamW, lr=0.01)


def model() -> nn.Module:
    """Three layers, without values from a file."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def written(folder: Path) -> tuple[str, str]:
    """The same values in a bf16 and in an fp32 file."""
    torch.manual_seed(2)
    values = {name: torch.randn(p.shape).bfloat16() for name, p in model().named_parameters()}
    save_file(values, folder / "bf16.safetensors")
    save_file({name: value.float() for name, value in values.items()}, folder / "fp32.safetensors")
    return str(folder / "bf16.safetensors"), str(folder / "fp32.safetensors")


def late(engine: zs.Engine) -> list[bool]:
    """Whether the masters of each part are still to be made."""
    updaters = [part.updater for part in parts_of(engine).all]
    return [updater._unmade for updater in updaters if isinstance(updater, LateMasters)]


def loaded(mesh: zs.Mesh, file: str, plan: dict[str, Any]) -> zs.Engine:
    """An engine in bf16 with the values of a file."""
    plan = plan | ({} if mesh.ranks > 1 else {"transport": "auto"})
    engine = zs.Engine(
        model(), OPTIMIZER, zs.Plan(precision="bf16", **plan), mesh=mesh, loss=lambda y, x: y.square().mean()
    )
    engine.load_weights(file)
    return engine


def run(mesh: zs.Mesh, files: tuple[str, str], plan: dict[str, Any]) -> Any:
    """From each file: whether masters are late, then losses and weights of some steps; and evaluated ones."""
    results = []
    for file in files:
        engine = loaded(mesh, file, plan)
        before = late(engine)
        with torch.no_grad():
            engine(torch.ones(2, 8))
        evaluated = late(engine)
        torch.manual_seed(3 + mesh.rank)
        losses = [engine.train_step(torch.randn(4, 8)).loss.item() for _ in range(3)]
        weights = {name: value.clone() for name, value in engine.weights(dtype=torch.float32)}
        results.append((before, evaluated, late(engine), losses, weights))
    return results


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_late_masters_train_as_others(pool: Pool, tmp_path: Path, plan: dict[str, Any], ranks: int) -> None:
    """Those of a bf16 file are made by the first step, and equal those of an fp32 file with the same values."""
    for (*lateness, losses, weights), (*others, wanted, expected) in pool.run(run, ranks, written(tmp_path), plan):
        assert [any(each) for each in lateness] == [True, True, False]
        assert not any(map(any, others))
        assert losses == wanted
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.fixture
def engine(tmp_path: Path) -> zs.Engine:
    """An engine with late masters."""
    made = loaded(zs.init_mesh(), written(tmp_path)[0], {"zero": 2})
    assert all(late(made))
    return made


def test_masters_are_written_to_a_checkpoint(engine: zs.Engine, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.save(tmp_path / "step-00000001", wait=True)
    engine.train_step(torch.ones(4, 8))
    engine.load(tmp_path / "step-00000001")
    found = dict(engine.weights(dtype=torch.float32))
    assert all(torch.equal(found[name], value.float()) for name, value in values.items())


def test_writes_before_the_first_step_stay(engine: zs.Engine) -> None:
    with engine.gathered(), torch.no_grad():
        engine.model.get_parameter("0.bias").fill_(0.5)
    assert all(bool((value == 0.5).all()) == (name == "0.bias") for name, value in engine.weights(dtype=torch.float32))
    engine.train_step(torch.ones(4, 8))
    assert (dict(engine.weights(dtype=torch.float32))["0.bias"] - 0.5).abs().max() <= 0.0101  # the first step of AdamW


def test_a_second_file_replaces_the_first(engine: zs.Engine, tmp_path: Path) -> None:
    halved = {name: value.float() / 3 for name, value in engine.state_dict().items()}
    save_file(halved, tmp_path / "thirds.safetensors")
    engine.load_weights(tmp_path / "thirds.safetensors")
    assert not any(late(engine))
    found = dict(engine.weights(dtype=torch.float32))
    assert all(torch.equal(found[name], value) for name, value in halved.items())
