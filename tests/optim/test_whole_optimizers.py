"""Optimizers over whole tensors: each parameter has one owner, and trains as in one process under every plan."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_loop
from pool import Pool
from selection import by_default
from torch import Tensor, nn

import zeroshard as zs

ROWS = 24
Batch = tuple[Tensor, Tensor]


class Gram(torch.optim.Optimizer):
    """A user's optimizer: a list with a matrix for each side of a parameter, a momentum and a plain count."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sides"] = [torch.zeros(side, side) for side in p.shape]
                    state["momentum"], state["seen"] = torch.zeros_like(p), 0
                state["seen"] += 1
                for number, gram in enumerate(state["sides"]):
                    rows = p.grad.movedim(number, 0).reshape(len(gram), -1).clone()  # BLAS: bits follow the alignment
                    gram += rows @ rows.mT
                state["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * sum(gram.trace() for gram in state["sides"]).add(1e-8).rsqrt() * state["momentum"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Adafactor": partial(zs.optim.Adafactor, lr=1e-2),
    "AdamW8bit": partial(zs.optim.AdamW8bit, lr=1e-2),
    "AdamW8bit in codes": partial(zs.optim.AdamW8bit, lr=1e-2, min_8bit_size=32),
    "Gram": Gram,
    "LAMB": partial(zs.optim.LAMB, lr=1e-2),
    "SM3": partial(zs.optim.SM3, lr=1e-1),
    "SM3 with a momentum in bf16": partial(zs.optim.SM3, lr=1e-1, momentum=0.9, momentum_dtype=torch.bfloat16),
    "SOAP": partial(zs.optim.SOAP, lr=1e-2),
    "Shampoo": partial(zs.optim.Shampoo, lr=1e-2),
}


class Chain(nn.Module):
    """Blocks of unlike sizes, one of which (`extra`) is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6), nn.LayerNorm(6)) for width in (10, 4, 3)
        )
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        h: Tensor = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.extra(h) if extra else h)  # type: ignore[no-any-return]


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), y.flatten())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


def batches(steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(13, (2, ROWS, 4), generator=generator)) for _ in range(steps)]  # type: ignore[misc]


def plain(name: str, steps: int, clip: float | None = None) -> dict[str, Tensor]:
    """Weights of a plain loop."""
    parts = [[(x, number != 1, y)] for number, (x, y) in enumerate(batches(steps))]
    loss = lambda chain, part: loss_of(chain(part[0], part[1]), part[2])  # noqa: E731
    return plain_loop(model(), OPTIMIZERS[name], parts, loss, clip).weights


def take_steps(engine: zs.Engine, mesh: zs.Mesh, steps: range, microbatches: int = 1) -> None:
    """Steps on this rank's rows; the second leaves `extra` out."""
    for number, (x, y) in list(enumerate(batches(steps.stop)))[steps.start :]:
        for m in range(microbatches):
            rows = slice(mesh.rank * microbatches + m, ROWS, mesh.ranks * microbatches)
            engine.backward(loss_of(engine(x[rows], number != 1), y[rows]) / microbatches)
        engine.step()


def engine_of(mesh: zs.Mesh, name: str, plan: zs.Plan) -> zs.Engine:
    return zs.Engine(model(), OPTIMIZERS[name], plan, mesh=mesh)


def differences(engine: zs.Engine) -> list[tuple[str, Any, Any]]:
    """Rows of the tables in which formula and count differ."""
    sizes = [(r.category, r.planned_bytes, r.padding_bytes, r.measured_bytes) for r in engine.memory()]
    counts = [(r.purpose, r.planned_elements, r.measured_elements) for r in engine.traffic()]
    states = [(name, kept + padding, held) for name, kept, padding, held in sizes if kept is not None]
    return [row for row in (*states, *counts) if row[1] is not None and row[1] != row[2]]


def trained(mesh: zs.Mesh, name: str, plans: list[zs.Plan]) -> list[tuple[dict[str, Tensor], Any]]:
    """Weights after three steps under each plan, and rows in which formula and count differ."""
    found = []
    for plan in plans:
        engine = engine_of(mesh, name, plan)
        take_steps(engine, mesh, range(3), plan.microbatches)
        engine.check_replicas()
        found.append((engine.state_dict(), differences(engine)))
    return found


