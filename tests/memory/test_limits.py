"""The limits on host memory are read as Linux writes them, and the tightest is named."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from zeroshard.errors import BudgetExceeded
from zeroshard.memory import HostMemory, find_rooms
from zeroshard.memory.ledger import Category, Ledger

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")
STATES = Category.OPTIMIZER_STATES


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(ledger: Ledger | None = None, root: Path = Path("/")) -> HostMemory:
    return HostMemory(ledger or Ledger(), CPU, root)


MEMINFO = {"proc/meminfo": "MemTotal:    9000 kB\nMemFree:  10 kB\nMemAvailable:   8000 kB\n"}
UNLIMITED_V1 = str(2**63 - PAGE)


def v2(folder: str, limit: str, used: int = 0, cached: int = 0, high: str = "max") -> dict[str, str]:
    place = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.high": f"{high}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 1\nfile 77\ninactive_file {cached}\n",
    }


def v1(folder: str, limit: str, used: int = 0, cached: int = 0) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


def own(text: str) -> dict[str, str]:
    return {"proc/self/cgroup": text}


NESTED_V1 = own("9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n")
LIMITS = (
    "Limit          Soft Limit   Hard Limit   Units\nMax data size  5000000 unlimited bytes\n"
    "Max address space   unlimited   unlimited bytes\n"
)
TREES: dict[str, tuple[dict[str, str], int, str]] = {
    "no cgroup": ({}, 8_192_000, "MemAvailable of this machine"),
    "v2": (own("0::/\n") | v2("", "5000", 1000), 4000, "memory.max of the cgroup /sys/fs/cgroup"),
    "v2, unlimited": (own("0::/job\n") | v2("job", "max", 1000), 8_192_000, "MemAvailable of this machine"),
    "v2, cached files are free": (own("0::/job\n") | v2("job", "5000", 4900, 700), 800, "/sys/fs/cgroup/job"),
    "v2, throttled": (own("0::/job\n") | v2("job", "5000", 1000, high="4500"), 3500, "memory.high of the cgroup"),
    "v2, own is tighter": (own("0::/a/b\n") | v2("a", "9000") | v2("a/b", "6000"), 6000, "/sys/fs/cgroup/a/b"),
    "v2, above is tighter": (own("0::/a/b\n") | v2("a", "5000", 900) | v2("a/b", "max", 1), 4100, "/sys/fs/cgroup/a"),
    "v2, above is fuller": (own("0::/a/b\n") | v2("a", "9000", 8500) | v2("a/b", "6000"), 500, "/sys/fs/cgroup/a"),
    "v2, in a container": (own("0::/of/the/host\n") | v2("", "5000", 1), 4999, "/sys/fs/cgroup"),
    "v2, outside of its root": (own("0::/../other\n") | v2("", "5000", 2), 4998, "/sys/fs/cgroup"),
    "v2, beside v1": (own("0::/job\n") | v2("unified/job", "5000", 3), 4997, "/sys/fs/cgroup/unified/job"),
    "v1": (
        NESTED_V1 | v1("a/b", "6000", 100, 50),
        5950,
        "memory.limit_in_bytes of the cgroup /sys/fs/cgroup/memory/a/b",
    ),
    "v1, above is tighter": (NESTED_V1 | v1("a", "5000", 900) | v1("a/b", UNLIMITED_V1, 9), 4100, "memory/a"),
    "v1, unlimited": (NESTED_V1 | v1("", UNLIMITED_V1, 100) | v1("a/b", UNLIMITED_V1, 9), 8_192_000, "MemAvailable"),
    "v1, in a container": (NESTED_V1 | v1("", "5000", 4), 4996, "/sys/fs/cgroup/memory"),
    "ulimit -d": (
        {"proc/self/limits": LIMITS, "proc/self/status": "Name: x\nVmData:\t 1000 kB\n"},
        3_976_000,
        "RLIMIT_DATA",
    ),
    "overdrawn": (own("0::/\n") | v2("", "5000", 6000), -1000, "memory.max"),
}


class TestRoom:
    @pytest.mark.parametrize("name", TREES)
    def test_the_tightest_limit(self, name: str, tmp_path: Path) -> None:
        files, nbytes, limit = TREES[name]
        room = min(find_rooms(tree(tmp_path, MEMINFO | files)), key=lambda room: room.nbytes)
        assert room.nbytes == nbytes and limit in f"{room.limit}\n"
        if limit.startswith("/"):
            assert room.limit.endswith(f" {limit}")

    def test_what_cannot_be_read_limits_nothing(self, tmp_path: Path) -> None:
        assert find_rooms(tmp_path) == []
        host(root=tmp_path).check_room(2**60, "all")

    def test_this_machine(self) -> None:
        available = next(room for room in find_rooms() if "MemAvailable" in room.limit)
        assert 0 < available.nbytes < os.sysconf("SC_PHYS_PAGES") * PAGE

    def test_too_little_says_what_was_asked_what_is_left_and_who_says_so(self, tmp_path: Path) -> None:
        ledger = Ledger()
        memory = host(ledger, tree(tmp_path, MEMINFO | own("0::/job\n") | v2("job", "9000", 500)))
        memory.check_room(8500, "states")
        with pytest.raises(BudgetExceeded) as error:
            memory.check_room(8501, "states")
        for part in (
            "states: needs 8,501 bytes",
            "/sys/fs/cgroup/job leaves 8,500.",
            "offload.fraction",
            "offload.disk",
        ):
            assert part in str(error.value)
        with pytest.raises(BudgetExceeded, match="leaves 8,500"):
            memory.slab(2 * PAGE + 1, torch.uint8, STATES, "m")
        assert ledger.total("host") == 0
        memory.slab(2 * PAGE, torch.uint8, STATES, "m")

    def test_ranks_of_a_machine_ask_together(self, tmp_path: Path) -> None:
        memory = host(root=tree(tmp_path, MEMINFO))
        memory.check_room(2_048_000, "states", ranks=4)
        with pytest.raises(BudgetExceeded, match=r"2,048,001 bytes of host memory on each of 4 ranks; .* 8,192,000"):
            memory.check_room(2_048_001, "states", ranks=4)

    def test_a_limit_of_the_process_is_not_shared(self, tmp_path: Path) -> None:
        files = {"proc/self/limits": LIMITS, "proc/self/status": "VmData: 1000 kB\n"}
        memory = host(root=tree(tmp_path, files))
        memory.check_room(3_976_000, "states", ranks=4)
        with pytest.raises(BudgetExceeded, match=r"memory; RLIMIT_DATA \(ulimit -d\) of this process leaves 3,976,000"):
            memory.check_room(3_976_001, "states", ranks=4)

    def test_the_budget_comes_first(self, tmp_path: Path) -> None:
        memory = host(Ledger({"host": 100}), tree(tmp_path, MEMINFO))
        with pytest.raises(BudgetExceeded, match="budget of 100"):
            memory.check_room(101, "states")
