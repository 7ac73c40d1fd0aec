"""Facts about this machine and this Python on which training depends; `checkup` turns them into findings."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from zeroshard.platform import accelerator

ROOT = Path("/")
UNLIMITED = 2**60  # bytes; cgroups write larger numbers for no limit
VARIABLES = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts; None where the machine lacks something or does not report it.

    Attributes:
        python: version, as numbers.
        torch: its version.
        numpy: its version.
        built_for: the accelerators that torch was built for, such as "CUDA 13.0".
        gpus: number of GPUs that torch can use.
        gpu_driver: whether a driver for GPUs is loaded.
        processor: the name of the CPU.
        cores: number of cores of the machine.
        allowed_cores: number of cores that this process may run on.
        core_quota: CPU time that its cgroup allows, in cores.
        memory: bytes of the machine.
        available_memory: bytes of it that are free or can be freed.
        memory_limit: bytes that its cgroup allows.
        swap_used: bytes of memory that are swapped out.
        shared_memory: bytes of /dev/shm.
        shared_memory_free: bytes of it that are free.
        open_files: the limit on files and sockets of one process.
        processes: the limit on processes and threads of this user.
        locked_memory: the limit on bytes that one process may lock.
        infiniband: whether the machine has adapters.
        interfaces: names of network interfaces that are up.
        hostname: of this machine.
        address: to which the hostname resolves.
        compiler: the path of a C++ compiler.
        disk: the folder of runs.
        disk_free: bytes free there.
        variables: of the environment, those in `VARIABLES`.
    """

    python: tuple[int, int]
    torch: str
    numpy: str | None
    built_for: str | None
    gpus: int
    gpu_driver: bool
    processor: str
    cores: int
    allowed_cores: int
    core_quota: float | None
    memory: int
    available_memory: int
    memory_limit: int | None
    swap_used: int
    shared_memory: int | None
    shared_memory_free: int | None
    open_files: int | None
    processes: int | None
    locked_memory: int | None
    infiniband: bool
    interfaces: tuple[str, ...]
    hostname: str
    address: str | None
    compiler: str | None
    disk: Path
    disk_free: int
    variables: Mapping[str, str]

    @property
    def usable_memory(self) -> int:
        """Bytes that training can have now."""
        return min(self.available_memory, self.memory_limit or self.available_memory)

    @property
    def usable_cores(self) -> int:
        """Cores that training can have, 1 or more."""
        return max(1, min(self.allowed_cores, int(self.core_quota or self.allowed_cores)))


def gather_facts(environment: Mapping[str, str], disk: Path) -> Facts:
    """Read all facts, without changing or sending anything.

    Args:
        environment: the process's variables.
        disk: an existing folder for runs.
    """
    memory, (shared, shared_free) = psutil.virtual_memory(), _shared_memory()
    hostname = socket.gethostname()
    major, minor = platform.python_version_tuple()[:2]
    return Facts(
        python=(int(major), int(minor)),
        torch=torch.__version__,
        numpy=_version("numpy"),
        built_for=accelerator.built_for(),
        gpus=accelerator.count(),
        gpu_driver=(ROOT / "proc/driver/nvidia/version").exists(),
        processor=processor(),
        cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0)),
        core_quota=core_quota(),
        memory=memory.total,
        available_memory=memory.available,
        memory_limit=memory_limit(),
        swap_used=psutil.swap_memory().used,
        shared_memory=shared,
        shared_memory_free=shared_free,
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any((ROOT / "sys/class/infiniband").glob("*")),
        interfaces=tuple(sorted(name for name, state in psutil.net_if_stats().items() if state.isup)),
        hostname=hostname,
        address=_address(hostname),
        compiler=next(filter(None, map(shutil.which, COMPILERS)), None),
        disk=disk,
        disk_free=shutil.disk_usage(disk).free,
        variables={name: environment[name] for name in VARIABLES if name in environment},
    )


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroups of this process allow, the smallest limit of all levels; None without a limit."""
    limits = []
    for folder, own in ((_cgroup(root, ""), "memory.max"), (_cgroup(root, "memory"), "memory.limit_in_bytes")):
        limits += [int(fields[0]) for fields in _up(folder, own) if fields[0].isdecimal()]
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def core_quota(root: Path = ROOT) -> float | None:
    """CPU time per second that the cgroups of this process allow, in cores; None without a limit."""
    quotas = [fields for fields in _up(_cgroup(root, ""), "cpu.max") if len(fields) == 2]
    folder = _cgroup(root, "cpu")
    periods = [fields[0] for fields in _up(folder, "cpu.cfs_period_us")]
    quotas += [[fields[0], period] for fields, period in zip(_up(folder, "cpu.cfs_quota_us"), periods, strict=False)]
    numbers = [int(quota) / int(period) for quota, period in quotas if quota.isdecimal() and int(period)]
    return min(numbers, default=None)


def processor(root: Path = ROOT) -> str:
    """The name of the CPU."""
    facts = (_read(root / "proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def _cgroup(root: Path, controller: str) -> Path:
    """The folder of this process's cgroup: of version 2 without a controller, of version 1 with one.

    In a container the path is often the host's, and the mounted root is the process's own cgroup.
    """
    top = root / "sys/fs/cgroup" / controller
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if controller else not controllers:
            own = top / path.strip("/")
            return own if own.is_dir() and ".." not in path else top
    return top


def _up(folder: Path, name: str) -> list[list[str]]:
    """The fields of a file, in a cgroup's folder and in those above it."""
    folders = [f for f in (folder, *folder.parents) if "cgroup" in f.parts]
    return [fields for fields in ((_read(f / name) or "").split() for f in folders) if fields]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _shared_memory() -> tuple[int, int] | tuple[None, None]:
    """Bytes of /dev/shm, and free ones."""
    try:
        facts = os.statvfs(ROOT / "dev/shm")
    except OSError:
        return None, None
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _limit(kind: int) -> int | None:
    """A soft limit; None for none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _address(hostname: str) -> str | None:
    try:
        return str(socket.getaddrinfo(hostname, None)[0][4][0])
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