PLANS = [
    zs.Plan(zero=0),
    *(zs.Plan(zero=zero, transport=way) for zero in (1, 2, 3) for way in ("auto", "network")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("name", by_default(OPTIMIZERS, "Gram", "AdamW8bit in codes", "torch's Adafactor"))
def test_every_stage_trains_as_one_process(name: str, pool: Pool) -> None:
    ranks = 3 if name in ("Adafactor", "Gram", "SOAP") else 2
    clipped = zs.Plan(zero=2, clip_norm=0.5)
    results = pool.run(trained, ranks, name, [*PLANS, clipped])
    first, _ = results[0][0]
    for rank in results:
        assert [differing for _, differing in rank] == [[]] * len(rank)
        for plan, (weights, _) in zip(PLANS, rank, strict=False):
            assert all(torch.equal(weights[key], first[key]) for key in first), plan
    if name == "SOAP":  # the directions of its first gradients, of low rank, follow their last bits
        return
    for weights, clip in ((first, None), (results[0][-1][0], 0.5)):
        for key, value in plain(name, 3, clip).items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=2e-6)


MORE = [
    zs.Plan(zero=1, microbatches=2),
    zs.Plan(zero=2, microbatches=2, reduce_every="microbatch"),
    zs.Plan(zero=3, shard_group=2),
    zs.Plan(zero=2, offload="optimizer"),
    zs.Plan(zero=3, offload="optimizer,parameters", transport="network"),
    zs.Plan(zero=2, precision="bf16"),
    zs.Plan(zero=0, precision="bf16"),
    zs.Plan(zero=3, precision="bf16", offload="optimizer", transport="network"),
]


@pytest.mark.parametrize("name", by_default(["torch's Adafactor", "Gram", "AdamW8bit"], "Gram"))
def test_they_combine_with_the_rest_of_a_plan(name: str, pool: Pool) -> None:
    results = pool.run(trained, 4, name, MORE)
    expected = plain(name, 3)
    for plan, (weights, differing) in zip(MORE, results[0], strict=True):
        assert differing == [], plan
        narrow = plan.precision == "bf16"
        for key, value in expected.items():
            bound = {"rtol": 0.1, "atol": 3e-2} if narrow else {"rtol": 1e-5, "atol": 2e-6}
            torch.testing.assert_close(weights[key].float(), value, **bound)
    by_plan = [weights for weights, _ in results[0]]
    for key in expected:
        assert torch.equal(by_plan[5][key], by_plan[6][key]) and torch.equal(by_plan[5][key], by_plan[7][key]), key


def staged(mesh: zs.Mesh, name: str) -> dict[str, Tensor]:
    """Weights after three steps of a pipeline of two stages."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    replicas = max(1, mesh.ranks // 2)
    plan = zs.Plan(zero=2 if replicas > 1 else 0, pipeline_parallel=2 if mesh.ranks > 1 else 1, microbatches=2)
    rows = [torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    engine = zs.Engine(layers, OPTIMIZERS[name], plan, mesh=mesh, loss=nn.functional.mse_loss, example=rows[0][:2])
    for x in rows:
        engine.train_step(x[mesh.rank % replicas :: replicas])
    return engine.state_dict()


def test_each_stage_has_owners_of_its_own(pool: Pool) -> None:
    one, two, four = (pool.run(staged, ranks, "Gram")[0] for ranks in (1, 2, 4))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(four[key], value, rtol=1e-5, atol=2e-6)


def saved(mesh: zs.Mesh, name: str, plan: zs.Plan, path: Path) -> dict[str, Tensor]:
    """Save after three steps; weights after five."""
    engine = engine_of(mesh, name, plan)
    take_steps(engine, mesh, range(3))
    engine.save(path)
    take_steps(engine, mesh, range(3, 5))
    return engine.state_dict()


def passed_on(mesh: zs.Mesh, name: str, plan: zs.Plan, source: Path, path: Path) -> None:
    """Load and save again."""
    engine = engine_of(mesh, name, plan)
    engine.load(source)
    engine.save(path, wait=True)


def gone_on(mesh: zs.Mesh, name: str, plan: zs.Plan, source: Path) -> dict[str, Tensor]:
    """Weights after two more steps."""
    engine = engine_of(mesh, name, plan)
    engine.load(source)
    take_steps(engine, mesh, range(3, 5))
    return engine.state_dict()


CHECKPOINTED = ["torch's Adafactor", "Gram", "AdamW8bit in codes", "Shampoo", "SM3 with a momentum in bf16"]


@pytest.mark.parametrize("name", by_default(CHECKPOINTED, "Gram", "AdamW8bit in codes"))
def test_checkpoints_load_under_other_ranks_and_stages(name: str, pool: Pool, tmp_path: Path) -> None:
    one, three = zs.Plan(zero=0), zs.Plan(zero=2, transport="network")
    straight = pool.run(saved, 1, name, one, tmp_path / "a")[0]
    pool.run(passed_on, 3, name, three, tmp_path / "a", tmp_path / "b")
    pool.run(passed_on, 2, name, zs.Plan(zero=3, offload="optimizer"), tmp_path / "b", tmp_path / "c")
    pool.run(passed_on, 2, name, zs.Plan(zero=0), tmp_path / "c", tmp_path / "d")
    again = pool.run(gone_on, 1, name, one, tmp_path / "d")[0]
    assert all(torch.equal(again[key], straight[key]) for key in straight)


class Scaled(nn.Module):
    """A parameter of no dimension, as a temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class ByMean(torch.optim.Optimizer):
    """Divides by the mean square of a parameter's gradient, which it keeps in the dtype of the parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state["square"] = state.get("square", 0) + p.grad.square().mean()
            p.sub_(1e-2 * p.grad / state["square"].sqrt())


WITH_SCALARS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adafactor": partial(zs.optim.Adafactor, lr=1e-2, beta1=0.9),
    "LAMB": partial(zs.optim.LAMB, lr=1e-2),
    "SM3": partial(zs.optim.SM3, lr=1e-2, momentum=0.9),
    "ByMean": ByMean,
}


def scaled(mesh: zs.Mesh, name: str, dtype: torch.dtype, source: Path | None, path: Path) -> dict[str, Tensor]:
    """Weights after two steps that begin from a checkpoint, and end in one."""
    torch.manual_seed(0)
    engine = zs.Engine(Scaled().to(dtype), WITH_SCALARS[name], zs.Plan(zero=2), mesh=mesh)
    if source is not None:
        engine.load(source)
    for number in range(engine.steps, engine.steps + 2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(dtype)
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.save(path, wait=True)
    return engine.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WITH_SCALARS)
def test_states_of_parameters_of_no_dimension_come_back(
    name: str, dtype: torch.dtype, pool: Pool, tmp_path: Path
) -> None:
    pool.run(scaled, 1, name, dtype, None, tmp_path / "a")
    pool.run(scaled, 2, name, dtype, tmp_path / "a", tmp_path / "b")
    got = pool.run(scaled, 1, name, dtype, tmp_path / "b", tmp_path / "c")[0]
    torch.manual_seed(0)
    layer = Scaled().to(dtype)
    optimizer = WITH_SCALARS[name](layer.parameters())
    for number in range(6):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(dtype)
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=2e-6)


def with_muon(mesh: zs.Mesh, zero: int) -> dict[str, Tensor]:
    """Weights after three steps of torch's Muon over the matrices, while all other parameters are frozen."""
    layers = model()
    for p in layers.parameters():
        p.requires_grad_(p.dim() == 2)
    optimizer = torch.optim.Muon([p for p in layers.parameters() if p.dim() == 2], lr=1e-2)
    engine = zs.Engine(layers, optimizer, zs.Plan(zero=zero), mesh=mesh)  # type: ignore[arg-type]
    take_steps(engine, mesh, range(3))
    return engine.state_dict()


def test_the_muon_of_torch_has_owners(pool: Pool) -> None:
    whole, *sliced = (pool.run(with_muon, 2, zero)[0] for zero in (0, 1, 3))
    assert all(torch.equal(other[key], whole[key]) for other in sliced for key in whole)


class Coupled(torch.optim.SGD):
    """Divides by the norm over all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum((p.grad.norm() for p in params), torch.zeros(()))
        for p in params:
            p.data.sub_(p.grad / norm)


def refusal(mesh: zs.Mesh, make: Callable[..., torch.optim.Optimizer], plan: zs.Plan) -> str:
    with pytest.raises(zs.errors.ZeroshardError) as error:
        zs.Engine(model(), make, plan, mesh=mesh)
    return str(error.value)


def test_what_needs_all_parameters_or_a_closure_is_refused(pool: Pool) -> None:
    coupled = pool.run(refusal, 1, partial(Coupled, lr=1e-2), zs.Plan())[0]
    assert "Coupled" in coupled and "depend on each other" in coupled and "clip_norm" in coupled
    closure = pool.run(refusal, 1, torch.optim.LBFGS, zs.Plan())[0]
    assert "LBFGS" in closure and "closure" in closure


class Matrices(nn.Module):
    """Layers of one matrix each, so that each layer has one owner and the other ranks have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6, bias=False)) for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        h: Tensor = self.embed(x)
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.head(h)  # type: ignore[no-any-return]


