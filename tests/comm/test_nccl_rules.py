"""Plans under NCCL's rules, and every rule broken once."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine import golden
from nccl_rules import Group, Launch, Record, hangs, judge, recording
from pool import Pool
from selection import by_default
from verification.jobs import job

import zeroshard as zs
from zeroshard.comm import mesh as zeroshard_mesh
from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.mesh import MessageGroups
from zeroshard.errors import CommError, PlanError
from zeroshard.memory import HostMemory
from zeroshard.memory.ledger import Category, Ledger
from zeroshard.verification.observe import observe

SHARED = {"transport": "shared"}.items()  # which is for CPUs
ON_GPUS = [name for name, case in golden.CASES.items() if case[0] > 1 and not case[3].items() >= SHARED]
SHOWN = (
    *("2-ddp-tied-clipped", "2-zero1-once", "2-zero2-two-dtypes", "2-zero3", "2-zero3-checkpointed", "2-states-late"),
    *("2-streamed-bf16", "4-groups", "2-gpipe", "2-1f1b-fp16", "2-interleaved", "2-zb-h1", "2-pipedream", "2-2bw"),
    *("3-uneven", "4-gpipe-zero3", "4-interleaved", "2-tensor", "2-experts-zero3"),
    *("2-overlap", "2-muon"),
)


def trained(mesh: zs.Mesh, name: str, folder: str) -> Record:
    """Train under a plan for two steps, save, load and train on."""
    with recording(mesh) as (own, recorder), patch.object(golden, "STEPS", 2):
        golden.record(own, name, folder)
        return recorder.close()


@pytest.mark.parametrize("name", by_default(ON_GPUS, *SHOWN))
def test_nccl_would_take_every_call_of_a_plan(pool: Pool, tmp_path: Any, name: str) -> None:
    ranks, _, _, plan = golden.CASES[name]
    records = pool.run(trained, ranks, name, str(tmp_path))
    assert judge(records, zs.Plan.from_dict(plan).streams) == []


VERIFIED: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": 3, "microbatches": 2},
    "stages": {"pipeline_parallel": 2, "microbatches": 4},
}


def verified(mesh: zs.Mesh, plan: dict[str, Any]) -> Record:
    """What a rank of `zeroshard verify` calls."""
    with recording(mesh) as (own, recorder):
        observe(own, job("Five", own.ranks, **plan))
        return recorder.close()


@pytest.mark.parametrize("name", VERIFIED)
def test_nccl_would_take_every_call_of_a_verification(pool: Pool, name: str) -> None:
    assert judge(pool.run(verified, 2, VERIFIED[name])) == []


def counted(mesh: zs.Mesh, name: str, folder: str) -> tuple[int, int]:
    """The communicators of an engine by its own count, and by the record."""
    _, model, optimizer, options = golden.CASES[name]
    with recording(mesh) as (own, recorder):
        engine = golden._engine(own, model, optimizer, zs.Plan.from_dict(options), seed=0)
        golden._train(engine, range(2))
        engine.flush()
        return engine.communicators, len(recorder.record.communicators())


@pytest.mark.parametrize("name", ["2-zero3", "4-groups", "2-interleaved", "2-1f1b"])
def test_the_engine_counts_the_communicators_of_nccl(pool: Pool, tmp_path: Any, name: str) -> None:
    counts = pool.run(counted, golden.CASES[name][0], name, str(tmp_path))
    assert all(own == found > 1 for own, found in counts)


class Finalized:
    """Starts a collective when it is freed."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __del__(self) -> None:
        self.comm.all_reduce(torch.ones(4), Purpose.SETUP, "late").wait()


def short(mesh: zs.Mesh, comm: Comm) -> None:
    comm.all_reduce(torch.ones(4, dtype=torch.int16), Purpose.SETUP, "short").wait()


def add_bools(mesh: zs.Mesh, comm: Comm) -> None:
    comm.all_reduce(torch.ones(4, dtype=torch.uint8).view(torch.bool), Purpose.SETUP, "bools", maximum=False)


def scattered(mesh: zs.Mesh, comm: Comm) -> None:
    comm.send(torch.ones(4, 4).t()[:2], 1 - mesh.rank, Purpose.SETUP, "scattered")


def from_host_memory(mesh: zs.Mesh, comm: Comm) -> None:
    slab = HostMemory(Ledger(), torch.device("cpu")).slab(8, torch.float32, Category.OPTIMIZER_STATES, "slab")
    comm.broadcast(slab[2:4], "slab")


def misplaced(mesh: zs.Mesh, comm: Comm) -> None:
    full = torch.zeros(8)
    dist.all_gather_single(full, full[4 - 4 * mesh.rank :][:4], group=mesh.gathers, async_op=True).wait()


def into_itself(mesh: zs.Mesh, comm: Comm) -> None:
    tensor = torch.zeros(8)
    dist.all_to_all_single(tensor, tensor, None, None, group=mesh.gathers, async_op=True).wait()


def by_two_threads(mesh: zs.Mesh, comm: Comm) -> None:
    def add() -> None:
        comm.all_reduce(torch.ones(4), Purpose.SETUP, "sum").wait()

    add()
    thread = threading.Thread(target=add, name="second")
    thread.start()
    thread.join()


def when_freed(mesh: zs.Mesh, comm: Comm) -> None:
    Finalized(comm)


