"""Checkpoints of buffers that are not as they were built: taken over where the model is the same, else an error."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import CheckpointError


class Bank(nn.Module):
    """Keeps the mean of every batch, the longest positions seen, and a mask that it makes in its first forward."""

    def __init__(self, positions: int = 4, extra: bool = False, hidden: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 1)
        self.register_buffer("bank", torch.zeros(0, 6))
        self.register_buffer("positions", torch.arange(positions), persistent=not hidden)
        self.register_buffer("last", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        if extra:
            self.register_buffer("extra", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.bank = torch.cat([self.bank, h.detach().mean(0, keepdim=True)])
        self.last = h.detach()[0].clone()
        self.cache = torch.zeros(len(self.bank))
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(6) * 0.5)
        return (self.down((h + self.bank.mean(0)) * self.mask)).square().mean()


def made(mesh: zs.Mesh, **kind: Any) -> zs.Engine:
    torch.manual_seed(3)
    return zs.Engine(Bank(**kind), OPTIMIZERS["adamw"], zs.Plan(zero=2), mesh=mesh)


def steps(engine: zs.Engine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(engine.steps))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saved(mesh: zs.Mesh, folder: str) -> Any:
    engine = made(mesh)
    checkpoints = zs.Checkpoints(engine, folder, keep=9)
    steps(engine, 3)
    checkpoints.save(wait=True)
    steps(engine, 2)
    checkpoints.save(wait=True)
    state = engine.state_dict()
    rest = steps(engine, 3)
    checkpoints.back_to(3)  # buffers shrink again
    again = steps(engine, 2)
    return state, rest, engine.state_dict(), again


def resumed(mesh: zs.Mesh, folder: str) -> Any:
    engine = made(mesh)
    zs.Checkpoints(engine, folder).resume()
    return engine.state_dict(), steps(engine, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_that_grew_are_taken_over(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """With those that were None, and those that were registered in a forward; a resumed run goes on bit for bit."""
    first = pool.run(saved, ranks, str(tmp_path))
    for (state, _, back, _), _rank in zip(first, range(ranks), strict=True):
        assert state["bank"].shape == (5, 6) and "mask" in state and "last" in state and "cache" not in state
        assert all(torch.equal(state[key], back[key]) for key in state)
    (tmp_path / "step-00000005.bad").rename(tmp_path / "step-00000005")
    for (state, rest, *_), (found, went_on) in zip(first, pool.run(resumed, ranks, str(tmp_path)), strict=True):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert went_on == rest


def refused(mesh: zs.Mesh, folder: str, kind: dict[str, Any]) -> list[str]:
    engine = made(mesh, **kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError) as error:
            zs.Checkpoints(engine, folder).resume()
    return [type(error.value).__name__, str(error.value), *(str(w.message) for w in caught)]


@pytest.mark.parametrize(
    "kind, text",
    [
        ({"positions": 7}, "the buffer 'positions' is (4,) there and (7,) here"),
        ({"extra": True}, "the buffer 'extra' is no such buffer there and (3,) here"),
        ({"hidden": True}, "the buffer 'positions' is (4,) there and no such buffer here"),
    ],
    ids=["shape", "missing", "unknown"],
)
def test_buffers_of_another_model_are_no_damage(pool: Pool, tmp_path: Path, kind: dict[str, Any], text: str) -> None:
    """Named with both shapes, and every checkpoint stays where it is."""
    pool.run(saved, 1, str(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    for name, message in pool.run(refused, 2, str(tmp_path), kind):
        assert name == "CheckpointError"
        assert text in message and "Build the model that was trained there" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == before
