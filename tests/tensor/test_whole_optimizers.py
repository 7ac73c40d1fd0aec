"""Optimizers over whole tensors where layers are split: each matrix is updated whole by one of the ranks that split it.

Models have few key heads on several ranks (llama-1), fused and transposed features and a tied vocabulary (gpt2).
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.faults import Tensors, content
from pool import Pool
from selection import by_default
from split_models import training
from split_models.training import Run, Seen, arrays, build, make_engine, take_steps

import zeroshard as zs
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

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
    return training.plain(name, parts, STEPS, training.POSITIONS, clip, OPTIMIZERS[optimizer])


def engine_of(mesh: zs.Mesh, optimizer: str, name: str, plan: dict[str, Any]) -> zs.Engine:
    return make_engine(mesh, Run(name, tuple(plan.items())), mesh.rank, OPTIMIZERS[optimizer])


def go_on(engine: zs.Engine, name: str, parts: int, steps: int) -> list[float]:
    seen = Seen()
    take_steps(engine, Run(name, parts=parts), seen, steps)
    return seen.losses


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


def compare(case: Case, answers: list[Seen], wanted: Seen, tolerance: float, losses: float = 1e-5) -> None:
    data = {mine.data_rank: mine.losses for mine in answers if not np.isnan(mine.losses).any()}
    np.testing.assert_allclose(np.mean(list(data.values()), 0), wanted.losses, losses, err_msg=f"losses of {case}")
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


@pytest.mark.parametrize("optimizer", by_default(OPTIMIZERS, "Adafactor", "AdamW8bit", "LAMB", "Muon"))
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


LOWER: list[Case] = [
    ("Adafactor", "llama-1", {**TENSOR, "zero": 1, "offload": "optimizer"}),
    ("Muon", "gpt", {**TENSOR, "zero": 3, "offload": "optimizer,parameters", "transport": "network"}),
    ("Shampoo", "gpt2", {**TENSOR, "zero": 2, "offload": "optimizer", "offload.fraction": 0.5, "clip_norm": 0.5}),
]


@pytest.mark.whole
def test_wholes_in_the_memory_of_the_host(pool: Pool) -> None:
    check_all(pool, 4, LOWER, 4)


def test_data_ranks_slice_parts_of_the_same_matrices(pool: Pool, whole: bool) -> None:
    check_all(pool, 4, FOUR if whole else FOUR[1:2], 4)


NARROW: list[Case] = [
    (optimizer, name, {**TENSOR, "zero": zero, "precision": precision})
    for optimizer, name, precision in (("Adafactor", "llama-1", "bf16"), ("Muon", "gpt", "fp16"))
    for zero in (0, 2, 3)
]


def test_master_weights_of_narrow_parameters(pool: Pool, whole: bool) -> None:
    """All stages are the same but for sums in other orders, and near a loop in fp32."""
    cases = NARROW if whole else NARROW[:2]
    everyone = pool.run(trained, 4, cases, 2)
    for number, (optimizer, name, _) in enumerate(cases):
        rows = [answers[number] for answers in everyone]
        assert [differing for _, differing, _ in rows] == [[]] * 4
        first = everyone[0][number - number % 3][0].weights
        assert all(np.allclose(rows[0][0].weights[key], value, 1e-4, 1e-6) for key, value in first.items()), number
        compare(cases[number], [seen for seen, _, _ in rows], plain(optimizer, name, 2), 5e-3, 2e-2)


STAGED = {"pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.balance": "parameters"}
PIPELINES: list[Case] = [
    ("Adafactor", "llama-1", {**TENSOR, **STAGED, "zero": 1}),
    ("Muon", "gpt2", {**TENSOR, **STAGED, "pipeline_parallel.schedule": "gpipe", "zero": 0, "clip_norm": 0.5}),
    ("LAMB", "llama-tied", {**TENSOR, **STAGED, "zero": 0, "pipeline_parallel.schedule": "zb-h1"}),
]


def test_stages(pool: Pool, whole: bool) -> None:
    check_all(pool, 4, PIPELINES if whole else PIPELINES[:1], 2)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"zero": 0}),
    "tensor 2": (2, {**TENSOR, "zero": 0}),
    "data 2, zero 3": (2, {"zero": 3}),
    "tensor 4": (4, {"tensor_parallel": 4, "zero": 1, "offload": "optimizer"}),
    "tensor 2, data 2, zero 3": (4, {**TENSOR, "zero": 3, "transport": "network"}),
    "tensor 2, data 2, zero 0": (4, {**TENSOR, "zero": 0}),
    "tensor 2, stages 2": (4, {**TENSOR, **STAGED, "zero": 1}),
}
CHECKPOINTED = {"Adafactor": "llama-1", "AdamW8bit": "gpt", "Shampoo": "gpt2"}
SHOWN = ["one rank", "tensor 4", "tensor 2, data 2, zero 3"]


def handed_on(mesh: zs.Mesh, optimizers: list[str], plan: str, source: str, folder: str) -> list[list[float]]:
    """For each optimizer: load a checkpoint, save it again, and the loss of the next step."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        for optimizer in optimizers:
            name = CHECKPOINTED[optimizer]
            engine = engine_of(mesh, optimizer, name, PLANS[plan][1])
            if source:
                engine.load(f"{folder}/{optimizer} {source}")
            else:
                go_on(engine, name, 2, STEPS)
            engine.save(f"{folder}/{optimizer} {plan}", wait=True)
            found.append(go_on(engine, name, 2, 1))
    return found


