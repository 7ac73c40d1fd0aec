"""Loaders go on with the engine, by the protocol that torchdata's StatefulDataLoader has."""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.data.loader import Loader, open_data
from zeroshard.errors import CheckpointError
from zeroshard.resilience.loaders import decoded, encoded


class DrawingLoader:
    """Batches drawn from generators of torch, numpy and Python, whose states are its own; as torchdata's keep them."""

    def __init__(self, rank: int) -> None:
        self.torch, self.python = torch.Generator().manual_seed(rank), random.Random(rank)
        self.numpy = np.random.RandomState(rank)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(2, 3, generator=self.torch) + self.python.random() + float(self.numpy.rand())

    def state_dict(self) -> dict[str, Any]:
        numpy = self.numpy.get_state()
        return {"torch": self.torch.get_state(), "python": self.python.getstate(), "numpy": numpy, "none": b"\0\1"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["none"] == b"\0\1"
        self.torch.set_state(state["torch"])
        self.python.setstate(state["python"])
        self.numpy.set_state(state["numpy"])


class Model(nn.Module):
    """A loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def engine_on(mesh: zs.Mesh) -> zs.Engine:
    torch.manual_seed(5)
    return zs.Engine(Model(), partial(torch.optim.AdamW, lr=0.1), zs.Plan(zero=1), mesh=mesh)


def drawn(mesh: zs.Mesh, folder: str, last: int) -> list[float]:
    """The losses from where the run is up to step `last`, with a checkpoint at the third step."""
    engine, loader = engine_on(mesh), DrawingLoader(mesh.rank)
    checkpoints, losses = zs.Checkpoints(engine, folder, loader=loader), []
    extra = checkpoints.resume()
    assert extra is None or extra == {"note": 1}
    batches = iter(loader)
    while engine.steps < last:
        losses.append(float(engine.train_step(next(batches)).loss or 0))
        if engine.steps == 3:
            checkpoints.save({"note": 1}, wait=True)
    return losses


def test_any_loader_goes_on_with_its_own_random_numbers(tmp_path: Path, pool: Pool) -> None:
    whole = pool.run(drawn, 2, str(tmp_path / "whole"), 7)
    pool.run(drawn, 2, str(tmp_path / "cut"), 4)
    assert pool.run(drawn, 2, str(tmp_path / "cut"), 7) == [losses[3:] for losses in whole]
    with pytest.raises(Exception, match="has the states of loaders on 2 ranks, and 1 ranks go on"):
        pool.run(drawn, 1, str(tmp_path / "cut"), 7)


def streamed(mesh: zs.Mesh, folder: str, data: str, last: int, keep: int) -> list[Any]:
    """The rows that this rank sees of a global batch of four, and a checkpoint after each step."""
    engine = engine_on(mesh)
    loader = Loader(open_data(data, sequence=8), batch=4 // mesh.ranks, rank=engine.data_rank, ranks=engine.data_ranks)
    checkpoints, seen = zs.Checkpoints(engine, folder, keep=keep, loader=loader), []
    checkpoints.resume()
    while engine.steps < last:
        rows = next(loader)["input_ids"]
        engine.train_step(rows[:, :3].float())
        seen.append(rows.tolist())
        checkpoints.save(wait=True)
    loader.close()
    return seen


def test_the_loader_of_this_package_goes_on_under_any_number_of_ranks(tmp_path: Path, pool: Pool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"record {n} {n * n}"}) + "\n" for n in range(300)))

    def batches(folder: str, last: int, ranks: int) -> list[Any]:
        parts = pool.run(streamed, ranks, str(tmp_path / folder), str(path), last, 2)
        return [sorted(row for part in step for row in part) for step in zip(*parts, strict=True)]

    whole = batches("whole", 9, 1)
    assert batches("cut", 2, 1) + batches("cut", 5, 2) + batches("cut", 7, 4) + batches("cut", 9, 1) == whole


@pytest.mark.filterwarnings("ignore")  # of torchdata's own imports
def test_states_of_every_kind_of_value_are_written_and_read(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torchdata.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
    batches = iter(loader)
    next(batches)
    again = torchdata.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
    again.load_state_dict(decoded(json.loads(json.dumps(encoded(loader.state_dict())))))
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


def test_loaders_and_checkpoints_without_a_state_are_refused(tmp_path: Path) -> None:
    engine = engine_on(zs.Mesh())
    with pytest.raises(CheckpointError, match="loader is a DataLoader, which has no state_dict"):
        zs.Checkpoints(engine, tmp_path, loader=torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
    engine.train_step(torch.ones(2, 3))
    zs.Checkpoints(engine, tmp_path).save(wait=True)
    with pytest.raises(CheckpointError, match="has no state of a loader, and the data would begin anew"):
        zs.Checkpoints(engine, tmp_path, loader=DrawingLoader(0)).resume()
    zs.Checkpoints(engine, tmp_path / "b", loader=DrawingLoader(0)).save({"x": 1}, wait=True)
    assert zs.Checkpoints(engine, tmp_path / "b").resume() == {"x": 1}
    for state, message in (({"a": [object()]}, r"state\['a'\]\[0\] of the loader is a object"), ({1: 2}, "the key 1")):
        with pytest.raises(CheckpointError, match=message):
            encoded(state)
