"""A small measurement of this machine, its file, and the machines made of it."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.doctor import measure as module
from zeroshard.doctor.facts import Facts, gather_facts
from zeroshard.doctor.hardware import OPERATIONS
from zeroshard.doctor.measure import Effort, MachineProfile, default_path, measure
from zeroshard.doctor.profile import Beside, Timing
from zeroshard.errors import DataError, PlanError

LITTLE = Effort(box=0.002, copy_bytes=2**16, matrix=64, messages=(2**12, 2**16), disk_bytes=2**20, limit=60.0)
TABLES = {
    "network": {
        name: (Timing(1000, 1.0 * k, 0.5 * k), Timing(2000, 2.0 * k, k)) for k, name in enumerate(OPERATIONS, 1)
    },
    "shared": {name: (Timing(1000, 0.1 * k, 0.01 * k),) for k, name in enumerate(OPERATIONS[:2], 1)},
}
MADE = MachineProfile(
    date="2026-01-02T03:04:05+00:00",
    machine="a CPU",
    kind="cpu",
    torch="2.13.0",
    threads=2,
    cores=4,
    devices=1,
    device_memory=2**34,
    device_overhead=0,
    host_memory=2**34,
    shared_memory=2**33,
    matrix_flops={"fp32": 100.0, "bf16": 300.0},
    memory_bandwidth=80.0,
    beside=Beside(90.0, 60.0),
    op_seconds=1e-6,
    host_up=None,
    host_down=None,
    disk_write=1.0,
    disk_read=2.0,
    collectives=TABLES,
    signal=Timing(4, 0.03, 0.02),
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    found = gather_facts({}, tmp_path_factory.mktemp("disk"))
    return dataclasses.replace(found, gpus=0)


@pytest.fixture(scope="module")
def profile(facts: Facts) -> MachineProfile:
    return measure(LITTLE, facts, threads=1)


def test_everything_is_measured(profile: MachineProfile, facts: Facts) -> None:
    assert profile.problems == {}
    assert (profile.kind, profile.threads, profile.host_memory) == ("cpu", 1, facts.usable_memory)
    assert set(profile.matrix_flops) == {"fp32", "bf16", "fp16"}
    assert {transport: set(found) for transport, found in profile.collectives.items()} == {
        "network": set(OPERATIONS),
        "shared": {"gather", "exchange"},
    }
    for operations in profile.collectives.values():
        for rows in operations.values():
            assert [row.nbytes for row in rows] == [2**12, 2**16]
            assert all(0 < row.wall < LITTLE.limit and 0 < row.cpu < LITTLE.limit for row in rows)
    assert profile.signal is not None and profile.beside is not None
    assert profile.beside.matrix > 0 and profile.beside.memory > 0
    rates = (*profile.matrix_flops.values(), profile.memory_bandwidth, profile.disk_write, profile.disk_read)
    assert all(rate is not None and 0 < rate < 1e15 for rate in rates)
    assert 0 < profile.op_seconds < 1e-2
    assert list(facts.disk.iterdir()) == []  # nothing stays behind


def test_the_file_holds_all_of_it(profile: MachineProfile, tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.json"
    for each in (profile, MADE, dataclasses.replace(MADE, beside=None, signal=None, problems={"disk": "full"})):
        each.save(path)
        assert MachineProfile.load(path) == each
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=0),
        lambda content: content.pop("cores"),
        lambda content: content.update(speed=1),
        lambda content: content.update(memory_bandwidth=None),
        lambda content: content.update(op_seconds="fast"),
        lambda content: content["matrix_flops"].update(fp32=-1.0),
        lambda content: content.update(collectives=[1]),
        lambda content: content["collectives"]["shared"]["gather"][0].pop("cpu"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "machine.json"
    content = json.loads(json.dumps(MADE.as_dict()))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="zeroshard doctor"):
        MachineProfile.load(path)


def test_a_file_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        MachineProfile.load(tmp_path / "none.json")
    (tmp_path / "file").write_text("no JSON")
    with pytest.raises(DataError, match="no profile"):
        MachineProfile.load(tmp_path / "file")
    with pytest.raises(DataError, match="cannot be written"):
        MADE.save(tmp_path / "file" / "machine.json")


def test_machines_have_the_measured_numbers() -> None:
    alone = MADE.machines(1)
    assert alone.device.matrix_flops == {"fp32": 100.0, "bf16": 300.0}
    assert (alone.device.memory_bandwidth, alone.device.memory_bytes) == (80.0, 2**34)
    assert alone.wire_seconds("gather", 1e9, 1) == 0.0
    two = MADE.machines(2)
    assert two.device.matrix_flops == {"fp32": pytest.approx(90.0), "bf16": pytest.approx(270.0)}
    assert (two.device.memory_bandwidth, two.device.memory_bytes) == (pytest.approx(60.0), 2**33)
    assert (two.device.launch_seconds, two.nodes, two.host_memory) == (1e-6, 1, 2**34)
    assert "2026-01-02" in two.device.source
    four = MADE.machines(4, memory=2**20)  # of 2 threads each, on 4 cores
    assert four.device.matrix_flops["fp32"] == pytest.approx(45.0)
    assert (four.device.memory_bandwidth, four.device.memory_bytes) == (pytest.approx(30.0), 2**20)


def test_machines_have_the_measured_collectives() -> None:
    network, shared = MADE.machines(2), MADE.machines(2, "shared")
    assert [network.wire_seconds(operation, 3000.0, 2) for operation in OPERATIONS] == [1.5, 3.0, 9.0]
    assert shared.wire_seconds("gather", 2000.0, 2) == pytest.approx(0.1)
    assert shared.wire_seconds("send", 1000.0, 2) == 3.0  # messages go through the network in any case
    assert (network.inside.latency, shared.inside.latency) == (0.0, 0.03)
    assert MADE.machines(2, clock="cpu").wire_seconds("exchange", 4000.0, 2) == 2.0


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="0 ranks"):
        MADE.machines(0)
    gpu = dataclasses.replace(MADE, kind="cuda", devices=2, device_overhead=2**30, host_up=2.0, host_down=3.0)
    with pytest.raises(PlanError, match="3 ranks on this machine, which has 2 GPUs"):
        gpu.machines(3)
    device = gpu.machines(2).device
    communicators = 2 * device.communicator_bytes  # of gathers and of reductions, which the measured overhead lacks
    room = 2**34 - 2**30 - communicators
    assert (device.memory_bytes, device.capacity_bytes, device.host_link) == (2**34, room, 2.0)
    assert (device.beside(0), device.beside(2), device.beside(4)) == (room, room, room - communicators)
    assert device.matrix_flops["fp32"] == 100.0  # GPUs do not take each other's time
    silent = dataclasses.replace(MADE, collectives={}, problems={"network": "gloo is silent"})
    assert silent.machines(1).count == 1
    with pytest.raises(PlanError, match=r"no times of collectives over network \(gloo is silent\)"):
        silent.machines(2)


def test_the_place_of_the_file() -> None:
    assert default_path({"XDG_CACHE_HOME": "/var/c", "HOME": "/h"}) == Path("/var/c/zeroshard/machine.json")
    assert default_path({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/zeroshard/machine.json")
    assert default_path({}) == Path.home() / ".cache/zeroshard/machine.json"


def test_rates_count_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def once(run: Callable[[], object], box: float, device: torch.device) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        counted.append(counter.get_total_flops())
        return 0.5

    monkeypatch.setattr(module, "median_seconds", once)
    rate = module.matrix_flops(torch.device("cpu"), torch.float32, 96, box=1.0)
    assert len(counted) == 3 and sum(counted) == 1.5 * rate > 0  # three products of half a second each fill the box
    assert module.copy_bandwidth(torch.device("cpu"), 4096, 1.0) == 2 * 4096 / 0.5


def test_sizes_grow_until_the_box_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def cubic(run: partial[object], box: float, device: torch.device) -> float:
        ran.append(run.args[0].shape[0])
        return float(ran[-1] ** 3) / 1e9

    monkeypatch.setattr(module, "median_seconds", cubic)
    assert module.matrix_flops(torch.device("cpu"), torch.bfloat16, 1024, box=4.0) == pytest.approx(2e9)
    assert ran == [size for size in (64, 128, 256, 512, 1024) for _ in range(3)]
    ran.clear()
    module.matrix_flops(torch.device("cpu"), torch.bfloat16, 1024, box=0.1)
    assert ran == [size for size in (64, 128, 256) for _ in range(3)]


@pytest.mark.parametrize(
    ("program", "limit", "said"),
    [
        ("import sys; sys.exit('gloo: no route')", 60.0, "gloo: no route"),
        ("import time; time.sleep(60)", 0.3, "not done after 0.3 s"),
        ("pass", 60.0, "one wrote no result"),
    ],
)
def test_two_processes_that_fail_are_a_problem_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, limit: float, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{module.sys.executable}" -c "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(python))
    problems: dict[str, str] = {}
    found = module._pair(dataclasses.replace(LITTLE, limit=limit), 1, "cpu", problems)
    assert found == {"beside": None, "collectives": {}, "signal": None}
    assert said in problems["network"]


def test_a_disk_that_cannot_be_written_is_a_problem_and_no_crash(facts: Facts, tmp_path: Path) -> None:
    problems: dict[str, str] = {}
    missing = dataclasses.replace(facts, disk=tmp_path / "missing")
    assert module._disk(missing, LITTLE, problems) == (None, None)
    assert "missing" in problems["disk"]


def test_one_rank_alone_is_measured_without_a_pair() -> None:
    problems: dict[str, str] = {}
    found = module._pair(dataclasses.replace(LITTLE, pair=False), 1, "cpu", problems)
    assert found == {"beside": None, "collectives": {}, "signal": None} and not problems
    assert dataclasses.replace(MADE, **found).machines(1).count == 1