def comparable(path: Path) -> Tensors:
    """The tensors of a checkpoint but for random numbers, which belong to a rank."""
    return {name: parts[:1] for name, parts in content(path).items() if not name.startswith("rng:")}


def test_checkpoints_go_through_all_plans_unchanged(pool: Pool, tmp_path: Path, whole: bool) -> None:
    """Each plan loads what the one before saved; the first is one rank, which steps over whole tensors anyway."""
    losses, source = [], ""
    optimizers = list(CHECKPOINTED) if whole else ["Adafactor", "AdamW8bit"]
    for plan in PLANS if whole else SHOWN:
        everyone = pool.run(handed_on, PLANS[plan][0], optimizers, plan, source, str(tmp_path))
        losses.append(np.mean(everyone, 0))
        for optimizer in optimizers if source else ():
            one, other = (comparable(tmp_path / f"{optimizer} {name}") for name in (source, plan))
            assert one == other, (optimizer, plan)
        source = plan
    for mine in losses:
        np.testing.assert_allclose(mine, losses[0], 1e-5)


def refusal(mesh: zs.Mesh) -> str:
    model = GPT(GPTConfig(vocabulary=5, context=8, width=32, heads=4, layers=1))
    with pytest.raises(zs.errors.PlanError) as error:
        zs.Engine(model, OPTIMIZERS["Adafactor"], zs.Plan(tensor_parallel=4), mesh=mesh)  # type: ignore[arg-type]
    return str(error.value)


def test_a_matrix_of_which_a_rank_has_nothing_is_refused(pool: Pool) -> None:
    said = pool.run(refusal, 4)[0]
    assert "shape (5, 32)" in said and "some rank has no element" in said and "Use a smaller tensor_parallel" in said


def test_what_is_said_of_owners(pool: Pool) -> None:
    said = check_all(pool, 2, [("Adafactor", "gpt", {**TENSOR, "zero": 0})], 1)[0]
    assert "parameters that 2 ranks split is put together by one of them" in said and "Adafactor" in said


def with_the_muon_of_torch(mesh: zs.Mesh, plan: dict[str, Any]) -> dict[str, Any]:
    """Weights after some steps over the matrices, while all other parameters are frozen."""
    model = build("gpt")
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)
    engine = zs.Engine(model, optimizer, zs.Plan.from_dict(plan), mesh=mesh)
    go_on(engine, "gpt", 2, STEPS)
    return arrays(engine.state_dict())


def test_the_muon_of_torch(pool: Pool) -> None:
    """It orthogonalises in bfloat16, where last places of gradients show; parts of a matrix would end up elsewhere."""
    expected, before = pool.run(with_the_muon_of_torch, 1, {"zero": 0})[0], arrays(build("gpt").state_dict())
    for weights in pool.run(with_the_muon_of_torch, 4, {**TENSOR, "zero": 2}):
        for key, value in expected.items():
            moved = np.linalg.norm(value - before[key])
            assert np.linalg.norm(weights[key] - value) <= 0.02 * moved, key