def forgotten(mesh: zs.Mesh, comm: Comm) -> None:
    for number in range(2):
        pending = comm.all_reduce(torch.ones(4), Purpose.SETUP, "sum")
        if number:
            pending.wait()


def unlike_order(mesh: zs.Mesh, comm: Comm) -> None:
    """Messages that gloo finds by their tags."""
    names = ["a", "b"]
    if mesh.rank == 0:
        under_way = [comm.send(torch.ones(4), 1, Purpose.SEND_ACTIVATIONS, name) for name in names]
    else:
        under_way = [comm.receive(torch.ones(4), 0, Purpose.SEND_ACTIVATIONS, name) for name in reversed(names)]
    for pending in under_way:
        pending.wait()


def in_a_circle(mesh: zs.Mesh, comm: Comm) -> None:
    """Each rank sends before it receives, in one queue."""
    other = 1 - mesh.rank
    sent = comm.send(torch.ones(4), other, Purpose.SEND_ACTIVATIONS, f"from {mesh.rank}")
    received = comm.receive(torch.ones(4), other, Purpose.SEND_ACTIVATIONS, f"from {other}")
    sent.wait()
    received.wait()


BROKEN: dict[Callable[..., None], str] = {
    short: "NCCL has no torch.int16",
    add_bools: "does not add torch.bool up",
    scattered: "is not contiguous",
    from_host_memory: "lies in host memory",
    misplaced: "at another place than this rank's",
    into_itself: "writes into its own operand",
    by_two_threads: "thread 'second' uses a communicator that another thread has used",
    when_freed: "begins in a finalizer",
    forgotten: "its end was never waited for",
    unlike_order: "which waits for another message",
    in_a_circle: "never ends: another rank does not begin it",
}


def broken(mesh: zs.Mesh, name: str) -> Record:
    """Break a rule; errors of gloo's own do not matter."""
    with recording(mesh) as (own, recorder), contextlib.suppress(CommError, RuntimeError):
        globals()[name](own, Comm(own))
    return recorder.close()


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.__name__)
def test_each_rule_is_checked(pool: Pool, case: Callable[..., None]) -> None:
    found = judge(pool.run(broken, 2, case.__name__))
    assert any(BROKEN[case] in finding for finding in found), found


def of(rank: int, kind: str, number: int, **more: Any) -> Launch:
    values: dict[str, Any] = {"dtype": "float32", "sizes": 4, "where": f"job.py:{number}", "waits": 0, **more}
    return Launch(rank, number, kind, "group", (0, 1), **values)


def test_collectives_in_another_order_or_size_are_named() -> None:
    ranks = [Record(rank, launches=[of(rank, f"broadcast from {rank}", 0)]) for rank in range(2)]
    assert "rank 0: broadcast from 0 (job.py:0) of 4 float32 meets rank 1: broadcast from 1" in judge(ranks)[0]
    ranks = [Record(rank, launches=[of(rank, "all_reduce", 0, sizes=4 + rank)]) for rank in range(2)]
    assert "of 4 float32 meets rank 1: all_reduce (job.py:0) of 5 float32" in judge(ranks)[0]
    parts = {0: ((4, 8), (4, 4)), 1: ((8, 4), (8, 4))}
    ranks = [Record(rank, launches=[of(rank, "all_to_all", 0, sizes=parts[rank])]) for rank in range(2)]
    assert "send and receive other numbers of bytes" in judge(ranks)[0]
    assert "rank [1] of its group started none" in judge([Record(0, launches=[of(0, "all_reduce", 0)]), Record(1)])[0]


def test_groups_that_ranks_make_in_another_order_are_named() -> None:
    pair, alone = Group((0, 1), "nccl", "job.py:1"), Group((0, 1), "gloo", "job.py:2")
    found = judge([Record(0, groups=[pair, alone]), Record(1, groups=[alone, pair])])
    assert found[0] == "rank 0 made a group of ((0, 1), 'nccl') (job.py:1), rank 1 of ((0, 1), 'gloo')"
    assert "rank 1 made 1 groups, and rank 0 2" in judge([Record(0, groups=[pair, alone]), Record(1, groups=[pair])])


def test_one_queue_for_both_directions_hangs_and_two_do_not() -> None:
    """Two messages each way, of which each rank starts its sends first."""

    def orders(groups: tuple[str, str]) -> Iterator[Record]:
        for rank in range(2):
            ways = [("send", groups[rank])] * 2 + [("receive", groups[1 - rank])] * 2
            launches = [replace(of(rank, kind, n, peer=1 - rank), group=group) for n, (kind, group) in enumerate(ways)]
            yield Record(rank, launches=launches, waits=[0, 1, 2, 3])

    assert "rank 0: send to rank 1 (job.py:0) never ends" in hangs([*orders(("one", "one"))])[0]
    assert hangs([*orders(("up", "down"))]) == []
    assert hangs([*orders(("up", "up"))], eager=True) != []


def with_device_id(mesh: zs.Mesh) -> str:
    """A default group that was made with `device_id`, as a pipeline finds it."""
    with patch.object(zeroshard_mesh, "_get_default_group", lambda: SimpleNamespace(bound_device_id=0)):
        with pytest.raises(PlanError) as refused:
            MessageGroups(mesh).separate(["neighbours"])
        return str(refused.value)


def test_a_pipeline_is_refused_in_groups_with_one_communicator(pool: Pool) -> None:
    for message in pool.run(with_device_id, 2):
        assert "messages of a pipeline wait for each other in a circle. Leave device_id out of" in message
