"""A rank that does not come is named in time; one that comes later finds the others."""

import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

import zeroshard as zs
from zeroshard.comm import Comm
from zeroshard.errors import CommError, PlanError
from zeroshard.rendezvous import wait_for_all


def engine_on(mesh: zs.Mesh | None, **settings: object) -> zs.Engine:
    return zs.Engine(nn.Linear(2, 2), lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan(**settings), mesh=mesh)  # type: ignore[arg-type]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, told as torchrun does to rank 0 of three."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    return found


def test_ranks_that_are_never_started_are_named(port: int) -> None:
    with pytest.raises(CommError, match=r"Rank 0 waited 1 s for ranks 1, 2 of 3 to make the process group.*`timeout`"):
        engine_on(None, timeout=1.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize("launcher, keeper", [(False, "rank 0"), (True, "the launcher")])
def test_a_store_that_is_not_there(port: int, launcher: bool, keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    wanted = f"Rank 1 waited 1 s for {keeper}, which keeps the job's store at 127.0.0.1:{port}.*MASTER_ADDR"
    with pytest.raises(CommError, match=wanted):
        engine_on(None, timeout=1.0)


def test_a_port_that_is_taken(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(CommError, match=f"Rank 0 cannot keep the job's store at 127.0.0.1:{port} .*a free port"):
            engine_on(None, timeout=1.0)


@pytest.mark.parametrize("name, value", [("MASTER_ADDR", ""), ("MASTER_PORT", "http"), ("MASTER_PORT", "70000")])
def test_a_place_that_is_none(port: int, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=f"{name}.* {value!r}.*torchrun"):
        engine_on(None, timeout=1.0)


def comes_late(mesh: zs.Mesh) -> tuple[str, int]:
    """Rank 1 comes to an engine only when rank 0 has given up; then both make one."""
    told = ""
    if mesh.rank == 0:
        try:
            engine_on(replace(mesh, timeout=1.0), shard_ranks=1)
        except CommError as error:
            told = str(error)
    Comm(mesh).agree(b"", "now")
    return told, engine_on(mesh, shard_ranks=1).lanes


def test_a_rank_that_comes_late_to_an_engine(pool: Pool) -> None:
    (told, lanes), other = pool.run(comes_late, 2)
    assert "Rank 0 waited 1 s for rank 1 of 2 to make an engine of ranks 0-1" in told
    assert (lanes, other) == (2, ("", 2))


def test_a_rank_that_fails_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.rendezvous.PATIENCE", 0.0)
    store = dist.HashStore()
    store.set("failure", "rank 1 failed: DataError: no text")
    with pytest.raises(CommError, match="Rank 0 cannot make it because rank 1 failed: DataError: no text"):
        wait_for_all(store, 0, 2, 60.0, "it")
