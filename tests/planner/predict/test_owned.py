"""Predictions of optimizers over whole tensors, whose ranks are not alike: the fullest rank, to the byte."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planner import rehearsed
from planner.rehearsed import peak_of, punctual, wire_of
from pool import Pool
from selection import by_default
from torch.profiler import ProfilerActivity, profile

import zeroshard as zs
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.optim.host.states import code_map
from zeroshard.optim.slices import owners
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask, rehearse
from zeroshard.planner.predict.states import least_bytes, sizes_of
from zeroshard.train.sizes import GPTConfig

SHAPE = GPTConfig(vocabulary=340, context=16, width=32, heads=2, layers=4)  # the embedding is 0.4 of the weights
WORDY = replace(SHAPE, vocabulary=2000)  # more than the fullest of three ranks is to have
ROWS = 6
STAGES = (1, 2, 3)
STATES = ("parameters", "gradients", "master weights", "optimizer states")
LATE = 0.005  # how far a peak may be off: a thread of gloo may hold an operand of a few KiB a little after its end
HELD = 0.25  # with split layers, where there are many collectives
CASES = [*((name, ranks) for name in ("Adafactor", "Shampoo") for ranks in (2, 3)), ("Adam8bit", 3), ("Muon", 2)]
CASES.append(("a user's", 2))
SHOWN = {("Adafactor", 3): 2, ("Adam8bit", 3): 3, ("Muon", 2): 1}  # in a stage


class Lamb(torch.optim.Optimizer):
    """A user's optimizer whose states alone do not show that it needs whole tensors."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(group["lr"] * moment * p.norm() / moment.norm().clamp_(min=1e-8))


OPTIMIZERS: dict[str, Any] = {
    "Adafactor": partial(zs.optim.Adafactor, lr=1e-3),
    "LAMB": zs.optim.LAMB,
    "SM3": zs.optim.SM3,
    "Adam8bit": partial(zs.optim.Adam8bit, min_8bit_size=512),
    "Muon": zs.optim.Muon,
    "Shampoo": zs.optim.Shampoo,
    "a user's": Lamb,
}


gpt = partial(rehearsed.gpt, SHAPE)


def task(name: str, shape: GPTConfig = SHAPE) -> TrainingTask:
    build = partial(rehearsed.gpt, shape), partial(rehearsed.tokens, shape=shape)
    return TrainingTask(*build, OPTIMIZERS[name], ROWS, shape.context)


def machines_of(ranks: int) -> Machines:
    device = Device("a CPU", "cpu", 2**30, {"fp32": 1e10}, 1e10, 1e-6)
    return Machines(device, ranks, ranks, Link(1e9), Link(1e9))


def plan_of(zero: Any, **more: Any) -> zs.Plan:
    return zs.Plan(zero=zero, transport="network", **more)


