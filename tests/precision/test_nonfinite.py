"""After a `NonFiniteError` training goes on as though the step had not been made, as docs/precision.md says."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.errors import NonFiniteError

BAD = 2


def train(settings: dict[str, Any], bad: bool, mesh: zs.Mesh | None = None) -> tuple[list[Any], dict[str, Tensor]]:
    """Steps and norms of four batches, of which one is not finite, or left out; and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plan = zs.Plan.from_dict(settings)
    square = lambda output, batch: output.float().square().mean()  # noqa: E731
    engine = zs.Engine(
        model, partial(torch.optim.AdamW, lr=0.1), plan, mesh=mesh, loss=square, example=torch.ones(2, 4)
    )
    results: list[Any] = []
    for number in range(1, 5):
        batch = torch.full((4, 4), float("nan") if number == BAD else float(number))
        if number == BAD and bad:
            with pytest.raises(NonFiniteError):
                engine.train_step(batch)
            assert (engine.steps, engine.skipped) == (1, 0)
        elif number != BAD:
            result = engine.train_step(batch)
            results.append((result.step, result.grad_norm))
    return results, engine.state_dict()


def train_staged(mesh: zs.Mesh, bad: bool) -> tuple[list[Any], dict[str, Tensor]]:
    return train({"pipeline_parallel": 2, "microbatches": 2}, bad, mesh)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 0},
        {"zero": 1, "precision": "bf16"},
        {"zero": 3, "microbatches": 2},
        {"zero": 2, "offload": "optimizer", "offload.delayed_update": True},
        {"zero": 3, "offload": "optimizer,parameters"},
    ],
)
def test_training_goes_on_without_the_step(settings: dict[str, Any]) -> None:
    (found, weights), (wanted, others) = train(settings, True), train(settings, False)
    assert found == wanted and [step for step, _ in found] == [1, 2, 3]
    assert all(torch.equal(weights[name], value) for name, value in others.items())


def test_so_it_does_in_stages(pool: Pool) -> None:
    pairs = zip(pool.run(train_staged, 2, True), pool.run(train_staged, 2, False), strict=True)
    for (found, weights), (wanted, others) in pairs:
        assert found == wanted
        assert all(torch.equal(weights[name], value) for name, value in others.items())
