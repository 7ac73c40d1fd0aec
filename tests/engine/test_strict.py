"""`Plan(strict=True)`: one machine refuses the reads of parameters that stage 3 over a network refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build
from jobs import error_of
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.errors import PlanError


class Valued(nn.Module):
    """A model with a value head, as TRL wraps one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.value = build("Plain"), nn.Linear(10, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.body(self.inner.embed(tokens), 0)  # type: ignore[operator, union-attr]
        return self.inner(tokens) + self.value(hidden).square().mean()


def read(mesh: zs.Mesh, plan: dict[str, Any], folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = zs.Engine(Valued(), OPTIMIZERS["adamw"], zs.Plan(zero=3, **plan), mesh=mesh)
    model = engine.model
    found: dict[str, Any] = {
        "head alone": error_of(lambda: model.value(torch.ones(2, 10))),  # type: ignore[operator]
        "block alone": error_of(lambda: model.inner.blocks[0](torch.ones(2, 10))),  # type: ignore[index, union-attr]
        "weight": error_of(lambda: model.value.weight.sum()),  # type: ignore[operator, union-attr]
        "saved": error_of(lambda: torch.save(model.state_dict(), Path(folder) / f"{mesh.rank}.pt")),
    }
    with engine.gathered():
        found["inside"] = error_of(lambda: torch.save(model.state_dict(), Path(folder) / f"{mesh.rank}.pt"))
    losses = []
    for step in range(3):
        result = engine.train_step(batch(step, mesh.rank, mesh.ranks))
        losses.append(result.grad_norm)
    wire = {row.purpose: (row.planned_elements, row.measured_elements) for row in engine.traffic()}
    return {**found, "norms": losses, "wire": wire, "weights": engine.state_dict()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_refuses_what_the_network_refuses(pool: Pool, ranks: int, tmp_path: Path) -> None:
    loose = pool.run(read, ranks, {}, str(tmp_path))
    strict = pool.run(read, ranks, {"strict": True}, str(tmp_path))
    network = pool.run(read, 2, {"transport": "network"}, str(tmp_path))
    for mine, theirs, other in zip(loose, strict, network, strict=False):
        for key in ("weight", "saved"):
            assert mine[key] == "nothing"
            assert theirs[key] == other[key] and theirs[key].startswith("PlanError")
        for key in ("head alone", "block alone"):
            assert mine[key] == theirs[key] == other[key] == "nothing"
        assert mine["inside"] == theirs["inside"] == "nothing"
        assert mine["norms"] == theirs["norms"]
        planned, measured = theirs["wire"]["gather parameters"]
        assert measured >= planned > 0 if ranks > 1 else measured == planned == 0  # blocks run twice in a forward
        assert all(torch.equal(values, theirs["weights"][name]) for name, values in mine["weights"].items())


def test_it_is_over_the_network() -> None:
    assert zs.Plan(zero=3, strict=True).transport == "network"
    assert zs.Plan(zero=2, strict=True).transport == "auto"  # whose parameters are whole everywhere
    with pytest.raises(PlanError, match=r"strict=True .* Leave one out"):
        zs.Plan(zero=3, strict=True, transport="shared")
