"""A rank that does not come is named in time; one that comes later finds the others."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, copies
from torch import nn

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import announce_failure
from zeroshard.comm.pending import Position
from zeroshard.comm.rendezvous import connect, naming, wait_for_all
from zeroshard.errors import CommError, PlanError


def engine_on(mesh: zs.Mesh | None, **settings: object) -> zs.Engine:
    return zs.Engine(nn.Linear(2, 2), lambda ps: torch.optim.SGD(ps, lr=0.1), zs.Plan.from_dict(settings), mesh=mesh)  # type: ignore[arg-type]


@pytest.fixture
def port(port: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, told as torchrun does to rank 0 of three."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    return port


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
    wanted = f"Rank 0 cannot keep the job's store at 127.0.0.1:{port} .*a free port"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(CommError, match=wanted):
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
            engine_on(replace(mesh, timeout=1.0), shard_group=1)
        except CommError as error:
            told = str(error)
    Comm(mesh).agree(b"", "now")
    return told, engine_on(mesh, shard_group=1).data_ranks


def test_a_rank_that_comes_late_to_an_engine(pool: Pool) -> None:
    (told, data_ranks), other = pool.run(comes_late, 2)
    assert "Rank 0 waited 1 s for rank 1 of 2 to make an engine of ranks 0-1" in told
    assert (data_ranks, other) == (2, ("", 2))


def test_a_rank_that_fails_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.comm.rendezvous.PATIENCE", 0.0)
    store = dist.HashStore()
    store.set("failure", "rank 1 failed: DataError: no text")
    with pytest.raises(CommError, match="Rank 0 cannot make it because rank 1 failed: DataError: no text"):
        wait_for_all(store, 0, 2, 60.0, "it")


PATIENCE = 60.0  # seconds after which a test gives up; nothing here takes a tenth of it


def keep(port: int, pipe: Any) -> None:
    """Be rank 0 that keeps the store, and nothing else."""
    store = connect(("127.0.0.1", str(port)), 0, 2, False, PATIENCE)
    store.set("there", "yes")
    pipe.send("kept")
    pipe.recv()


@pytest.fixture
def keeper(port: int) -> Iterator[Any]:
    """The process that keeps the store at `port`."""
    context = copies()
    here, there = context.Pipe()
    process = context.Process(target=keep, args=(port, there), daemon=True)
    process.start()
    assert here.poll(PATIENCE)
    yield process
    process.kill()
    process.join()


def stop(pid: int) -> None:
    """Stop a process, with all its threads when this returns."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE
    while any(
        path.read_text().rpartition(")")[2].split()[0] != "T" for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["roll call", "wait", "end", "group"])
def test_a_store_that_stops_to_answer_is_an_error_in_time(port: int, keeper: Any, what: str) -> None:
    """As one behind a cable that was cut; without a deadline each of these calls would never return."""
    store = connect(("127.0.0.1", str(port)), 1, 2, False, 1.0)
    mine = dist.PrefixStore("mine", store)
    mesh = zs.Mesh(rank=1, ranks=2, store=mine, failures=mine, timeout=1.0)
    assert store.check(["there"]) and not mine.check(["there"])
    stop(keeper.pid)
    silent = "the job's store does not answer: .*rank 0 or the launcher.*network"
    start = time.monotonic()
    if what == "roll call":
        with pytest.raises(CommError, match=f"Rank 1 cannot make it because {silent}"):
            wait_for_all(mine, 1, 2, 1.0, "it")
    elif what == "wait":
        with pytest.raises(CommError, match=f"Rank 1 stopped in 'step 7' because {silent}"):
            Comm(mesh).explain(Position("control", 1, "step 7"), expired=False)
    elif what == "group":
        with pytest.raises(CommError, match=f"Rank 1 could not make it because {silent}"), naming(mine, 1, "it"):
            mine.compare_set("what torch asks", "", "x")
    else:
        assert announce_failure(mesh, ValueError("the disk is full"))
    os.kill(keeper.pid, signal.SIGCONT)
    with pytest.raises(dist.DistError):  # an answer that comes late is nobody's
        store.check(["there"])
    Comm(mesh).withdraw()
    assert time.monotonic() - start < PATIENCE


def test_something_else_that_listens_there_and_is_silent(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    wanted = f"at 127.0.0.1:{port}, and it did not come .*does not answer as a store"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(CommError, match=wanted):
        engine_on(None, timeout=1.0)


def test_rank_0_listens_on_the_loopback_address_alone(port: int) -> None:
    store = connect(("localhost", str(port)), 0, 2, False, 5.0)
    assert not store.check(["anything"])
    with socket.socket() as other:  # taken already, if the store listens on every address
        other.bind(("127.0.0.2", port))
