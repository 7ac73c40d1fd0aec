"""A toy technique that splits a matrix over an axis of its own, to prove the seams that every such technique needs.

Two kinds: `Columns` splits a matrix over ranks that work on the same data (as tensor parallelism does), `Experts` gives
each of the ranks that work on different data a matrix of its own (as expert parallelism does). Both train like the
plain model, and each of the traps that a mean over the wrong group, a norm of one group, and the like would fall into
has a test that fails then.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import axes_of, parts_of
from parts.fused import CopyToAxis, SumOverAxis
from plain_loop import plain_loop
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.engine import techniques
from zeroshard.parts.place import Axis, Piece, Split
from zeroshard.parts.technique import NewAxis
from zeroshard.traffic import Purpose

WIDTH, ROWS, STEPS = 6, 4, 4


class Toy(nn.Module):
    """A dense layer, a matrix that may be split, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.middle: nn.Module = Middle()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)), number))).square().mean()


class Middle(nn.Module):
    """Two matrices, one behind the other: rows of kind k go through matrix k, or through the sum of both (kind 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.empty(2, WIDTH, WIDTH).uniform_(-0.5, 0.5))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        kind = int(number[0])
        return x @ (self.matrices.sum(0) if kind == 2 else self.matrices[kind])


class SplitMiddle(nn.Module):
    """Matrix k of the two is on rank k of the axis; on the same data, so that kind 2 is a sum over the axis."""

    def __init__(self, mine: Tensor, axis: Axis) -> None:
        super().__init__()
        self.matrices = nn.Parameter(mine.clone())
        self.axis = axis

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        group = self.axis.comm.mesh.gathers
        return SumOverAxis.apply(CopyToAxis.apply(x, group) @ self.matrices[0], group)


class OwnMiddle(nn.Module):
    """Matrix k of the two is on rank k of the axis, whose data are all of kind k."""

    def __init__(self, mine: Tensor, axis: Axis) -> None:
        super().__init__()
        self.matrices = nn.Parameter(mine.clone())
        self.axis = axis

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        assert int(number[0]) == self.axis.rank
        return x @ self.matrices[0]


class Technique:
    """Splits `middle.matrices` along its first dimension over pairs of ranks."""

    zones = None

    def __init__(self, data: bool) -> None:
        self.data, self.name = data, "expert" if data else "tensor"

    def axes(self, ranks: int) -> Mapping[str, NewAxis]:
        return {self.name: NewAxis([[first, first + 1] for first in range(0, ranks, 2)], self.data)}

    def cut(self, model: nn.Module, axes: Mapping[str, Axis]) -> Mapping[nn.Parameter, Split]:
        axis, whole = axes[self.name], model.middle.matrices
        kind = OwnMiddle if self.data else SplitMiddle
        model.middle = kind(whole.detach()[axis.rank : axis.rank + 1], axis)
        return {model.middle.matrices: Split(self.name, tuple(whole.shape), 0, (Piece(axis.rank, axis.rank + 1),))}


def rows(step: int, data_rank: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1000 * step + data_rank))


def kind_of(data_rank: int, data: bool) -> Tensor:
    return torch.full((ROWS,), data_rank % 2 if data else 2)


def make(mesh: zs.Mesh, plan: Mapping[str, Any], data: bool | None, seed: int = 0) -> zs.Engine:
    """An engine; `data` says which technique splits it, None for none."""
    before = techniques.TECHNIQUES[:]
    techniques.TECHNIQUES[:] = [] if data is None else [lambda _: Technique(data)]
    try:
        torch.manual_seed(seed)
        return zs.Engine(Toy(), lambda p: torch.optim.AdamW(p, lr=0.02), zs.Plan.from_dict(plan), mesh=mesh)
    finally:
        techniques.TECHNIQUES[:] = before


def plain(data_ranks: int, data: bool, clip: float | None, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and gradient norms of a plain loop over the batches of all data ranks."""
    torch.manual_seed(0)
    parts = [[(rows(step, rank), kind_of(rank, data)) for rank in range(data_ranks)] for step in range(steps)]
    seen = plain_loop(Toy(), partial(torch.optim.AdamW, lr=0.02), parts, lambda model, part: model(*part), clip)
    return seen.weights, seen.norms


def train(
    mesh: zs.Mesh, plan: Mapping[str, Any], data: bool, folder: str, seeds: bool = False
) -> tuple[Any, list[float], tuple[int, int], dict[str, Any]]:
    engine = make(mesh, plan, data, seed=mesh.rank if seeds else 0)
    data_ranks, norms = (engine.data_rank, engine.data_ranks), []
    for step in range(STEPS):
        engine.backward(engine(rows(step, engine.data_rank), kind_of(engine.data_rank, data)))
        norms.append(engine.step().grad_norm)
    engine.check_replicas()
    rows_of = {row.category: (row.planned_bytes + row.padding_bytes, row.measured_bytes)
               for row in engine.memory() if row.planned_bytes is not None}  # fmt: skip
    wire = {row.purpose: (row.planned_elements, row.measured_elements)
            for row in engine.traffic() if row.planned_elements is not None}  # fmt: skip
    engine.save(f"{folder}/split", wait=True)
    return engine.model.middle.matrices.shape, norms, data_ranks, {"memory": rows_of, "wire": wire}


def whole_of(mesh: zs.Mesh, folder: str) -> dict[str, Tensor]:
    """A checkpoint of a split model, loaded into the plain one on another number of ranks."""
    engine = make(mesh, {"zero": 2}, None, seed=5)
    engine.load(f"{folder}/split")
    return engine.state_dict()


