"""Shared memory and the network give the same bits; groups of ranks that slice among themselves follow a plain loop."""

import contextlib
import functools
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import OPTIMIZERS, batch, build, plain
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.errors import PlanError
from zeroshard.platform import shared_memory as shared
from zeroshard.zero.reduce import AllReduce

STEPS = 4
CASES = [
    ("Plain", "adamw", 1, None),
    ("Plain", "sgd", 2, 0.5),
    ("Sometimes", "adamw", 2, None),
    ("Tied", "adamw", 1, 0.5),
    ("CheckpointedReentrant", "adamw", 2, 0.5),
]
cached_plain = functools.cache(plain)


def train(mesh: zs.Mesh, case: tuple[str, str, int, float | None], settings: dict[str, Any]) -> Any:
    name, optimizer, microbatches, clip = case
    plan = zs.Plan.from_dict({"microbatches": microbatches, "clip_norm": clip, **settings})
    model = build(name, seed=mesh.rank)
    engine = zs.Engine(model, lambda ps: OPTIMIZERS[optimizer]([p for p in ps if p.requires_grad]), plan, mesh=mesh)
    results = [engine.train_step((batch(step, mesh.rank, mesh.ranks), step)) for step in range(STEPS)]
    memory = {row.category: (row.planned_bytes, row.padding_bytes, row.measured_bytes) for row in engine.memory().rows}
    wire = {row.purpose: (row.planned_elements, row.measured_elements, row.sent_bytes) for row in engine.traffic().rows}
    return (
        [(r.loss.item(), r.grad_norm) for r in results],
        engine.state_dict(),
        memory,
        wire,
        engine.comm.shared is None,
    )


# With two ranks every case, with three those whose batch divides; in 16 bits what has other buffers there.
MATRIX = [
    *((case, 2, "fp32") for case in CASES),
    *((case, 2, "bf16") for case in (CASES[1], CASES[2], CASES[3])),
    (CASES[0], 3, "bf16"),
    (CASES[3], 3, "fp32"),
]


@pytest.mark.parametrize(
    "case, ranks, precision", MATRIX, ids=lambda v: "-".join(map(str, v)) if type(v) is tuple else v
)
def test_shared_memory_gives_the_bits_of_the_network(pool: Pool, case: Any, ranks: int, precision: str) -> None:
    for zero in (0, 1, 2, 3) if ranks == 2 else (0, 2):
        settings = {"zero": zero, "precision": precision}
        network = pool.run(train, ranks, case, {**settings, "transport": "network"})
        shared = pool.run(train, ranks, case, settings)  # "auto"
        for (steps, weights, _, _, apart), (wanted, expected, _, _, _) in zip(shared, network, strict=True):
            assert steps == wanted and not apart
            for key, value in weights.items():
                assert torch.equal(value, expected[key]), key


def read_gradients(mesh: zs.Mesh, transport: str, doubles: bool) -> tuple[list[Any], set[int]]:
    """Weights after steps that every rank takes over all elements, and of how many pieces their gradients were."""

    def double(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))  # slices end inside of parameters
    engine = zs.Engine(
        model, lambda ps: torch.optim.AdamW(ps, lr=0.01), zs.Plan(zero=0, transport=transport, clip_norm=1e3), mesh=mesh
    )  # type: ignore[arg-type]
    if doubles:
        engine.optimizer.register_step_pre_hook(double)
    pieces, made = AllReduce.pieces, set()

    def counted(self: AllReduce, total: torch.Tensor) -> list[torch.Tensor]:
        found = pieces(self, total)
        made.add(len(found))
        return found

    try:
        AllReduce.pieces = counted  # type: ignore[method-assign]
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + mesh.rank)
            engine.backward(engine(torch.randn(5, 7, generator=generator)).square().mean())
            engine.step()
    finally:
        AllReduce.pieces = pieces  # type: ignore[method-assign]
    return [*engine.state_dict().values()], made


