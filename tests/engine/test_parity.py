"""Every stage gives the losses and weights of a plain PyTorch loop on the same global batch."""

import functools
from typing import Any

import pytest
import torch
from engine.models import MODELS, OPTIMIZERS, batch, build, plain
from engine.plain import transport_of
from plain_loop import follows_plain_loop
from pool import Pool

import zeroshard as zs

Case = tuple[str, str, int, float | None]  # model, optimizer, microbatches, bound on the gradients' norm
ROWS = {1: 8, 2: 8, 3: 12, 4: 8}  # of the global batch, by the number of ranks
STAGES = {1: (0, 3), 2: (0, 1, 2, 3), 3: (0, 1, 2, 3), 4: (1, 3)}  # by the number of ranks
LONG: Case = ("Plain", "adamw", 1, None)  # the case of ten steps; the others take six
BOTH = ("Tied", "Sometimes", "Twice", "CheckpointedReentrant")  # models whose gradients accumulate and are clipped
ONCE = tuple(name for name in MODELS if name not in ("Plain", *BOTH))
# Every model, optimizer and number of microbatches, clipped and not, on two ranks; of them on other numbers of ranks
# what the number may matter to.
CASES: dict[int, list[Case]] = {
    1: [
        LONG,
        ("Plain", "sgd", 2, None),
        ("Plain", "adagrad", 4, 0.5),
        *((name, "adamw", 2, 0.5) for name in BOTH),
        *((name, "adamw", 1, None) for name in ("TwoDtypes", "Tiny")),
    ],
    2: [
        LONG,
        ("Plain", "adamw", 4, 0.5),
        ("Plain", "sgd", 1, 0.5),
        ("Plain", "sgd", 2, None),
        ("Plain", "adagrad", 2, 0.5),
        ("Plain", "adagrad", 4, None),
        *((name, "adamw", 2, 0.5) for name in BOTH),
        *((name, "adamw", 1, None) for name in ONCE),
    ],
    3: [("Plain", "adamw", 2, 0.5), ("Sometimes", "sgd", 1, None)],
    4: [LONG, ("Plain", "sgd", 2, 0.5), ("Sometimes", "adamw", 2, 0.5), ("Tiny", "adamw", 1, None)],
}
cached_plain = functools.cache(plain)


def train(mesh: zs.Mesh, zero: int, case: Case) -> Any:
    """Training by `train_step`; an evaluation pass between steps. Losses [steps] of this rank and final weights."""
    name, optimizer, microbatches, clip = case
    model = build(name, seed=mesh.rank)  # other ranks start elsewhere, so rank 0's weights must win
    plan = zs.Plan(zero=zero, transport=transport_of(zero), microbatches=microbatches, clip_norm=clip)
    engine = zs.Engine(model, lambda ps: OPTIMIZERS[optimizer]([p for p in ps if p.requires_grad]), plan, mesh=mesh)
    losses = []
    for step in range(steps_of(case)):
        inputs = batch(step, mesh.rank, mesh.ranks, ROWS[mesh.ranks]), step
        losses.append(engine.train_step(inputs).loss.item())
        if step % 5 == 1:
            with torch.no_grad():
                engine(*inputs)
    return losses, engine.state_dict()


def steps_of(case: Case) -> int:
    """How many steps a case takes."""
    return 10 if case == LONG else 6


@pytest.mark.parametrize(
    "ranks, case", [(ranks, case) for ranks, cases in CASES.items() for case in cases],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)  # fmt: skip
def test_follows_a_plain_loop(pool: Pool, ranks: int, case: Case) -> None:
    name, optimizer, _, clip = case
    wanted = cached_plain(name, optimizer, (ROWS[ranks],) * steps_of(case), clip)
    runs = {zero: pool.run(train, ranks, zero, case) for zero in STAGES[ranks]}
    for answers in runs.values():
        follows_plain_loop(answers, wanted)
    for zero, answers in runs.items():
        if zero > 1 and 1 in runs:
            _assert_same_bits(answers, runs[1])


def _assert_same_bits(run: list[Any], other: list[Any]) -> None:
    for (losses, weights), (other_losses, other_weights) in zip(run, other, strict=True):
        assert losses == other_losses
        for key, value in weights.items():
            assert torch.equal(value, other_weights[key])
