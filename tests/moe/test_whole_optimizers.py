"""Optimizers over whole tensors where experts lie on several ranks: each expert's own matrices are whole."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor

import zeroshard as zs
from moe.mixed import EXPERTS, batch, build, take
from zeroshard.errors import PlanError
from zeroshard.step.context import Within

STEPS = 3
MODULES, STACKED = {"kind": "starved", "modules": True}, {"kind": "learned"}
OPTIMIZERS: dict[str, Any] = {
    "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Adafactor": partial(zs.optim.Adafactor, lr=1e-2),
    "codes": partial(zs.optim.AdamW8bit, lr=1e-2, min_8bit_size=16, block_size=16),
    "Muon": partial(zs.optim.Muon, lr=1e-2),
    "bf16": partial(zs.optim.SM3, lr=0.1, momentum=0.9, momentum_dtype=torch.bfloat16),
}
CASES = [
    ("torch's Adafactor", MODULES, None, 2),
    ("Muon", MODULES, None, 1),
    ("Adafactor", STACKED, 1, 3),
    ("codes", STACKED, 1, 2),
    ("Muon", STACKED, 1, 0),
]
SHOWN = [CASES[n] for n in (1, 2, 3)]


def optimizer_of(name: str, batch_dims: int | None, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer; tensors [E, ...] are in a group of their own, where `batch_dims` says what counts a stack."""
    every = list(parameters)
    apart = [p for p in every if p.shape[0] == EXPERTS and batch_dims is not None]
    groups: list[dict[str, Any]] = [{"params": [p for p in every if all(p is not other for other in apart)]}]
    groups += [{"params": apart, "batch_dims": batch_dims}] if apart else []
    made: torch.optim.Optimizer = OPTIMIZERS[name](groups)
    return made


def engine_of(mesh: zs.Mesh, name: str, model: Any, batch_dims: int | None, plan: Mapping[str, Any]) -> zs.Engine:
    """An engine with that optimizer."""
    make = partial(optimizer_of, name, batch_dims)
    return zs.Engine(build(model), make, zs.Plan.from_dict(plan), mesh=mesh, loss=lambda output, _: output)


def trained(mesh: zs.Mesh, cases: list[Any]) -> list[tuple[dict[str, Tensor], list[Any]]]:
    """Weights of each case, and rows in which formula and count differ."""
    found = []
    for name, model, batch_dims, zero in cases:
        engine = engine_of(mesh, name, model, batch_dims, {"zero": zero, "expert_parallel": 2})
        take(engine, 0, STEPS)
        engine.check_replicas()
        rows = [row for row in engine.memory() if row.planned_bytes is not None]
        found.append(
            (engine.state_dict(), [row for row in rows if row.planned_bytes + row.padding_bytes != row.measured_bytes])
        )
    return found


def plain(name: str, model: Any, batch_dims: int | None) -> dict[str, Tensor]:
    """Weights of a loop in one process, on the batches of two ranks."""
    net = build(model)
    optimizer = optimizer_of(name, batch_dims, net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            with Within(penalty_weight=0.5):
                (net(batch(step, rank)) / 2).backward()
        optimizer.step()
    return net.state_dict()


def test_each_expert_is_updated_as_in_one_process(pool: Pool, whole: bool) -> None:
    cases = CASES if whole else SHOWN
    for answers in pool.run(trained, 2, cases):
        for (name, model, batch_dims, zero), (weights, differing) in zip(cases, answers, strict=True):
            assert differing == [], (name, zero)
            for key, value in plain(name, model, batch_dims).items():
                torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=2e-6, msg=f"{name} {zero} {key}")


def refused(mesh: zs.Mesh) -> list[str]:
    """Why stacks cannot be shared out: as one matrix of all experts; and vectors as one matrix."""
    found = []
    for batch_dims in (0, None):
        with pytest.raises(PlanError) as error:
            engine_of(mesh, "Muon", STACKED, batch_dims, {"expert_parallel": 2})
        found.append(str(error.value))
    return found


def test_a_matrix_of_several_experts_is_refused_with_the_way_out(pool: Pool) -> None:
    for first, second in pool.run(refused, 2):
        assert "splits 8 parameters inside of layers over the axis 'experts'" in first
        assert "splits 4 parameters" in second and "the first of shape (6, 12)" in second
        assert "a group of their own with batch_dims=1" in first and "batch_dims=1" in second


SAVED: dict[str, Any] = {"codes": STACKED, "bf16": STACKED, "Adafactor": MODULES}


def started(mesh: zs.Mesh, name: str, zero: int, experts: int) -> zs.Engine:
    """An engine of the model that this optimizer is tried with."""
    batch_dims = None if SAVED[name] is MODULES else 1
    return engine_of(mesh, name, SAVED[name], batch_dims, {"zero": zero, "expert_parallel": experts})


def saved(mesh: zs.Mesh, name: str, folder: str) -> dict[str, Tensor]:
    """Save after some steps; weights after two more."""
    engine = started(mesh, name, 2, 2)
    take(engine, 0, STEPS)
    engine.save(folder, wait=True)
    take(engine, STEPS, STEPS + 2)
    return engine.state_dict()


def gone_on(mesh: zs.Mesh, name: str, experts: int, folder: str) -> dict[str, Tensor]:
    """Weights after two more steps."""
    engine = started(mesh, name, 1, experts)
    engine.load(folder)
    take(engine, STEPS, STEPS + 2)
    return engine.state_dict()


@pytest.mark.parametrize("name", by_default(SAVED, "codes"))
def test_states_load_under_other_expert_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    wanted = pool.run(saved, 2, name, str(tmp_path / "a"))[0]
    for experts, bound in ((2, 0.0), (1, 2e-6)):
        for weights in pool.run(gone_on, 2, name, experts, str(tmp_path / "a")):
            for key, value in wanted.items():
                torch.testing.assert_close(weights[key], value, rtol=0.0, atol=bound, msg=f"{experts} {key}")