def matrices_trained(mesh: zs.Mesh, plans: list[zs.Plan]) -> list[tuple[dict[str, Tensor], Any]]:
    """Weights after three steps under each plan, with checked replicas, and rows that differ from their formulas."""
    found = []
    for plan in plans:
        torch.manual_seed(0)
        engine = zs.Engine(Matrices(), Gram, plan, mesh=mesh)
        take_steps(engine, mesh, range(3))
        engine.check_replicas()
        found.append((engine.state_dict(), differences(engine)))
    return found


def test_groups_that_shard_apart_have_ranks_that_own_nothing_of_a_layer(pool: Pool) -> None:
    plans = [zs.Plan(zero=2, shard_group=2), zs.Plan(zero=3, shard_group=2, transport="network")]
    results = pool.run(matrices_trained, 4, plans)
    expected = pool.run(matrices_trained, 1, [zs.Plan()])[0][0][0]
    for weights, differing in (found for rank in results for found in rank):
        assert differing == []
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=2e-6)


def largest_gradient(mesh: zs.Mesh, zero: int) -> float:
    torch.manual_seed(0)
    engine = zs.Engine(Matrices(), Gram, zs.Plan(zero=zero), mesh=mesh)  # type: ignore[arg-type]
    x, y = batches(1)[0]
    engine.backward(loss_of(engine(x[mesh.rank :: mesh.ranks]), y[mesh.rank :: mesh.ranks]))
    return engine.clip_grad_norm(1.0, math.inf)


def test_the_largest_gradient_is_found_where_ranks_own_nothing_of_a_layer(pool: Pool) -> None:
    expected = pool.run(largest_gradient, 1, 0)[0]
    assert pool.run(largest_gradient, 3, 2) == pytest.approx([expected] * 3, rel=1e-5)
