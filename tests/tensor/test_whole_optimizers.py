"""Optimizers over whole tensors where layers are split: each matrix is updated whole by one of the ranks that split it.

Models have few key heads on several ranks (llama-1), fused and transposed features and a tied vocabulary (gpt2).
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from split_models.training import ROWS, Seen, arrays, batch, between, build, loss_of
from torch import nn

import zeroshard as zs

pytest.importorskip("transformers")
STEPS = 3


def muon(parameters: Any) -> torch.optim.Optimizer:
    return zs.optim.Muon([{"params": list(parameters), "eps": 1e-3}], lr=1e-3)


# Some gradients are rounding of zero, such as those of biases of keys: without a large eps steps are made of them.
OPTIMIZERS: dict[str, Any] = {
    "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-3, eps=(1e-3, 1e-3)),
    "Adafactor": partial(zs.optim.Adafactor, lr=1e-3, eps=(1e-8, 1e-3)),
    "AdamW8bit": partial(zs.optim.AdamW8bit, lr=1e-4, eps=1e-3, min_8bit_size=256),
    "LAMB": partial(zs.optim.LAMB, lr=1e-3, eps=1e-3),
    "Muon": muon,
    "Shampoo": partial(zs.optim.Shampoo, lr=1e-3, eps=1e-2),
}
Case = tuple[str, str, dict[str, Any]]  # optimizer, model, plan


def plain(optimizer: str, name: str, parts: int, clip: float | None = None) -> Seen:
    model, seen = build(name), Seen()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        whole = batch(name, step, ROWS * parts)
        stepping.zero_grad()
        total = 0.0
        for part in range(parts):
            loss = loss_of(model(**between(whole, part * ROWS, (part + 1) * ROWS))) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        seen.losses.append(total)
        if clip is not None:
            seen.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepping.step()
    seen.weights = arrays(model.state_dict())
    return seen


def engine_of(mesh: zs.Mesh, optimizer: str, name: str, plan: dict[str, Any]) -> zs.Engine:
    made = zs.Plan.from_dict(plan)
    example = between(batch(name, 0, 1), 0, 1) if made.pipelined else None
    return zs.Engine(build(name, mesh.rank), OPTIMIZERS[optimizer], made, mesh=mesh, example=example)


def go_on(engine: zs.Engine, name: str, parts: int, steps: int) -> list[float]:
    losses = []
    for step in range(engine.steps, engine.steps + steps):
        own = ROWS * parts // engine.data_ranks
        first = engine.data_rank * own
        loss = engine.train_step(between(batch(name, step, ROWS * parts), first, first + own)).loss
        losses.append(float("nan") if loss is None else float(loss))
    return losses


def differences(engine: zs.Engine) -> list[Any]:
    rows = [
        *((r.purpose, r.planned_elements, r.measured_elements) for r in engine.traffic()),
        *(
            (r.category, r.planned_bytes and r.planned_bytes + r.padding_bytes, r.measured_bytes)
            for r in engine.memory()
        ),
    ]
    return [row for row in rows if row[1] is not None and row[1] != row[2]]


def trained(mesh: zs.Mesh, cases: list[Case], parts: int) -> list[tuple[Seen, list[Any], str]]:
    found = []
    for optimizer, name, plan in cases:
        engine = engine_of(mesh, optimizer, name, plan)
        seen = Seen(data_rank=engine.data_rank, losses=go_on(engine, name, parts, STEPS))
        engine.check_replicas()
        seen.weights = arrays(engine.state_dict())
        found.append((seen, differences(engine), engine.owners))
    return found


def compare(case: Case, answers: list[Seen], wanted: Seen, tolerance: float) -> None:
    data = {mine.data_rank: mine.losses for mine in answers}
    np.testing.assert_allclose(np.mean(list(data.values()), 0), wanted.losses, 1e-5, err_msg=f"losses of {case}")
    for mine in answers:
        for key, value in wanted.weights.items():
            np.testing.assert_allclose(mine.weights[key], value, tolerance, tolerance, err_msg=f"{key} of {case}")


def check_all(pool: Pool, ranks: int, cases: list[Case], parts: int, tolerance: float = 1e-6) -> list[str]:
    """Train all of them in one call of the pool, and compare each with its plain loop; what is said of owners."""
    everyone = pool.run(trained, ranks, cases, parts)
    for number, case in enumerate(cases):
        rows = [answers[number] for answers in everyone]
        assert [differing for _, differing, _ in rows] == [[]] * ranks, case
        optimizer, name, plan = case
        compare(case, [seen for seen, _, _ in rows], plain(optimizer, name, parts, plan.get("clip_norm")), tolerance)
    return [owners for _, _, owners in everyone[0]]


TENSOR = {"tensor_parallel": 2}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_train_as_one_process(pool: Pool, optimizer: str) -> None:
    check_all(pool, 2, [(optimizer, "gpt", {**TENSOR, "zero": zero}) for zero in (0, 1)], 1)


FOUR: list[Case] = [
    ("torch's Adafactor", "llama-1", {**TENSOR, "zero": 1}),
    ("Muon", "gpt2", {**TENSOR, "zero": 2, "clip_norm": 0.5}),
    ("Shampoo", "llama-1", {**TENSOR, "zero": 3, "transport": "network"}),
    ("LAMB", "gpt2", {**TENSOR, "zero": 3, "tensor_parallel.sequence": False}),
    ("Adafactor", "llama-1", {"tensor_parallel": 4, "zero": 0}),
    ("AdamW8bit", "llama-tied", {**TENSOR, "zero": 2, "microbatches": 2, "reduce_every": "microbatch"}),
    ("Adafactor", "llama-2", {**TENSOR, "zero": 0, "microbatches": 2}),
]


def test_data_ranks_slice_parts_of_the_same_matrices(pool: Pool) -> None:
    check_all(pool, 4, FOUR, 4)
