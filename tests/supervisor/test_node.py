"""Which node this is, read from options and from the variables of each launcher."""

import subprocess
from typing import Any

import pytest

from zeroshard.errors import ConfigError
from zeroshard.supervisor.node import Node, environments, find_place

SLURM = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "n[1-4]"}
K8S = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "7000"}


def place(environment: dict[str, str], **options: Any) -> Node:
    return find_place(environment=environment, **{"nproc_per_node": 2, **options})


def test_one_machine_alone() -> None:
    assert place({}) == Node(processes=2)
    assert place({"MASTER_ADDR": "elsewhere"}).address == "127.0.0.1"  # nobody else needs to find it


def test_processes_are_gpus_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.platform.accelerator.count", lambda: 4)
    assert place({}, nproc_per_node=None).processes == 4
    monkeypatch.setattr("zeroshard.platform.accelerator.count", lambda: 0)
    assert place({}, nproc_per_node=None).processes == 1


@pytest.mark.parametrize(
    "environment, options, expected",
    [
        (K8S, {"nnodes": 3}, Node(nodes=3, node=1, processes=2, address="job-0.job", port=7000)),
        ({**K8S, "PET_NNODES": "3"}, {}, Node(nodes=3, node=1, processes=2, address="job-0.job", port=7000)),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "9",
                "MASTER_ADDR": "b",
            },
            {},
            Node(nodes=2, node=1, processes=2, address="a", port=9),
        ),
        (
            {**SLURM, "MASTER_ADDR": "head"},
            {"node_rank": 0, "master_port": 5},
            Node(nodes=4, node=0, processes=2, address="head", port=5),
        ),
        (
            {},
            {"nnodes": 2, "node_rank": 1, "master_addr": "x"},
            Node(nodes=2, node=1, processes=2, address="x", port=29500),
        ),
        (
            {"RANK": "5", "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_NNODES": "4"},
            {"nproc_per_node": None},
            Node(attempt=2, nested=True),
        ),
        ({"RANK": "5"}, {}, Node(processes=2)),
    ],
)
def test_each_launcher(environment: dict[str, str], options: dict[str, Any], expected: Node) -> None:
    assert place(environment, **options) == expected


def test_the_head_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def scontrol(command: list[str], **options: Any) -> Any:
        assert command == ["scontrol", "show", "hostnames", "n[1-4]"]
        return subprocess.CompletedProcess(command, 0, "n1\nn2\nn3\nn4\n")

    monkeypatch.setattr("subprocess.run", scontrol)
    assert place(SLURM) == Node(nodes=4, node=2, processes=2, address="n1", port=10000 + 40007 % 20000)

    def missing(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("subprocess.run", missing)
    assert place({**SLURM, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}).address == "10.0.0.1"
    with pytest.raises(ConfigError, match="give --master-addr"):
        place(SLURM)


@pytest.mark.parametrize(
    "environment, options, message",
    [
        ({}, {"nnodes": 2}, "number of this one is not known; give --node-rank"),
        (K8S, {}, "node 1 and there are 1.*--nnodes"),
        ({}, {"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node 2 and there are 2"),
        ({"PET_NNODES": "2:4"}, {}, "PET_NNODES is '2:4' and must be a whole number"),
        ({"RANK": "0"}, {"nproc_per_node": None, "nnodes": 2}, "another launcher has placed this process"),
        ({}, {"master_port": 70000}, "port is 70000"),
        ({}, {"nproc_per_node": 0}, "0 processes"),
    ],
)
def test_places_that_do_not_fit(environment: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(environment, **options)


def test_the_environment_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSHARD_FORK_SERVER", "1")
    monkeypatch.setenv("RANK", "9")
    here = Node(nodes=3, node=1, processes=2, address="a", port=5)
    first, second = environments(here, [4, 2, 1], 77)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [first[name] for name in names] == ["4", "0", "7", "2", "a", "77"]
    assert [second[name] for name in names] == ["5", "1", "7", "2", "a", "77"]
    assert "ZEROSHARD_FORK_SERVER" not in first
    assert "GLOO_SOCKET_IFNAME" not in first
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    (alone,) = environments(Node(), [1], 77)
    assert alone["GLOO_SOCKET_IFNAME"] == "lo" and alone["NCCL_SOCKET_IFNAME"] == "mine"
    (nested,) = environments(Node(nested=True), [1], 77)
    assert nested["RANK"] == "9" and "TORCHELASTIC_USE_AGENT_STORE" not in nested
