"""`engine.join()`: uneven numbers of batches give the steps of a plain loop over all batches, and no rank hangs."""

from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, build
from jobs import error_of
from pool import Pool
from selection import by_default
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs

STAGES = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 2}
PLANS: dict[str, tuple[list[int], dict[str, Any]]] = {  # numbers of batches of each data rank
    "zero 0": ([3, 1], {"zero": 0}),
    "zero 1": ([0, 2, 3], {"zero": 1, "transport": "network"}),
    "zero 2": ([2, 2], {"zero": 2}),
    "zero 3": ([1, 3], {"zero": 3, "transport": "network"}),
    "offload": ([3, 0], {"zero": 3, "offload": "optimizer,parameters", "clip_norm": 0.3}),
    "tensor": ([2, 1], {"zero": 0, "tensor_parallel": 2}),
}
Weights = dict[str, Tensor]


class Summed(nn.Module):
    """A language model whose loss is a sum over the tokens that count, with its count."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = build(name)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        x = self.inner.body(self.inner.embed(tokens[:, :-1]), 0)  # type: ignore[operator, union-attr]
        logits: Tensor = self.inner.head(x)  # type: ignore[operator, assignment]
        labels = tokens[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"), labels.numel()


def rows(step: int, rank: int) -> Tensor:
    """A batch with another number of rows and tokens for each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (2 + rank, 5 + rank), generator=generator)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def plain(name: str, counts: list[int], clip: float | None) -> tuple[Weights, list[float], float]:
    """Weights, losses and the last learning rate of a loop over all batches, weighted by counts."""
    torch.manual_seed(0)
    model = Summed(name)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule, losses = scheduled(optimizer), []
    for step in range(max(counts)):
        sums = [model(rows(step, rank)) for rank, count in enumerate(counts) if step < count]
        loss = torch.stack([total for total, _ in sums]).sum() / sum(count for _, count in sums)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return dict(model.state_dict()), losses, optimizer.param_groups[0]["lr"]


def by_engine(mesh: zs.Mesh, name: str, counts: list[int], plan: dict[str, Any], whole: bool) -> Any:
    """Weights, losses and the learning rate of an engine, by `train_step` or by the calls of a loop."""
    torch.manual_seed(0)
    engine = zs.Engine(
        Summed(name), OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh, loss=lambda output, batch: output
    )
    schedule, losses = scheduled(engine.optimizer), []
    numbers = torch.get_rng_state()
    with engine.join():
        for step in range(counts[engine.data_rank]):
            tokens = rows(step, engine.data_rank)
            if whole:
                result = engine.train_step(tokens)
            else:
                with torch.no_grad():
                    engine(tokens)
                total, count = engine(tokens)
                engine.backward(total, count)
                engine.clip_grad_norm(plan.get("clip_norm", 1e9))
                result = engine.step()
            assert result.loss is not None
            schedule.step()
            losses.append(float(result.loss))
    assert torch.equal(numbers, torch.get_rng_state()) or "tensor_parallel" in plan  # whose trials draw some
    engine.check_replicas()
    return engine.state_dict(), losses, engine.optimizer.param_groups[0]["lr"], engine.steps


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("plan", by_default(PLANS, "zero 1", "zero 3", "offload"))
def test_steps_are_those_over_the_batches_that_there_are(pool: Pool, plan: str, whole: bool) -> None:
    counts, settings = PLANS[plan]
    name = "AttendingTied" if plan == "tensor" else "Plain"
    weights, losses, rate = plain(name, counts, settings.get("clip_norm"))
    ranks = len(counts) * settings.get("tensor_parallel", 1)
    answers = pool.run(by_engine, ranks, name, counts, settings, whole)
    for rank, (found, own, lr, steps) in enumerate(answers):
        count = counts[rank // settings.get("tensor_parallel", 1)]
        assert steps == max(counts) and lr == rate and len(own) == count
        assert own == pytest.approx(losses[:count], rel=1e-5)
        for key, values in weights.items():
            if not key.startswith("norm."):
                torch.testing.assert_close(found[key], values, rtol=1e-4, atol=1e-6)


def by_means(mesh: zs.Mesh, counts: list[int]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = zs.Engine(model, OPTIMIZERS["sgd"], zs.Plan(zero=2), mesh=mesh)
    with engine.join():
        for step in range(counts[mesh.rank]):
            for half in (0, 1):  # accumulated, the first without a reduction
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + 2 * mesh.rank + half))
                with engine.no_sync() if not half else torch.enable_grad():
                    engine.backward(engine(x).square().mean() / 2)
            engine.step()
    return engine.state_dict()


