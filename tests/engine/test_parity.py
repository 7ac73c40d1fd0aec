"""Every stage gives the losses and weights of a plain PyTorch loop on the same global batch."""

import functools
from typing import Any

import pytest
import torch
from engine.models import MODELS, OPTIMIZERS, batch, build, reference
from engine.plain import transport_of
from pool import Pool
from torch import Tensor

import zeroshard as zs

STEPS = 20
CASES = [
    *(("Plain", optimizer, microbatches, None) for optimizer in OPTIMIZERS for microbatches in (1, 2, 4)),
    *(("Plain", optimizer, 1, 0.5) for optimizer in OPTIMIZERS),
    *((model, "adamw", 1, None) for model in MODELS if model != "Plain"),
    *((model, "adamw", 2, 0.5) for model in ("Tied", "Sometimes", "Twice", "CheckpointedReentrant")),
]
cached_reference = functools.cache(reference)


def train(mesh: zs.Mesh, zero: int, case: tuple[str, str, int, float | None], evaluate: bool = True) -> Any:
    """Twenty steps by `train_step`; an evaluation pass between steps. Losses [steps] of this rank and final weights."""
    name, optimizer, microbatches, clip = case
    model = build(name, seed=mesh.rank)  # other ranks start elsewhere, so rank 0's weights must win
    plan = zs.Plan(zero=zero, transport=transport_of(zero), microbatches=microbatches, clip_norm=clip)
    engine = zs.Engine(model, lambda ps: OPTIMIZERS[optimizer]([p for p in ps if p.requires_grad]), plan, mesh=mesh)
    losses = []
    for step in range(STEPS):
        result = engine.train_step((batch(step, mesh.rank, mesh.ranks), step))
        losses.append(result.loss.item())
        if evaluate and step % 5 == 1:
            with torch.no_grad():
                engine(batch(step, mesh.rank, mesh.ranks), step)
    return losses, engine.state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_follows_a_plain_loop(pool: Pool, case: tuple[str, str, int, float | None], ranks: int) -> None:
    name, optimizer, microbatches, clip = case
    if ranks == 4 and microbatches == 4:
        pytest.skip("a global batch of 8 gives 4 ranks 2 rows each, too few for 4 microbatches")
    expected_losses, expected_weights = cached_reference(name, optimizer, STEPS, clip)
    stages = {1: (0, 3), 2: (0, 1, 2, 3), 4: (1, 3)}[ranks]
    runs = {zero: pool.run(train, ranks, zero, case) for zero in stages}
    for answers in runs.values():
        losses = torch.tensor([losses for losses, _ in answers]).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=1e-5, atol=0)
        for _, weights in answers:
            _assert_equal_weights(weights, expected_weights)
    for zero in stages:
        if zero > 1 and 1 in stages:
            _assert_same_bits(runs[zero], runs[1])


def _assert_equal_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert value.dtype == expected[key].dtype
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


def _assert_same_bits(run: list[Any], other: list[Any]) -> None:
    for (losses, weights), (other_losses, other_weights) in zip(run, other, strict=True):
        assert losses == other_losses
        for key, value in weights.items():
            assert torch.equal(value, other_weights[key])
