"""Matrices cut at rows: each rank updates some, and all train as in one process under every plan."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from inside import held_states
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.optim.slices import owners

ROWS, WORDS, WIDTH, STEPS = 24, 41, 6, 8
Batch = tuple[Tensor, Tensor]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adafactor": partial(zs.optim.Adafactor, lr=1e-2),
    "Adafactor with all it has": partial(
        zs.optim.Adafactor, beta1=0.9, clip_threshold=0.1, weight_decay=0.1, eps=(1e-30, 1e-2)
    ),
    "Adafactor without scale": partial(zs.optim.Adafactor, lr=1e-3, scale_parameter=False),
    "SM3": partial(zs.optim.SM3, lr=1e-1),
    "SM3 without momentum": partial(zs.optim.SM3, lr=1e-1, momentum=0.0),
    "LAMB": partial(zs.optim.LAMB, lr=1e-2),
    "LAMB without ratios": partial(zs.optim.LAMB, lr=1e-2, adapt=False),
}


class Words(nn.Module):
    """An embedding, a convolution and a head that are cut, beside small layers; `extra` is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH))
        self.extra = nn.Conv2d(WIDTH, WORDS, (1, 2), bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        h: Tensor = self.embed(x)
        h = h + self.block(h)
        logits: Tensor = self.head(h)
        return logits + self.extra(h.mT.unsqueeze(2)).mean((2, 3)).unsqueeze(1) if extra else logits


@contextmanager
def cutting(least: int = 100) -> Iterator[None]:
    """Cut all matrices of so many elements."""
    with patch.object(owners, "LEAST", least), patch.object(owners, "UNEVEN", 0.0):
        yield


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Words().to(dtype)


def batches(steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(WORDS, (2, ROWS, 4), generator=generator)) for _ in range(steps)]  # type: ignore[misc]


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def plain(name: str, dtype: torch.dtype, clip: float | None, steps: int = STEPS) -> dict[str, Tensor]:
    """Weights of a plain loop."""
    words = model(dtype)
    optimizer = OPTIMIZERS[name](words.parameters())
    for number, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss_of(words(x, number != 1), y).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(words.parameters(), clip)
        optimizer.step()
    return dict(words.state_dict())


def take_steps(engine: zs.Engine, mesh: zs.Mesh, steps: range, microbatches: int = 1) -> None:
    """Steps on this rank's rows; the second leaves `extra` out."""
    for number, (x, y) in list(enumerate(batches(steps.stop)))[steps.start :]:
        for m in range(microbatches):
            rows = slice(mesh.rank * microbatches + m, ROWS, mesh.ranks * microbatches)
            engine.backward(loss_of(engine(x[rows], number != 1), y[rows]) / microbatches)
        engine.step()


def differences(engine: zs.Engine) -> list[tuple[str, Any, Any]]:
    """Rows of the tables in which formula and count differ."""
    sizes = [(r.category, r.planned_bytes, r.padding_bytes, r.measured_bytes) for r in engine.memory()]
    counts = [(r.purpose, r.planned_elements, r.measured_elements) for r in engine.traffic()]
    states = [(name, kept + padding, held) for name, kept, padding, held in sizes if kept is not None]
    return [row for row in (*states, *counts) if row[1] is not None and row[1] != row[2]]


def trained(mesh: zs.Mesh, name: str, plans: list[zs.Plan], dtype: torch.dtype) -> list[Any]:
    """Under each plan: weights after all steps, rows in which formula and count differ, what was asked."""
    found = []
    for plan in plans:
        with cutting():
            engine = zs.Engine(model(dtype), OPTIMIZERS[name], plan, mesh=mesh)
        take_steps(engine, mesh, range(STEPS), plan.microbatches)
        engine.check_replicas()
        asked = {r.purpose: r.measured_elements for r in engine.traffic()}.get("ask for rows", 0)
        found.append((engine.state_dict(), differences(engine), asked, engine.owners))
    return found


ASKED = {  # elements in a step: three matrices have 4 * WIDTH columns; norms and means are one each
    "Adafactor": 4 * WIDTH + 3 * 3,
    "Adafactor with all it has": 4 * WIDTH + 3 * 3,
    "Adafactor without scale": 4 * WIDTH + 3 * 2,
    "SM3": WIDTH + WIDTH + (WIDTH + 1 + 2),  # of a convolution, the slices along each dimension
    "SM3 without momentum": WIDTH + WIDTH + (WIDTH + 1 + 2),
    "LAMB": 3 * 2,
    "LAMB without ratios": 0,
}
PLANS = [
    zs.Plan(zero=1, transport="network"),
    zs.Plan(zero=2),
    zs.Plan(zero=3, transport="network"),
    zs.Plan(zero=3, clip_norm=0.5),
    zs.Plan(zero=2, microbatches=2, reduce_every="microbatch"),
    zs.Plan(zero=2, offload="optimizer"),
]


