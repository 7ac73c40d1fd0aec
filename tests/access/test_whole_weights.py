"""`engine.weights()`: whole tensors in one order on all ranks, under every plan, one at a time in memory."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build
from engine.test_buffers import Normed
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.access.whole_weights import packed
from zeroshard.checkpoint import Slot
from zeroshard.errors import CommError, ConfigError, PlanError

STAGES = {"pipeline_parallel": 2, "pipeline_parallel.balance": "parameters", "microbatches": 2}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"zero {stage}": ("Tied", {"zero": stage}) for stage in range(4)},
    "zero 2, bf16": ("Tied", {"zero": 2, "precision": "bf16"}),
    "zero 3, bf16, frozen": ("Frozen", {"zero": 3, "precision": "bf16"}),
    "offload": ("Tied", {"zero": 3, "offload": "optimizer,parameters", "precision": "bf16"}),
    "rounded moments": ("Tied", {"zero": 1, "offload": "optimizer", "offload.moments": "8bit"}),
    "disk": (
        "Tied",
        {"zero": 3, "offload": "optimizer,parameters", "offload.disk": "in the test's folder", "precision": "bf16"},
    ),
    "stages": ("TiedFive", {**STAGES, "zero": 0}),
    "chunks of stages": (
        "TiedFive",
        {**STAGES, "pipeline_parallel.virtual_stages": 2, "pipeline_parallel.schedule": "interleaved", "zero": 0},
    ),
    "tensor": ("AttendingTied", {"tensor_parallel": 2, "zero": 0}),
    "experts": ("MixingTied", {"expert_parallel": 2, "zero": 3}),
}


def make(mesh: zs.Mesh, name: str, plan: dict[str, Any]) -> zs.Engine:
    example = (batch(0, 0, 1, 2), 0) if "pipeline_parallel" in plan else None
    return zs.Engine(build(name), OPTIMIZERS["adamw"], zs.Plan.from_dict(plan), mesh=mesh, example=example)


def take(mesh: zs.Mesh, name: str, plan: dict[str, Any], folder: str) -> Any:
    """The state dict after a step; and the weights taken out in three ways."""
    if "offload.disk" in plan:
        plan = {**plan, "offload.disk": folder}
    engine = make(mesh, name, plan)
    engine.train_step((batch(0, engine.data_rank, engine.data_ranks), 0))
    alone, masters = list(engine.weights()), dict(engine.weights(dtype=torch.float32, names="m.{}".format))
    buckets = [bucket.tensors for bucket in engine.weights(buckets="2KB")]
    engine.train_step((batch(1, engine.data_rank, engine.data_ranks), 1))  # the run goes on
    again = make(mesh, name, plan)
    again.train_step((batch(0, engine.data_rank, engine.data_ranks), 0))
    return again.state_dict(), alone, masters, buckets


@pytest.mark.parametrize("plan", PLANS)
def test_whole_tensors_under_every_plan(pool: Pool, plan: str, tmp_path: Path) -> None:
    answers = pool.run(take, 2, *PLANS[plan], str(tmp_path))
    model = build(PLANS[plan][0])
    order = [name for name, _ in model.named_parameters()]
    for state, alone, masters, buckets in answers:
        assert [name for name, _ in alone] == [name for name, _ in answers[0][1]]
        assert {name for name, _ in alone} == set(order)  # tied ones once
        for name, tensor in alone:
            assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name
            assert masters[f"m.{name}"].dtype == torch.float32
            assert torch.equal(masters[f"m.{name}"].to(state[name].dtype), state[name])
            assert torch.equal(masters[f"m.{name}"], answers[0][2][f"m.{name}"])
        packed_ones = {name: tensor for tensors in buckets for name, tensor in tensors.items()}
        assert list(packed_ones) == [name for name, _ in alone]
        assert all(torch.equal(packed_ones[name], tensor) for name, tensor in alone)
        assert len(buckets) < len(alone)
    if "bf16" in PLANS[plan][1].values():
        assert any(not torch.equal(m, m.bfloat16().float()) for m in answers[0][2].values())  # not rounded before


def take_buffers(mesh: zs.Mesh, stages: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(), Normed())
    plan: dict[str, Any] = {**STAGES, "zero": 0} if stages == 2 else {"zero": 3}
    x = torch.randn(4, 6)
    engine = zs.Engine(
        model, OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh, loss=lambda out, batch: out.square().mean(),
        example=x,
    )  # fmt: skip
    engine.train_step(x)
    return dict(engine.weights()), engine.state_dict()


@pytest.mark.parametrize("stages", [1, 2])
def test_buffers_of_all_stages(pool: Pool, stages: int) -> None:
    answers = pool.run(take_buffers, 2, stages)
    for weights, _ in answers:
        assert weights.keys() == answers[0][1].keys() and "1.late" in weights
        assert all(torch.equal(weights[name], values) for name, values in answers[0][1].items())


class Growth:
    """Bytes of the storages of all tensors in this process above those at the start.

    The storages of the start are kept, else those of earlier tests, which threads of gloo may hold, could end meanwhile
    and lower the count. Such a thread may also hold the last operand of each of a group's two queues for a moment.
    """

    PATIENCE = 10.0  # seconds

    def __init__(self) -> None:
        gc.collect()
        self._kept = self._storages()
        self._sizes = {key: storage.nbytes() for key, storage in self._kept.items()}

    def now(self, limit: float) -> int:
        """The bytes, as soon as they are below a limit, or after all patience."""
        deadline = time.monotonic() + self.PATIENCE
        while True:
            storages = self._storages()
            grown = sum(storage.nbytes() - self._sizes.get(key, 0) for key, storage in storages.items())
            if grown < limit or time.monotonic() > deadline:
                return grown
            del storages
            time.sleep(0.01)

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        tensors = (each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))
        storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
        return {storage._cdata: storage for storage in storages}


SIZE = 64 * 64 * 4  # bytes of a weight


def largest_in_memory(mesh: zs.Mesh, plan: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """Bytes above those of the engine, seen from outside, in a loop over tensors and in one over buckets."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(6)])
    engine = zs.Engine(model, OPTIMIZERS["sgd"], zs.Plan.from_dict(plan), mesh=mesh)
    tensors, buckets, growth = [], [], Growth()
    for _, tensor in engine.weights():
        tensors.append(growth.now(2 * SIZE))
        del tensor
    for bucket in engine.weights(buckets=2 * SIZE):
        buckets.append(growth.now(3 * SIZE))
        del bucket
    gc.collect()
    return tensors, buckets, growth.now(SIZE)


