"""Checkpoints that leave out a frozen base: what is in them, where they can be resumed, and which base they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import save_file
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.checkpoint.reader import Reader
from zeroshard.errors import CheckpointError


class Adapted(nn.Module):
    """Two frozen layers, each with a trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]).requires_grad_(False)
        self.beside = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for base, beside in zip(self.base, self.beside, strict=True):
            x = torch.tanh(base(x) + beside(x))
        return x.square().mean()


def engine_of(
    mesh: zs.Mesh | None = None, folder: Path | None = None, model: nn.Module | None = None, **plan: Any
) -> zs.Engine:
    """An engine whose weights were read from a folder."""
    made = zs.Engine(model or Adapted(), lambda ps: torch.optim.AdamW(ps, lr=0.1), zs.Plan(**plan), mesh=mesh)
    if folder is not None:
        made.load_weights(folder)
    return made


def written(folder: Path, **changes: float) -> Path:
    """The file of the initial weights."""
    folder.mkdir(exist_ok=True)
    state = Adapted().state_dict()
    for name, change in changes.items():
        state[name.replace("_", ".")] += change
    save_file(state, folder / "model.safetensors")
    return folder


def steps(engine: zs.Engine, count: int) -> list[float]:
    """Gradient norms of some steps on one batch for all ranks."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(count):
        engine.backward(engine(x))
        found.append(engine.step().grad_norm)
    return found


def save_on_ranks(mesh: zs.Mesh, folder: Path, zero: int) -> list[float]:
    engine = engine_of(mesh, folder, zero=zero, transport="network" if zero == 3 else "auto")
    steps(engine, 2)
    engine.save(folder / "saved", wait=True)
    return steps(engine, 2)


@pytest.mark.parametrize("zero, later", [(0, 3), (2, 1), (3, 0)])
def test_a_checkpoint_holds_what_is_trained_and_resumes_under_any_plan(
    pool: Pool, tmp_path: Path, zero: int, later: int
) -> None:
    folder = written(tmp_path / "base")
    wanted, _ = pool.run(save_on_ranks, 2, folder, zero)
    reader = Reader(folder / "saved")
    assert {name.partition(".")[0] for name in reader.names("weight")} == {"beside"}
    assert len(reader.facts["base"]["tensors"]) == 4 and reader.facts["base"]["source"] == str(folder)
    for again in (folder, None):  # read again, or by `load` itself
        engine = engine_of(None, again, zero=later)
        engine.load(folder / "saved")
        assert steps(engine, 2) == pytest.approx(wanted, rel=1e-6)
        assert torch.equal(engine.state_dict()["base.0.weight"], Adapted().base[0].weight)


def test_another_base_is_refused_by_its_tensor(tmp_path: Path) -> None:
    folder, other = written(tmp_path / "base"), written(tmp_path / "other", base_1_bias=1.0)
    engine = engine_of(None, folder)
    engine.save(tmp_path / "saved", wait=True)
    with pytest.raises(CheckpointError, match=r"whose 'base\.1\.bias' has other values .*1 of 4.*read the same files"):
        engine_of(None, other).load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"holds trained weights alone; its frozen base is in .*base=True"):
        engine.load_weights(tmp_path / "saved")


def test_what_is_not_in_files_is_written(tmp_path: Path) -> None:
    names = lambda name: set(Reader(tmp_path / name).names("weight"))  # noqa: E731
    everything = set(Adapted().state_dict())
    engine_of().save(tmp_path / "never read", wait=True)
    assert names("never read") == everything
    engine = engine_of(None, written(tmp_path / "base"))
    engine.save(tmp_path / "asked for", wait=True, base=True)
    assert names("asked for") == everything
    with engine.gathered(), torch.no_grad():
        engine.model.base[0].weight[0, 0] = 7.0
    engine.save(tmp_path / "edited", wait=True)
    assert "base.0.weight" in names("edited")
    assert set(Reader(tmp_path / "edited").facts["base"]["tensors"]) == {"base.1.bias", "base.1.weight"}


def test_a_layer_that_is_trained_from_a_checkpoint_on_begins_at_the_base(tmp_path: Path) -> None:
    engine = engine_of(None, written(tmp_path / "base"))
    steps(engine, 2)
    engine.save(tmp_path / "saved", wait=True)
    model = Adapted()
    model.base[1].requires_grad_(True)
    later = engine_of(None, tmp_path / "base", model)
    later.load(tmp_path / "saved")
    assert torch.equal(model.base[1].weight, Adapted().base[1].weight)
    assert torch.equal(model.beside[1].weight, engine.state_dict()["beside.1.weight"])
    steps(later, 1)
    assert not torch.equal(model.base[1].weight, Adapted().base[1].weight)
    later.save(tmp_path / "later", wait=True)
    assert {"base.1.weight", "base.1.bias"} <= set(Reader(tmp_path / "later").names("weight"))
    assert set(Reader(tmp_path / "later").facts["base"]["tensors"]) == {"base.0.weight", "base.0.bias"}