@pytest.mark.parametrize("doubles", [False, True])
def test_gradients_in_shared_memory_are_read_where_they_are(pool: Pool, doubles: bool) -> None:
    """But not where a hook of the user's may change them, which other ranks would see."""
    for ranks in (2, 3):
        network = pool.run(read_gradients, ranks, "network", doubles)
        shared = pool.run(read_gradients, ranks, "shared", doubles)
        for (weights, pieces), (expected, _) in zip(shared, network, strict=True):
            assert all(map(torch.equal, weights, expected)) and pieces == (set() if doubles else {ranks})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_shared_memory_in_the_accounts(pool: Pool, zero: int) -> None:
    """Parameters are there once for all ranks from stage 1 up, nothing is sent, and the formulas say so."""
    answers = pool.run(train, 3, ("Plain", "adamw", 1, None), {"zero": zero})
    numel = sum(p.numel() for p in build("Plain").parameters())
    for _, _, memory, wire, _ in answers:
        for planned, padding, measured in memory.values():
            assert planned is None or planned + padding == measured
        assert wire["gather parameters"][:2] == (0, 0) and wire["reduce gradients"] == (numel, numel, 0)
    parameters = [memory["parameters"] for _, _, memory, _, _ in answers]
    assert sum(measured - padding for _, padding, measured in parameters) == 4 * numel * (1 if zero else 3)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_follow_a_plain_loop(pool: Pool, zero: int, size: int) -> None:
    case = ("Sometimes", "adamw", 2, 0.5)
    wanted = cached_plain(case[0], case[1], (8,) * STEPS, case[3])
    numel = sum(p.numel() for p in build("Sometimes").parameters())
    for transport in ("network", "auto"):
        answers = pool.run(train, 4, case, {"zero": zero, "shard_group": size, "transport": transport})
        mean = torch.tensor([[loss for loss, _ in steps] for steps, *_ in answers]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(wanted.losses), rtol=1e-5, atol=0)
        for _, weights, memory, wire, _ in answers:
            for key, value in weights.items():
                torch.testing.assert_close(value, wanted.weights[key], rtol=1e-4, atol=1e-6)
                assert torch.equal(value, answers[0][1][key])
            for planned, padding, measured in memory.values():
                assert planned is None or planned + padding == measured
            planned_elements, elements, _ = wire["average replicas"]
            assert planned_elements == elements >= 2 * numel // size


def saved(mesh: zs.Mesh, path: str, first: dict[str, Any], second: dict[str, Any]) -> Any:
    engines = [
        zs.Engine(build("Tied", seed), OPTIMIZERS["adamw"], zs.Plan.from_dict(settings), mesh=mesh)
        for seed, settings in ((0, first), (1, second))
    ]
    engines[0].train_step((batch(0, mesh.rank, mesh.ranks), 0))
    engines[0].save(path, wait=True)
    engines[1].load(path)
    losses = [engine.train_step((batch(1, mesh.rank, mesh.ranks), 1)).loss.item() for engine in engines]
    return losses, [engine.state_dict() for engine in engines]


@pytest.mark.parametrize(
    "first, second",
    [
        ({"zero": 3, "shard_group": 2}, {"zero": 2}),
        ({"zero": 1}, {"zero": 2, "shard_group": 2, "transport": "network"}),
        ({"zero": 2, "shard_group": 1}, {"zero": 3, "shard_group": 2}),
    ],
)
def test_groups_save_and_load(pool: Pool, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    for losses, (one, other) in pool.run(saved, 4, str(tmp_path / "checkpoint"), first, second):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-7)


