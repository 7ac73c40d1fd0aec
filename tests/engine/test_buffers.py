"""Buffers that a forward writes: as in a plain loop under every schedule, and saved by the stage that runs them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS
from pool import Pool
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import zeroshard as zs
from zeroshard.errors import ModelError

ROWS, MICROBATCHES, STEPS = 8, 4, 3


class Normed(nn.Module):
    """Batch norm, spectral norm, a moving scale that is bound anew, and one that is made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.inner = spectral_norm(nn.Linear(6, 6))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            largest = x.detach().abs().max()
            self.scale = 0.9 * self.scale + 0.1 * largest
            self.late = largest if self.late is None else torch.maximum(self.late, largest)
        return x + torch.tanh(self.inner(self.norm(x / self.scale))) * x / self.late


class Counting(nn.Module):
    """Blocks between two layers; the model itself counts its microbatches before the blocks and sums losses after."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.start = nn.BatchNorm1d(6, affine=False)
        self.blocks = nn.ModuleList([Normed() for _ in range(4)])
        self.leave = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.counts = counts
        if counts:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.seen += 1
        h = self.start(self.enter(x))
        for block in self.blocks:
            h = block(h)
        loss = self.leave(h).square().mean()
        if self.counts and self.training:
            self.total += loss.detach()
        return loss


def made(counts: bool = True) -> nn.Module:
    torch.manual_seed(4)
    return Counting(counts)


def rows(step: int, data_rank: int = 0) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * step + data_rank))


@functools.cache
def plain(counts: bool, data_ranks: int = 1, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Of each lane, weights and buffers of a loop that takes microbatches one by one, and averages over the lanes."""
    models = [made(counts) for _ in range(data_ranks)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    for step in range(steps):
        for data_rank, model in enumerate(models):
            optimizers[data_rank].zero_grad()
            for part in rows(step, data_rank).chunk(MICROBATCHES):
                (model(part) / MICROBATCHES).backward()
        for together in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in together if p.grad is not None]).mean(0)
            for parameter in together:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [{k: v.detach().clone() for k, v in model.state_dict().items()} for model in models]


def engine_of(mesh: zs.Mesh, plan: dict[str, Any], counts: bool = True) -> zs.Engine:
    plan = {"microbatches": MICROBATCHES, "pipeline_parallel.balance": "parameters", **plan}
    example = rows(0)[:2] if plan.get("pipeline_parallel", 1) > 1 else None
    return zs.Engine(made(counts), OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh, example=example)


def trained(mesh: zs.Mesh, plan: dict[str, Any], counts: bool = True, path: str | None = None) -> Any:
    engine = engine_of(mesh, plan, counts)
    for step in range(STEPS):
        engine.train_step(rows(step, engine.data_rank))
    if path is not None:
        engine.save(path, wait=True)
    return engine.data_rank, engine.state_dict(), engine.ledger.account(zs.memory.ledger.Category.BUFFERS).current


def close(found: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        close(found[name], value, name)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "gpipe": (2, {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe"}),
    "gpipe-kept": (2, {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe", "recompute": "off"}),
    "1f1b-recompute": (3, {"pipeline_parallel": 3, "recompute": "blocks"}),
    "1f1b": (2, {"pipeline_parallel": 2}),
    "replicas": (4, {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe", "zero": 1}),
}


@pytest.mark.parametrize("name", PLANS)
def test_buffers_are_those_of_a_plain_loop(pool: Pool, name: str) -> None:
    """Each microbatch once and in order, recomputed or not; every rank takes out those of its lane."""
    ranks, plan = PLANS[name]
    data_ranks = ranks // plan.get("pipeline_parallel", 1)
    for data_rank, state, _ in pool.run(trained, ranks, plan):
        check(state, plain(True, data_ranks)[data_rank])
    if name == "gpipe":
        assert plain(True)[0]["seen"] == STEPS * MICROBATCHES
        assert plain(True)[0]["blocks.3.norm.num_batches_tracked"] == STEPS * MICROBATCHES


def test_several_chunks_on_a_stage(pool: Pool) -> None:
    plan = {
        "pipeline_parallel": 2,
        "pipeline_parallel.virtual_stages": 2,
        "pipeline_parallel.schedule": "interleaved",
        "recompute": "blocks",
    }
    for _, state, _ in pool.run(trained, 2, plan, False):
        check(state, plain(False)[0])


def test_copies_for_a_recomputation_are_given_back(pool: Pool) -> None:
    """What the ledger holds after a step does not know of recomputation."""
    plans = (
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "gpipe", "recompute": recompute}
        for recompute in ("blocks", "off")
    )
    one, other = (pool.run(trained, 2, plan) for plan in plans)
    assert [held for *_, held in one] == [held for *_, held in other]


def loaded(mesh: zs.Mesh, plan: dict[str, Any], path: str) -> Any:
    """The state before and after a further step."""
    engine = engine_of(mesh, plan)
    engine.load(path)
    before = engine.state_dict()
    engine.train_step(rows(STEPS, engine.data_rank))
    return engine.data_rank, before, engine.state_dict()


@pytest.mark.parametrize(
    "source, target",
    [("gpipe", "gpipe"), ("gpipe", "1f1b-recompute"), ("1f1b-recompute", "one"), ("one", "gpipe"),
     ("replicas", "replicas")],
)  # fmt: skip
def test_a_checkpoint_has_the_buffers_of_every_stage(pool: Pool, tmp_path: Path, source: str, target: str) -> None:
    ranks, plan = PLANS[source]
    saved = pool.run(trained, ranks, plan, True, str(tmp_path / "a"))
    ranks, plan = PLANS[target]
    for data_rank, before, after in pool.run(loaded, ranks, plan, str(tmp_path / "a")):
        check(before, next(state for other, state, _ in saved if other == data_rank))
        check(after, plain(True, ranks // plan.get("pipeline_parallel", 1), STEPS + 1)[data_rank])


class Shared(Counting):
    """Two blocks with one batch norm."""

    def __init__(self) -> None:
        super().__init__(counts=False)
        self.blocks[3].norm = self.blocks[0].norm  # type: ignore[union-attr]


class Early(Counting):
    """What is written after the blocks is read before them, in the next microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (1 + self.total))


def refused(mesh: zs.Mesh, kind: str) -> str:
    torch.manual_seed(0)
    plan: dict[str, Any] = {"pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.balance": "parameters"}
    plan |= (
        {"pipeline_parallel.schedule": "interleaved", "pipeline_parallel.virtual_stages": 2}
        if kind == "Counting"
        else {}
    )
    model = {"Counting": Counting, "Shared": Shared, "Early": Early}[kind]()
    with pytest.raises(ModelError) as caught:
        zs.Engine(model, OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh, example=rows(0)[:2])
    return str(caught.value)


def test_buffers_that_several_chunks_would_write_are_refused(pool: Pool) -> None:
    for message in pool.run(refused, 2, "Counting"):
        assert "The buffer 'seen' is written outside of the blocks" in message or "'total'" in message
        assert "use virtual_stages=1" in message
    for message in pool.run(refused, 2, "Shared"):
        assert "is written in blocks.0, blocks.3, which are on several stages" in message
        assert "blocks.0.norm." in message and "split=" in message


def test_a_buffer_that_an_earlier_stage_reads_is_refused(pool: Pool) -> None:
    for message in pool.run(refused, 2, "Early"):
        assert "The buffer 'total' is read before the blocks and written after the blocks" in message
        assert "Write it where it is read" in message
