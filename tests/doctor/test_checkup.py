"""Findings from facts that are wrong one at a time, and facts as the files of a machine tell them."""

import dataclasses
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from zeroshard.doctor.checkup import Finding, findings_of
from zeroshard.doctor.facts import Facts, core_quota, gather_facts, memory_limit, processor

GOOD = Facts(
    python=(3, 11),
    torch="2.13.0+cpu",
    numpy="2.4.6",
    built_for=None,
    gpus=0,
    gpu_driver=False,
    processor="a CPU",
    cores=8,
    allowed_cores=8,
    core_quota=None,
    memory=2**35,
    available_memory=2**34,
    memory_limit=None,
    swap_used=0,
    shared_memory=2**34,
    shared_memory_free=2**34,
    open_files=2**16,
    processes=None,
    locked_memory=2**16,
    infiniband=False,
    interfaces=("eth0", "lo"),
    hostname="node",
    address="10.0.0.7",
    compiler="/usr/bin/c++",
    disk=Path("."),
    disk_free=2**40,
    variables={"OMP_NUM_THREADS": "4"},
)


def findings(**wrong: Any) -> list[Finding]:
    """All that is not well."""
    return [finding for finding in findings_of(dataclasses.replace(GOOD, **wrong)) if finding.level != "ok"]


def test_all_is_well_where_all_is_well() -> None:
    assert findings() == []
    subjects = [finding.subject for finding in findings_of(GOOD)]
    assert len(set(subjects)) == len(subjects) == 15
    assert not any(finding.needed for finding in findings_of(GOOD))


WRONG: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"python": (3, 10)}, "Python", "error", "3.10", "virtual environment"),
    ({"python": (3, 14)}, "Python", "warning", "3.14", "virtual environment"),
    ({"torch": "2.12.1"}, "torch", "error", "2.12.1", "torch==2.13"),
    ({"torch": "2.14.0a0+git1234"}, "torch", "warning", "2.14", "torch==2.13"),
    ({"numpy": None}, "numpy", "error", "no numpy", "numpy>=1.26"),
    ({"numpy": "1.25.2"}, "numpy", "error", "1.25.2", "numpy>=1.26"),
    ({"gpu_driver": True}, "GPU", "warning", "built for CPUs", "build for CUDA"),
    ({"built_for": "CUDA 13.0"}, "GPU", "warning", "built for CUDA 13.0", "Nothing, to train on CPUs"),
    ({"built_for": "CUDA 13.0", "gpu_driver": True}, "GPU", "error", "no GPU can be used", "nvidia-smi"),
    ({"memory_limit": 2**33}, "memory", "warning", "8.00 GiB by its cgroup", "limit"),
    ({"swap_used": 2**32}, "swap", "warning", "4.00 GiB are swapped out", "End processes"),
    ({"core_quota": 2.5, "variables": {"OMP_NUM_THREADS": "2"}}, "cores", "warning", "2.5", "OMP_NUM_THREADS"),
    ({"variables": {}}, "threads", "warning", "not set", "OMP_NUM_THREADS=4 for two ranks"),
    ({"variables": {"OMP_NUM_THREADS": "9"}}, "threads", "warning", "'9', and there are 8 cores", "whole number"),
    ({"variables": {"OMP_NUM_THREADS": "two"}}, "threads", "warning", "'two'", "whole number"),
    ({"shared_memory": None, "shared_memory_free": None}, "shared memory", "warning", "no /dev/shm", "tmpfs"),
    ({"shared_memory": 2**26, "shared_memory_free": 2**26}, "shared memory", "warning", "64.00 MiB", "--shm-size"),
    ({"shared_memory_free": 0}, "shared memory", "warning", "0 B free", "--shm-size"),
    ({"open_files": 256}, "open files", "warning", "256", "ulimit -n 1024"),
    ({"processes": 100}, "processes", "warning", "100", "ulimit -u 1024"),
    ({"infiniband": True}, "locked memory", "warning", "64.00 KiB", "ulimit -l unlimited"),
    ({"interfaces": ("lo",)}, "network", "warning", "up are lo", "Nothing for one machine"),
    ({"interfaces": ()}, "network", "warning", "up are none", "Nothing for one machine"),
    ({"address": None}, "hostname", "warning", "'node' has no address", "GLOO_SOCKET_IFNAME=eth0"),
    ({"address": "127.0.1.1"}, "hostname", "warning", "only this machine reaches", "GLOO_SOCKET_IFNAME=eth0"),
    ({"compiler": None}, "compiler", "warning", "no C++ compiler", "g++"),
    ({"disk_free": 2**32}, "disk", "warning", "4.00 GiB free", "Free some"),
    ({"disk_free": 2**20}, "disk", "error", "1.00 MiB free", "Free some"),
]