def edited(mesh: zs.Mesh, settings: dict[str, Any], inside: bool) -> Any:
    """Halve the weights between two steps, once on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    engine = zs.Engine(model, functools.partial(torch.optim.SGD, lr=0.0), zs.Plan.from_dict(settings), mesh=mesh)
    before = engine.state_dict()
    if inside:
        with engine.gathered(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    try:
        loss = engine(torch.ones(2, 5)).sum()
    except PlanError as error:
        return str(error)
    engine.backward(loss)
    engine.step()
    return before, engine.state_dict()


PLANS = [{"zero": zero, "precision": p, "transport": t} for zero in range(4) for p in ("fp32", "bf16")
         for t in ("shared", "network")]  # fmt: skip


def test_edits_inside_gathered_are_made_once(pool: Pool) -> None:
    for settings in PLANS:
        for before, after in pool.run(edited, 2, settings, True):
            for key, value in before.items():
                assert torch.equal(after[key], value * 0.5), settings


def test_edits_elsewhere_are_refused_where_they_would_be_lost_or_doubled(pool: Pool) -> None:
    for settings in PLANS:
        if settings["zero"] == 3 and settings["transport"] == "network":
            continue  # its parameters refuse to be written
        keeps = settings["precision"] == "fp32" and (settings["transport"] == "network" or settings["zero"] == 0)
        if keeps:
            for before, after in pool.run(edited, 2, settings, False):
                assert all(torch.equal(after[key], value * 0.5) for key, value in before.items()), settings
            continue
        reason = "master weights" if settings["zero"] == 0 or settings["transport"] == "network" else "all ranks share"
        for words in pool.run(edited, 2, settings, False):
            assert reason in words and "was written while" in words and "engine.gathered" in words


def uneven(mesh: zs.Mesh) -> str:
    with pytest.raises(PlanError) as caught:
        zs.Engine(nn.Linear(3, 2), functools.partial(torch.optim.SGD, lr=0.1), zs.Plan(shard_group=2), mesh=mesh)
    return str(caught.value)


def test_ranks_that_do_not_divide_into_groups(pool: Pool) -> None:
    for words in pool.run(uneven, 3):
        assert "3 ranks do not divide among shard_group=2; start a multiple of 2" in words


def one_step(mesh: zs.Mesh, settings: dict[str, Any]) -> zs.Engine:
    torch.manual_seed(0)
    engine = zs.Engine(
        nn.Linear(3, 2), functools.partial(torch.optim.SGD, lr=0.1), zs.Plan.from_dict(settings), mesh=mesh
    )
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    return engine


def without_room(mesh: zs.Mesh) -> tuple[bool, str]:
    """Whether this rank shares memory where one group's machine has no room for it, and what an order to share says."""
    room = shared.room
    if mesh.rank == 2:
        shared.room = lambda: 0
    try:
        shares = one_step(mesh, {"zero": 2, "shard_group": 2}).comm.shared is not None
        with pytest.raises(PlanError) as caught:
            one_step(mesh, {"zero": 2, "shard_group": 2, "transport": "shared"})
    finally:
        shared.room = room
    return shares, str(caught.value)


def test_all_groups_share_memory_or_none(pool: Pool) -> None:
    for shares, words in pool.run(without_room, 4):
        assert not shares and "transport='shared' cannot be" in words and "which has" in words


def open_files() -> list[str]:
    """What this process has open that has a path: no sockets, which go with the process groups of past tests."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(path for path in found if path.startswith("/"))


def left_behind(mesh: zs.Mesh) -> tuple[bool, int, int]:
    """Whether an engine that nobody holds is still there, and how many files it had and has left open."""
    gc.collect()
    before = len(open_files())
    engine = one_step(mesh, {"zero": 2})
    had, watched = len(open_files()) - before, weakref.ref(engine)
    del engine
    gc.collect()
    return watched() is not None, had, len(open_files()) - before


def test_an_engine_that_nobody_holds_is_freed(pool: Pool) -> None:
    pool.run(left_behind, 2)  # the first makes what stays
    for there, had, left in pool.run(left_behind, 2):
        assert (there, left) == (False, 0) and had