CASES = [
    *(("Adafactor", 3, torch.float32), ("Adafactor with all it has", 2, torch.float64)),
    *(
        ("Adafactor without scale", 2, torch.float32),
        ("SM3", 3, torch.float64),
        ("SM3 without momentum", 2, torch.float32),
    ),
    *(("LAMB", 3, torch.float32), ("LAMB without ratios", 2, torch.float64)),
]


@pytest.mark.parametrize("case", by_default(CASES, CASES[0], CASES[3]), ids=str)
def test_steps_are_those_of_one_process(case: tuple[str, int, torch.dtype], pool: Pool) -> None:
    name, ranks, dtype = case
    expected = {clip: plain(name, dtype, clip) for clip in (None, 0.5)}
    results = pool.run(trained, ranks, name, PLANS, dtype)
    bound = 1e-6 if dtype == torch.float32 else 1e-13
    for plan, (weights, differing, asked, told) in (
        (p, found) for r in results for p, found in zip(PLANS, r, strict=True)
    ):
        assert differing == [], plan
        assert "rows of 3 larger matrices" in told
        assert asked == (ranks - 1) * ASKED[name], plan
        for key, value in expected[plan.clip_norm].items():
            assert torch.equal(weights[key], results[0][0][0][key]) or plan.clip_norm or plan.microbatches > 1
            torch.testing.assert_close(weights[key], value, rtol=0, atol=bound)


def kept(mesh: zs.Mesh, name: str, plan: zs.Plan) -> tuple[dict[str, int], list[tuple[str, tuple[int, ...]]]]:
    """Bytes of states by tier after a step, and the shapes of the states of rows."""
    with cutting():
        engine = zs.Engine(model(torch.float32), OPTIMIZERS[name], plan, mesh=mesh)
    take_steps(engine, mesh, range(1))
    sizes = {row.tier: row.measured_bytes for row in engine.memory() if row.category == "optimizer states"}
    shapes = [
        (key, tuple(value.shape))
        for state in held_states(engine).values()
        for key, value in state.items()
        if key.startswith(("exp_avg_sq_", "accumulator"))
    ]
    return sizes, sorted(shapes)


@pytest.mark.parametrize("offload", ["", "optimizer"])
def test_states_are_rows_and_columns_to_the_byte(offload: str, pool: Pool) -> None:
    """A rank has the rows of each matrix that it updates, all of its columns, and what it owns whole."""
    found = pool.run(kept, 3, "Adafactor", zs.Plan(zero=2, offload=offload))
    tier = "host" if offload else "device"
    rows = [14, 14, 13]  # of 41
    of_cut = [4 * 3 * n + 4 * (WIDTH + WIDTH + 2 * WIDTH) for n in rows]
    whole = 4 * (2 * (4 + WIDTH) + 4 + WIDTH + 2 * WIDTH)
    assert sum(sizes[tier] for sizes, _ in found) == sum(of_cut) + whole
    for (_, shapes), own in zip(found, rows, strict=True):
        assert [shapes.count(("exp_avg_sq_row", (own,))), shapes.count(("exp_avg_sq_col", (2 * WIDTH,)))] == [3, 1]


def saved(mesh: zs.Mesh, name: str, plan: zs.Plan, cut: bool, source: Path | None, path: Path) -> dict[str, Tensor]:
    """Load, unless there is nothing yet; take two steps, save, and take one more; the weights."""
    with cutting(100 if cut else 10**6):
        engine = zs.Engine(model(torch.float64), OPTIMIZERS[name], plan, mesh=mesh)
    assert ("rows of 3" in engine.owners) == cut
    if source is not None:
        engine.load(source)
    take_steps(engine, mesh, range(engine.steps, engine.steps + 2))
    engine.save(path, wait=True)
    take_steps(engine, mesh, range(engine.steps, engine.steps + 1))
    return engine.state_dict()