def again(mesh: zs.Mesh, plan: Mapping[str, Any], data: bool, folder: str) -> tuple[list[float], list[float]]:
    """The norms of two steps after loading, and of the same steps without a break."""
    runs = []
    for loads in (False, True):
        engine = make(mesh, plan, data, seed=7 if loads else 0)
        first = STEPS if loads else 0
        if loads:
            engine.load(f"{folder}/split")
        for step in range(first, STEPS + 2):
            engine.backward(engine(rows(step, engine.data_rank), kind_of(engine.data_rank, data)))
            norm = engine.step().grad_norm
            if step >= STEPS:
                runs.append(norm)
    return runs[:2], runs[2:]


@pytest.mark.parametrize("data", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize("ranks, zero", [(4, 0), (4, 1), (4, 2), (4, 3), (2, 1), (2, 2)])
def test_a_split_matrix_trains_like_the_whole(pool: Pool, tmp_path: Path, data: bool, ranks: int, zero: int) -> None:
    """Traps 1 to 5: mean, norm, initial weights, checkpoints and digests follow the axes, not the slice group."""
    plan = {"zero": zero, "transport": "network", "clip_norm": 0.05}
    data_ranks = ranks if data else ranks // 2
    weights, norms = plain(data_ranks, data, 0.05)
    answers = pool.run(train, ranks, plan, data, str(tmp_path), True)
    for rank, (shape, found, (data_rank, of), tables) in enumerate(answers):
        assert (data_rank, of, shape) == (rank if data else rank // 2, data_ranks, torch.Size([1, WIDTH, WIDTH]))
        assert found == pytest.approx(norms, rel=1e-5)
        for name, (planned, measured) in tables["memory"].items():
            assert planned == measured, name
        for name, (planned, measured) in tables["wire"].items():
            assert planned == measured, name
    (loaded,) = pool.run(whole_of, 1, str(tmp_path))
    for name, wanted in weights.items():
        torch.testing.assert_close(loaded[name], wanted, rtol=1e-4, atol=1e-6)
    for alone, after in pool.run(again, ranks, plan, data, str(tmp_path)):
        assert alone == after


def divide(mesh: zs.Mesh, where: str) -> str:
    """One rank's copy differs by a bit; the error of the comparison."""
    engine = make(mesh, {"zero": 1, "transport": "network"}, data=False)
    (part,) = [p for p in parts_of(engine).all if any(where in e.name for e in p.flat.index.entries)
               and bool(p.splits) == (where == "middle")]  # fmt: skip
    if mesh.rank == 3:
        with torch.no_grad():
            part.weights.full[0] += 1
    try:
        engine.check_replicas()
    except zs.errors.DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where, twins", [("first", "rank 3"), ("middle", "ranks 1, 3|rank 1 against rank 3")])
def test_replicas_are_compared_over_the_axes(pool: Pool, where: str, twins: str) -> None:
    """Trap 6: the ranks that hold the same are no rectangle of neighbours."""

    for text in pool.run(divide, 4, where):
        assert where in text and re.search(twins, text), text


def disagree(mesh: zs.Mesh) -> str:
    """Ranks 0 and 1 meet in a collective over the tensor axis that is another one for each of them."""
    engine = make(mesh, {"zero": 1, "transport": "network"}, data=False)
    engine.backward(engine(rows(0, engine.data_rank), kind_of(0, False)))
    if mesh.rank < 2:
        axis = axes_of(engine).new["tensor"]
        axis.comm.gather(torch.zeros(2), torch.zeros(1), Purpose.SETUP, f"one of {mesh.rank}").wait()
    try:
        engine.step()
    except zs.errors.CommError as error:
        return str(error)
    return ""


def test_the_digests_of_every_axis_are_compared(pool: Pool) -> None:
    """Trap 5, where the slice groups alone have done the same."""
    for text in pool.run(disagree, 4):
        assert "The ranks disagree" in text


def edit(mesh: zs.Mesh, zero: int) -> tuple[list[str], list[Tensor]]:
    """The errors of writes that differ where they may and where they may not; the split matrix after each."""
    said, seen = [], []
    for where in ("part", "dense", "twin", "writer"):
        engine = make(mesh, {"zero": zero, "transport": "network"}, data=False)
        middle, axis = engine.model.middle, axes_of(engine).new["tensor"]
        try:
            with engine.gathered(writer=0 if where == "writer" else None), torch.no_grad():
                if where == "dense":
                    engine.model.first.weight += mesh.rank // 3
                else:
                    middle.matrices.fill_(axis.rank if where == "part" else mesh.rank // 3)
            said.append("nothing")
        except zs.errors.PlanError as error:
            said.append(str(error))
        if where == "part":
            with engine.gathered():
                seen.append(middle.matrices.detach().clone())
    return said, seen


@pytest.mark.parametrize("zero", [1, 3])
def test_writes_are_compared_among_the_ranks_that_hold_the_same(pool: Pool, zero: int) -> None:
    for rank, (said, (part,)) in enumerate(pool.run(edit, 4, zero)):
        assert said[0] == "nothing" and bool((part == rank % 2).all())
        assert "Ranks 0 and 3 wrote different values into 'first.weight'" in said[1]
        assert "Ranks 1 and 3 wrote different values into 'middle.matrices'" in said[2]
        assert "only a part of 'middle.matrices'" in said[3]