def test_means_count_alike_and_buffers_are_of_own_batches(pool: Pool) -> None:
    counts = [2, 1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(2):
        ranks = [rank for rank in (0, 1) if step < counts[rank]]
        for rank in ranks:
            for half in (0, 1):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + 2 * rank + half))
                (model(x).square().mean() / 2 / len(ranks) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    answers = pool.run(by_means, 2, counts)
    for found in answers:
        for key, p in model.named_parameters():
            torch.testing.assert_close(found[key], p.data, rtol=1e-4, atol=1e-6)
    assert [int(found["1.num_batches_tracked"]) for found in answers] == [4, 2]


def wrong(mesh: zs.Mesh) -> dict[str, str]:
    plan = zs.Plan(zero=2, transport="network")
    made = [zs.Engine(nn.Linear(5, 1), OPTIMIZERS["sgd"], plan, mesh=mesh) for _ in range(4)]
    x = torch.randn(4, 5)

    def nested() -> None:
        with made[0].join(), made[0].join():
            pass

    def late() -> None:
        made[1].backward(made[1](x).mean())
        with made[1].join():
            pass

    def own_backward() -> None:
        with made[2].join():
            made[2](x).mean().backward()

    def other_calls() -> None:
        with made[3].join():
            made[3](x) if mesh.rank else made[3].step()

    def saves() -> None:
        with made[0].join():
            if mesh.rank == 0:
                made[0].check_replicas()

    found = {"nested": error_of(nested), "late": error_of(late), "own": error_of(own_backward)}
    return {**found, "other": error_of(other_calls), "saves": error_of(saves)}


def test_wrong_calls_are_refused_on_all_ranks(pool: Pool) -> None:
    for found in pool.run(wrong, 2):
        assert "entered inside of another" in found["nested"] and "after a backward" in found["late"]
        assert "engine.join() is on" in found["own"]
        assert "rank 0 calls engine.step() and rank 1 engine.__call__()" in found["other"]
        assert found["saves"].startswith("CommError") and "engine.join()" in found["saves"]


def failing(mesh: zs.Mesh, batches: int) -> str:
    """Rank 1 fails in its own code before its second batch; the others go on, or have ended."""
    engine = zs.Engine(nn.Linear(5, 1), OPTIMIZERS["sgd"], zs.Plan(zero=2, transport="network"), mesh=mesh)

    def run() -> None:
        with engine.join():
            for step in range(3 if mesh.rank == 1 else batches):
                if mesh.rank == 1 and step == 1:
                    raise ValueError("line 7 of rows.jsonl does not parse")
                engine.backward(engine(torch.ones(2, 5)).mean())
                engine.step()

    return error_of(run)


@pytest.mark.parametrize("batches", [1, 3])
def test_an_error_of_one_rank_ends_all(pool: Pool, batches: int) -> None:
    said = "ValueError: line 7 of rows.jsonl does not parse"
    first, second, third = pool.run(failing, 3, batches)
    assert second == said
    for other in (first, third):
        assert other.startswith(f"CommError: Rank 1 failed inside of engine.join(): {said}.")


def of_experts(mesh: zs.Mesh) -> str:
    engine = zs.Engine(build("MixingTied"), OPTIMIZERS["sgd"], zs.Plan(zero=2, expert_parallel=2), mesh=mesh)
    return error_of(engine.join().__enter__)


def test_experts_over_ranks_are_refused(pool: Pool) -> None:
    assert all("Use expert_parallel=1" in said for said in pool.run(of_experts, 2))


class Odd:
    """A batch of a class of its own."""


def unsendable(mesh: zs.Mesh) -> str:
    class Model(nn.Linear):
        def forward(self, x: Tensor, odd: Odd) -> Tensor:
            return super().forward(x)

    engine = zs.Engine(Model(5, 1), OPTIMIZERS["sgd"], zs.Plan(zero=2), mesh=mesh)

    def run() -> None:
        with engine.join():
            if mesh.rank == 0:
                engine(torch.randn(2, 5), Odd())

    return error_of(run)


def test_a_batch_that_cannot_be_sent_is_named(pool: Pool) -> None:
    assert all("TypeError: a Odd" in said for said in pool.run(unsendable, 2))


def staged(mesh: zs.Mesh, counts: list[int]) -> Any:
    engine = zs.Engine(
        build("Five"), OPTIMIZERS["sgd"], zs.Plan.from_dict({**STAGES, "zero": 0}), mesh=mesh,
        example=(torch.randint(13, (2, 6)), 0),
    )  # fmt: skip
    with engine.join():
        for step in range(counts[engine.data_rank]):
            tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(10 * step + engine.data_rank))
            engine.train_step((tokens, 0))
    return engine.state_dict()


def test_replicas_of_a_pipeline(pool: Pool) -> None:
    counts = [2, 1]
    model = build("Five")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(2):
        ranks = [rank for rank in (0, 1) if step < counts[rank]]
        for rank in ranks:
            tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            (model(tokens, 0) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in pool.run(staged, 4, counts):
        for key, p in model.named_parameters():
            torch.testing.assert_close(found[key], p.data, rtol=1e-4, atol=1e-6)