@pytest.mark.parametrize("name", by_default(["Adafactor with all it has", "SM3", "LAMB"], "Adafactor with all it has"))
def test_states_load_cut_and_whole_under_any_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    """Each run goes on from the checkpoint of the one before, whose last step is not in it."""
    runs = [
        (1, zs.Plan(), False),
        (3, zs.Plan(zero=2, transport="network"), True),
        (2, zs.Plan(zero=3, offload="optimizer"), True),
        (2, zs.Plan(zero=1), False),
        (3, zs.Plan(zero=3), True),
        (2, zs.Plan(zero=0), False),
    ]
    source = None
    for number, (ranks, plan, cut) in enumerate(runs):
        path = tmp_path / str(number)
        for weights in pool.run(saved, ranks, name, plan, cut, source, path):
            for key, value in plain(name, torch.float64, None, 2 * number + 3).items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-13)
        source = path


def staged(mesh: zs.Mesh, name: str) -> tuple[dict[str, Tensor], str, list[Any]]:
    """Weights after some steps of a pipeline of two stages, what is told, and rows that differ from formulas."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Linear(*sides, bias=False) for _ in range(2) for sides in ((16, 41), (41, 16)))
    ).double()
    replicas = max(1, mesh.ranks // 2)
    plan = zs.Plan(zero=2 if replicas > 1 else 0, pipeline_parallel=2 if mesh.ranks > 1 else 1, microbatches=2)
    x = torch.randn(ROWS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with cutting():
        engine = zs.Engine(layers, OPTIMIZERS[name], plan, mesh=mesh, loss=nn.functional.mse_loss, example=x[:2])
    for _ in range(5):
        rows = slice(mesh.rank % replicas, None, replicas)
        engine.train_step(x[rows])
    return engine.state_dict(), engine.owners, differences(engine)


def test_stages_cut_matrices_of_their_own(pool: Pool) -> None:
    (one, _, _), *_ = pool.run(staged, 1, "Adafactor")
    for weights, told, differing in pool.run(staged, 4, "Adafactor"):
        assert "larger matrices" in told and differing == []
        for key, value in one.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-13)


def narrow(mesh: zs.Mesh, name: str, plans: list[zs.Plan]) -> list[Any]:
    """Weights after some steps under each plan, and rows that differ from formulas."""
    found = []
    for plan in plans:
        with cutting():
            engine = zs.Engine(model(torch.float32), OPTIMIZERS[name], plan, mesh=mesh)
        take_steps(engine, mesh, range(3))
        engine.check_replicas()
        found.append((engine.state_dict(), differences(engine), engine.owners))
    return found


def test_they_combine_with_the_rest_of_a_plan(pool: Pool) -> None:
    """Groups that shard apart, master weights, and all that is offloaded."""
    plans = [
        zs.Plan(zero=3, shard_group=2),
        zs.Plan(zero=1, overlap_gather=True, transport="network"),
        zs.Plan(zero=3, offload="optimizer,parameters", transport="network"),
        zs.Plan(zero=2, precision="bf16"),
        zs.Plan(zero=3, precision="bf16", offload="optimizer", transport="network"),
    ]
    expected = plain("Adafactor", torch.float32, None, 3)
    first = pool.run(narrow, 4, "Adafactor", plans)[0]
    for plan, (weights, differing, told) in zip(plans, first, strict=True):
        assert differing == [] and "rows of 3 larger matrices" in told, plan
        for key, value in expected.items():
            bound = 1e-6 if plan.precision == "fp32" else 2e-2
            torch.testing.assert_close(weights[key].float(), value, rtol=0, atol=bound)
    assert all(torch.equal(first[-2][0][key], first[-1][0][key]) for key in expected)


def strayed(mesh: zs.Mesh) -> str:
    """What is said where a rank has other statistics of columns than the others."""
    with cutting():
        engine = zs.Engine(model(torch.float32), OPTIMIZERS["Adafactor"], zs.Plan(zero=2), mesh=mesh)
    take_steps(engine, mesh, range(1))
    engine.check_replicas()
    if mesh.rank == 1:
        for state in held_states(engine).values():
            if state.get("exp_avg_sq_col") is not None and state["exp_avg_sq_col"].numel() == 2 * WIDTH:
                state["exp_avg_sq_col"][0] += 1
    with pytest.raises(zs.errors.DivergenceError) as error:
        engine.check_replicas()
    return str(error.value)


def test_statistics_of_columns_that_differ_are_found(pool: Pool) -> None:
    for said in pool.run(strayed, 3):
        assert "exp_avg_sq_col of extra.weight" in said and "rank 1" in said