def trained(mesh: zs.Mesh, name: str, plans: list[zs.Plan], shape: GPTConfig = SHAPE) -> list[dict[str, Any]]:
    """Of three steps under each plan: the table of memory, the wire, and the peak of all that torch allocated."""
    found = []
    for signed in (True, False):
        code_map(signed)  # tables that a process makes once
    for plan in plans:
        if plan.tensor.splits:  # the model is tried in small once, which takes memory of its own
            zs.Engine(rehearsed.gpt(shape), OPTIMIZERS[name], plan, mesh=mesh)
        with punctual(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            torch.manual_seed(0)  # ranks that split layers have one batch
            batch = rehearsed.tokens(ROWS // (mesh.ranks // plan.tensor.ranks), shape=shape)
            engine = zs.Engine(rehearsed.gpt(shape), OPTIMIZERS[name], plan, mesh=mesh)
            for _ in range(3):
                engine.train_step(batch)
            memory, wire = engine.memory().as_dicts(), wire_of(engine)
        states = {row["category"]: row["measured_bytes"] for row in memory if row["tier"] == "device"}
        found.append({"states": states, "wire": wire, "peak": peak_of(watched), "owners": engine.owners})
    return found


def name_of(case: tuple[Any, ...]) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", by_default(CASES, *SHOWN), ids=name_of)
def test_the_fullest_rank_to_the_byte(case: tuple[str, int], pool: Pool, whole: bool) -> None:
    name, ranks = case
    job, machines = task(name), machines_of(ranks)
    stages = STAGES if whole or case not in SHOWN else (SHOWN[case],)
    runs = pool.run(trained, ranks, name, list(map(plan_of, stages)))
    for number, zero in enumerate(stages):
        real = [of_rank[number] for of_rank in runs]
        found = predict(job, plan_of(zero), machines, ROWS // ranks)
        fullest = real[found.rank]
        assert found.owners == fullest["owners"] and "one owner" in found.owners
        for category in STATES:
            assert found.memory[category] == fullest["states"][category], category
        assert {p: n for p, n in found.wire_bytes.items() if n and p != "agreement"} == {
            p: w[1] for p, w in fullest["wire"].items() if w[1] and p != "agreement"
        }
        assert found.peak_bytes == pytest.approx(max(each["peak"] for each in real), rel=LATE)


def cut_and_trained(mesh: zs.Mesh, name: str, plans: list[zs.Plan]) -> list[dict[str, Any]]:
    with patch.object(owners, "LEAST", 2**12):
        return trained(mesh, name, plans, WORDY)


@pytest.mark.parametrize(
    "case", by_default([("Adafactor", 3, 2), ("SM3", 2, 3), ("LAMB", 3, 1)], ("Adafactor", 3, 2)), ids=name_of
)
def test_rows_of_a_large_matrix_to_the_byte(case: tuple[str, int, int], pool: Pool) -> None:
    name, ranks, zero = case
    real = [of_rank[0] for of_rank in pool.run(cut_and_trained, ranks, name, [plan_of(zero)])]
    with patch.object(owners, "LEAST", 2**12):
        found = predict(task(name, WORDY), plan_of(zero), machines_of(ranks), ROWS // ranks)
    fullest = real[found.rank]
    assert found.owners == fullest["owners"] and "larger matrices" in found.owners
    assert {category: found.memory[category] for category in STATES} == {c: fullest["states"][c] for c in STATES}
    assert found.wire_bytes["ask for rows"] == fullest["wire"]["ask for rows"][1] > 0
    assert {p: n for p, n in found.wire_bytes.items() if n and p != "agreement"} == {
        p: w[1] for p, w in fullest["wire"].items() if w[1] and p != "agreement"
    }
    assert found.peak_bytes == pytest.approx(max(each["peak"] for each in real), rel=LATE)


SPLIT = [("Adafactor", 0, 2), ("Muon", 2, 4), ("Adam8bit", 1, 2)]


@pytest.mark.parametrize("case", by_default(SPLIT, ("Muon", 2, 4)), ids=name_of)
def test_owners_among_ranks_that_split_layers_to_the_byte(case: tuple[str, int, int], pool: Pool) -> None:
    name, zero, ranks = case
    plan, machines = plan_of(zero, tensor_parallel=2), machines_of(ranks)
    real = [of_rank[0] for of_rank in pool.run(trained, ranks, name, [plan])]
    found = predict(task(name), plan, machines, ROWS // (ranks // 2))
    fullest = real[found.rank]
    assert found.owners == fullest["owners"] and "put together" in found.owners
    assert {category: found.memory[category] for category in STATES} == {c: fullest["states"][c] for c in STATES}
    assert {p: n for p, n in found.wire_bytes.items() if n and p != "agreement"} == {
        p: w[1] for p, w in fullest["wire"].items() if w[1] and p != "agreement"
    }
    assert found.peak_bytes == pytest.approx(max(each["peak"] for each in real), rel=HELD)


MANY = [("Adafactor", 2), ("Shampoo", 1)]


@pytest.mark.whole
@pytest.mark.parametrize("case", MANY, ids=name_of)
def test_no_rank_of_many_is_above_the_prediction(case: tuple[str, int]) -> None:
    """Of more than three ranks, some are not rehearsed."""
    name, zero = case
    found = predict(task(name), plan_of(zero), machines_of(5), 1)
    every = [rehearse(task(name), plan_of(zero), rank, 5, 1, machines_of(5)) for rank in range(5)]
    assert found.peak_bytes == max(one.peak_bytes for one in every)
    kept = [one.sizes[0] for one in every]
    assert sum(kept) <= found.host_bytes < 1.1 * sum(kept)


def test_rows_and_columns_to_the_byte_on_64_ranks() -> None:
    """ZeRO-2 with Adafactor: 4 bytes for each row and column of a matrix, and for each element of a vector."""
    plan, job = plan_of(2), task("Adafactor")
    by_hand = sum(4 * (sum(p.shape) if p.dim() == 2 else p.numel()) for p in gpt().parameters())
    sizes = sizes_of(job)
    assert sizes.state_bytes * sizes.trainable == by_hand
    with_states, without = (least_bytes(replace(sizes, state_bytes=n), plan, 64) for n in (sizes.state_bytes, 0))
    assert with_states - without in (by_hand // 64, by_hand // 64 + 1)
    found = [rehearse(job, plan, rank, 64, 1).states["optimizer states"] for rank in (0, 1, 63)]
    wide = 4 * SHAPE.width  # more ranks than parameters: one has the embedding, one a matrix of a feed-forward layer
    assert found == [4 * (SHAPE.vocabulary + SHAPE.width), 4 * (wide + SHAPE.width), 0]


@pytest.mark.whole
def test_stages_have_fullest_ranks_of_their_own() -> None:
    """A pipeline of two stages with two owners each: the prediction is of the fullest of all four ranks."""
    plan = plan_of(2, pipeline_parallel=2, microbatches=2)
    job = replace(task("Adafactor"), build=partial(rehearsed.gpt, replace(SHAPE, layers=2)))
    found = predict(job, plan, machines_of(4), 2)
    every = [rehearse(job, found.plan, rank, 4, 2) for rank in range(4)]
    assert found.peak_bytes == max(one.peak_bytes for one in every)
    assert found.memory == max(every, key=lambda one: one.peak_bytes).memory
