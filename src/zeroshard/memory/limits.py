"""Host memory left to the process: by the machine, by its cgroups, and by its own limits.

Linux kernel documentation: filesystems/proc, admin-guide/cgroup-v2, admin-guide/cgroup-v1/memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 2**62  # bytes; version 1 shows the largest multiple of a page


@dataclass(frozen=True, slots=True)
class Room:
    """The free bytes under one limit.

    Attributes:
        nbytes: bytes that may still be taken; negative where the limit is exceeded already.
        limit: its name.
        shared: whether all ranks of a machine take from it.
    """

    nbytes: int
    limit: str
    shared: bool = True

    def takers(self, ranks: int) -> int:
        """Number of the machine's ranks that take from it."""
        return ranks if self.shared else 1


def find_rooms(root: Path = ROOT) -> list[Room]:
    """All readable limits on this process's memory, with the bytes left under each."""
    return [*_machine(root), *_cgroups(root), *_own_limits(root)]


def _machine(root: Path) -> Iterator[Room]:
    available = _table(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield Room(available * 1024, "MemAvailable of this machine")


def _cgroups(root: Path) -> Iterator[Room]:
    for folder in _folders(root, ""):
        for limit in ("memory.max", "memory.high"):
            yield from _cgroup(root, folder / limit, folder / "memory.current", "inactive_file")
    for folder in _folders(root, "memory"):
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        yield from _cgroup(root, folder / limit, folder / usage, "total_inactive_file")


def _cgroup(root: Path, limit: Path, usage: Path, cached: str) -> Iterator[Room]:
    """The free bytes of one cgroup; inactive pages of files are reclaimed first, and count as free."""
    allowed = _read(limit).strip()
    if not allowed.isdecimal() or int(allowed) >= NO_LIMIT:  # such as "max"
        return
    used = _read(usage).strip()
    if used.isdecimal():
        free = int(allowed) - int(used) + _table(limit.with_name("memory.stat")).get(cached, 0)
        yield Room(free, f"{limit.name} of the cgroup /{limit.parent.relative_to(root)}")


def _own_limits(root: Path) -> Iterator[Room]:
    used = _table(root / "proc/self/status")
    for line in _read(root / "proc/self/limits").splitlines():
        for name, limit, use in (
            ("Max address space", "RLIMIT_AS (ulimit -v)", "VmSize"),
            ("Max data size", "RLIMIT_DATA (ulimit -d)", "VmData"),
        ):
            soft = line.removeprefix(name).split()[:1]
            if line.startswith(name) and soft[0].isdecimal():
                yield Room(int(soft[0]) - used.get(use, 0) * 1024, f"{limit} of this process", shared=False)


def _folders(root: Path, controller: str) -> list[Path]:
    """The folder of this process's cgroup and those above it: of version 2 without a controller, of version 1 with one.

    In a container the path is often that of the host, and the mounted root is the process's own cgroup.
    """
    top = root / "sys/fs/cgroup" / (controller or "unified")
    if not controller and not top.is_dir():
        top = top.parent
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if controller else not controllers:
            own = top / path.strip("/")
            if own.is_dir() and ".." not in own.parts:
                return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return [top]


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file of lines "name: number ..." or "name number"."""
    lines = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1 and fields[1].isdecimal()}


def _read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""
