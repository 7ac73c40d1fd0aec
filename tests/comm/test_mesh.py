"""A mesh is valid or refused, and one process alone needs no environment."""

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard import Mesh, init_mesh
from zeroshard.comm.collectives import Comm
from zeroshard.comm.heartbeat import Heartbeat, read_heartbeat
from zeroshard.comm.mesh import attempt, keep_freed_memory, part_of
from zeroshard.comm.pending import Position
from zeroshard.errors import CommError, PlanError
from zeroshard.platform import accelerator

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES += ("ZEROSHARD_ATTEMPT", "ZEROSHARD_HEARTBEAT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's environment, and no accelerator."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def test_one_process_alone() -> None:
    mesh = Mesh()
    assert (mesh.rank, mesh.ranks, mesh.device) == (0, 1, torch.device("cpu"))
    assert mesh.gathers is mesh.reductions is mesh.control is mesh.store is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.rank = 1


@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 2), (63, 64)])
def test_places_in_a_mesh(rank: int, ranks: int) -> None:
    assert (Mesh(rank, ranks).rank, Mesh(rank, ranks).ranks) == (rank, ranks)


@pytest.mark.parametrize(
    "rank, ranks, message",
    [
        (0, 0, "0 ranks; it needs at least 1"),
        (0, -2, "-2 ranks; it needs at least 1"),
        (1, 1, "Rank 1 is outside a mesh of 1 ranks"),
        (-1, 4, "Rank -1 is outside a mesh of 4 ranks"),
        (4, 4, "Rank 4 is outside a mesh of 4 ranks"),
    ],
)
def test_places_that_do_not_exist(rank: int, ranks: int, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Mesh(rank, ranks)


def test_init_mesh_without_torchrun() -> None:
    assert init_mesh(timeout=7.0) == Mesh(timeout=7.0)
    assert init_mesh(device="cpu").device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


BROKEN = {
    "no ranks": ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0; it must be 1 or more"),
    "fewer": ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE is -1; it must be 1 or more"),
    "a word": ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is two; it must be 1 or more"),
    "a rank beyond": ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK is 3 and WORLD_SIZE 2; ranks are numbered from 0 to 1"),
    "a rank before": ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is -1; it must be 0 or more"),
    "no rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK is not set, so this process would train alone"),
    "no world": ({"RANK": "1"}, "RANK is 1, and WORLD_SIZE is not set, so this process would train alone"),
    "no local rank": ({"LOCAL_RANK": "x"}, "LOCAL_RANK is x; it must be 0 or more"),
    "no local ranks": ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0; it must be 1 or more"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_init_mesh_of_a_broken_world(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    environment, message = BROKEN[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(PlanError, match=f"{message}.*torchrun"):
        init_mesh()


def test_a_world_of_one_rank_needs_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert init_mesh(timeout=7.0) == Mesh(timeout=7.0)


def test_init_mesh_on_an_unknown_device() -> None:
    with pytest.raises(PlanError, match="'tpu' is unknown; use 'cpu' or 'cuda'"):
        init_mesh(device="tpu")


def test_cuda_without_a_gpu() -> None:
    with pytest.raises(PlanError, match=r"needs a GPU, and PyTorch sees none.*device='cpu'"):
        init_mesh(device="cuda")


@pytest.mark.parametrize(
    "gpus, local, expected", [(0, 1, "cpu"), (1, 1, "cuda:0"), (1, 2, "cpu"), (4, 4, "cuda:3"), (8, 4, "cuda:3")]
)
def test_cuda_where_every_local_rank_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = torch.device("cuda") if gpus else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setenv("LOCAL_RANK", str(local - 1))
    assert init_mesh().device == torch.device(expected)


@pytest.mark.parametrize("variable", [None, "MALLOC_TRIM_THRESHOLD_"])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    told: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda option, value: told.append((option, value)))
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "1000000")
    keep_freed_memory()
    assert told == ([] if variable else [(-3, 2**30), (-1, 2**30)])


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())
    keep_freed_memory()


@pytest.mark.parametrize(
    "environment, number",
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"ZEROSHARD_ATTEMPT": "1", "TORCHELASTIC_RESTART_COUNT": "2"}, 1),
    ],
)
def test_the_attempt(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], number: int) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert attempt() == number


def test_an_attempt_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSHARD_ATTEMPT", "-1")
    with pytest.raises(PlanError, match="ZEROSHARD_ATTEMPT is '-1'"):
        attempt()


def test_each_attempt_has_its_own_keys_in_a_store_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, which keeps the store from attempt to attempt."""
    kept: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    joined: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, *, store, **place: joined.append((store, place)))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port)}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for number in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        init_mesh(device="cpu")
        store, where = joined[-1]
        assert (where["rank"], where["world_size"]) == (0, 1)
        assert not store.check(["address"])
        store.set("address", str(number))
    assert [kept.get(f"attempt-{number}/address") for number in (0, 1)] == [b"0", b"1"]


def test_the_heartbeat_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZEROSHARD_HEARTBEAT", str(tmp_path / "p"))
    mesh = init_mesh(device="cpu")
    assert mesh.heartbeat is not None
    mesh.heartbeat.step(4)
    found = read_heartbeat(tmp_path / "p")
    assert found is not None and (found.step, found.rank) == (4, 0)


def heartbeats(mesh: Mesh, folder: str) -> list[Any]:
    """What the heartbeat says after an agreement in a part of the mesh, and whether a rank alone keeps it."""
    path = Path(folder) / f"{mesh.rank}"
    mine = dataclasses.replace(mesh, heartbeat=Heartbeat(path, mesh.rank))
    part = part_of(mine, [[0, 1], [2]], "heartbeats")
    comm = Comm(part)
    comm.agree(b"", "first")
    comm.agree(b"", "second")
    found = read_heartbeat(path)
    assert found is not None and part.heartbeat is mine.heartbeat
    return [list(found.collective), found.waiting]


def test_collectives_show_in_the_heartbeat(pool: Any, tmp_path: Path) -> None:
    shown = [["control", 2, "second"], False]
    assert pool.run(heartbeats, 3, str(tmp_path)) == [shown, shown, [["", 0, ""], False]]


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "True", "no collective overlaps"),
        ("NCCL_BLOCKING_WAIT", "1", "no hang is found"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "would never end"),
    ],
)
def test_variables_with_which_nccl_would_hang_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    init_mesh(device="cpu")  # gloo reads none of them
    monkeypatch.setattr(accelerator, "backend", lambda device: "nccl")
    with pytest.raises(PlanError, match=f"{name} is {value}, and .*{words}.* Unset it."):
        init_mesh(device="cpu")
    monkeypatch.setenv(name, "3")
    init_mesh(device="cpu")


def test_a_store_that_is_gone_is_an_error_and_no_hang() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("broken pipe")

    comm = Comm(Mesh(1, 2, store=Gone()))  # type: ignore[arg-type]
    with pytest.raises(CommError, match="Rank 1 stopped in 'x' because the job's store does not answer"):
        comm.explain(Position("gather", 1, "x"), expired=False)