@pytest.mark.parametrize(("wrong", "subject", "level", "found", "way_out"), WRONG)
def test_each_wrong_fact_is_found_alone(
    wrong: dict[str, Any], subject: str, level: str, found: str, way_out: str
) -> None:
    (finding,) = findings(**wrong)
    assert (finding.subject, finding.level) == (subject, level)
    assert found in finding.found and way_out in finding.way_out and finding.needed


def test_an_interface_that_is_not_there_is_an_error() -> None:
    threads = GOOD.variables
    (finding,) = findings(variables={**threads, "GLOO_SOCKET_IFNAME": "ib0"})
    assert (finding.subject, finding.level, finding.found) == (
        "network",
        "error",
        "GLOO_SOCKET_IFNAME names 'ib0'; up are eth0, lo",
    )
    assert (
        findings(variables={**threads, "GLOO_SOCKET_IFNAME": "eth0"}, address=None) == []
    )  # the name is not asked for


def test_hidden_gpus_are_not_a_broken_driver() -> None:
    hidden = {**GOOD.variables, "CUDA_VISIBLE_DEVICES": ""}
    (finding,) = findings(built_for="CUDA 13.0", gpu_driver=True, variables=hidden)
    assert (finding.level, finding.way_out) == ("warning", "Unset it.")
    assert findings(built_for="CUDA 13.0", gpu_driver=True, gpus=2) == []


def test_limits_count_in_what_training_can_have() -> None:
    assert (GOOD.usable_memory, GOOD.usable_cores) == (2**34, 8)
    held = dataclasses.replace(GOOD, memory_limit=2**30, core_quota=0.5)
    assert (held.usable_memory, held.usable_cores) == (2**30, 1)
    assert dataclasses.replace(GOOD, core_quota=3.9, allowed_cores=6).usable_cores == 3


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_limits_of_cgroups_of_version_2(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": "1073741824\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        },
    )
    assert (memory_limit(root), core_quota(root)) == (2**30, 1.5)
    (root / "proc/self/cgroup").write_text("0::/../elsewhere\n")  # in a container, whose own limits are at the top
    machine(root, {"sys/fs/cgroup/memory.max": "4096\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert (memory_limit(root), core_quota(root)) == (4096, 0.5)


def test_limits_of_cgroups_of_version_1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "536870912\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "200000\n",
        },
    )
    assert (memory_limit(root), core_quota(root)) == (2**29, 2.0)


def test_a_machine_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert (memory_limit(tmp_path), core_quota(tmp_path)) == (None, None)
    machine(tmp_path, {"proc/cpuinfo": "vendor_id\t: X\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Some CPU\n"})
    assert processor(tmp_path) == "Some CPU @ 2 GHz"


def test_the_facts_are_those_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    facts = gather_facts({"OMP_NUM_THREADS": "1", "HOME": "elsewhere"}, tmp_path)
    assert facts.variables == {"OMP_NUM_THREADS": "1"}
    assert facts.torch == torch.__version__ and facts.cores == os.cpu_count()
    assert facts.memory == psutil.virtual_memory().total >= facts.available_memory > 0
    assert facts.hostname == "no-such-name.invalid" and facts.address is None
    assert facts.disk_free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert set(facts.interfaces) <= {name for _, name in socket.if_nameindex()}
    assert 1 <= facts.usable_cores <= facts.allowed_cores <= facts.cores
    assert {finding.subject for finding in findings_of(facts)} >= {
        "Python",
        "torch",
        "GPU",
        "memory",
        "network",
        "disk",
    }