@pytest.mark.parametrize("plan", [{"zero": 1}, {"zero": 3}])
def test_one_tensor_is_in_memory(pool: Pool, plan: dict[str, Any]) -> None:
    for tensors, buckets, after in pool.run(largest_in_memory, 2, plan):
        assert len(tensors) == 6 and len(buckets) == 3
        assert all(SIZE <= held < 2 * SIZE for held in tensors)
        assert all(2 * SIZE <= held < 3 * SIZE for held in buckets)
        assert after < SIZE


def leave_early(mesh: zs.Mesh, taken: list[int]) -> Any:
    """Leave the loop after so many tensors, and train on."""
    engine = make(mesh, "Plain", {"zero": 3})
    try:
        for number, _ in enumerate(engine.weights(), 1):
            if number == taken[mesh.rank]:
                break
        engine.train_step((batch(0, mesh.rank, mesh.ranks), 0))
        return len(list(engine.weights()))
    except CommError as error:
        return str(error)


def test_all_ranks_may_leave_at_the_same_tensor(pool: Pool) -> None:
    assert pool.run(leave_early, 2, [2, 2]) == [len(list(build("Plain").parameters()))] * 2


def test_a_rank_that_leaves_alone_stops_all_ranks(pool: Pool) -> None:
    first, second = pool.run(leave_early, 2, [2, 5])
    pool.stop()  # the operations of the group have no partners
    assert "whole weights, a tensor at a time" in first
    assert "A loop over engine.weights() ends at the same tensor on all ranks" in second


def start_again(mesh: zs.Mesh) -> str:
    """Rank 1 leaves the loop and begins another."""
    engine = make(mesh, "Plain", {"zero": 1})
    taken, whole = engine.weights(), engine.weights()
    next(taken)
    try:
        next(whole if mesh.rank == 1 else taken)
    except CommError as error:
        return str(error)
    return ""


def test_ranks_at_different_tensors(pool: Pool) -> None:
    first, second = pool.run(start_again, 2)
    assert "Rank 0 takes out tensor 1" in first and "rank 1 tensor 0" in first
    assert "Rank 1 takes out tensor 0" in second and "All ranks must walk all tensors in the same order" in second


def test_a_step_inside_of_the_loop_and_other_wrong_uses() -> None:
    engine = make(zs.Mesh(), "Plain", {})
    taken = engine.weights()
    next(taken)
    engine.train_step((batch(0, 0, 1), 0))
    with pytest.raises(PlanError, match="Whole weights of step 0 were asked for after step 1"):
        next(taken)
    with engine.gathered(), pytest.raises(PlanError, match=r"engine.weights\(\) was called inside"):
        engine.weights()
    with pytest.raises(ConfigError, match="names is 'vllm'; pass 'transformers', a function"):
        engine.weights(names="vllm")
    with pytest.raises(ConfigError, match="takes a model of transformers, and this is a Plain"):
        engine.weights(names="transformers")
    with pytest.raises(ConfigError, match="both get the name 'x'"):
        engine.weights(names=lambda name: "x")
    with pytest.raises(ConfigError, match="buckets is 'big'"):
        engine.weights(buckets="big")


def test_copies_do_not_follow_the_run() -> None:
    engine = make(zs.Mesh(), "Plain", {})
    weights = dict(engine.weights())
    engine.train_step((batch(0, 0, 1), 0))
    assert not torch.equal(weights["head.weight"], engine.state_dict()["head.weight"])


def test_a_bucket_has_one_dtype_and_a_large_tensor_its_own() -> None:
    def sizes(most: int) -> list[int]:
        slots = [Slot("a", torch.float32, (4,)), Slot("b", torch.float32, (2,)), Slot("c", torch.int64, (1,))]
        found = []
        while slots:
            found.append(len(packed(slots, most)))
            slots = slots[found[-1] :]
        return found

    assert sizes(100) == [2, 1] and sizes(20) == [1, 1, 1] and sizes(1) == [1, 1, 1] and sizes(24) == [2, 1]
