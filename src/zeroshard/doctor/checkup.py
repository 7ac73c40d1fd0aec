"""The checkup: from the facts of a machine to findings about its set-up, each with the way out.

An error stops training, and a warning makes it slow, small or confined to one machine.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from zeroshard.doctor.facts import Facts
from zeroshard.text import format_bytes

TESTED_PYTHON = (3, 11)
TESTED_TORCH = (2, 13)
NEEDED_NUMPY = (1, 26)
SHARED_MEMORY = 2**30  # bytes; containers have 64 MiB by default, too little for most models
FILES_PER_RANK = 4  # sockets of a process to each other rank: one per process group
OPEN_FILES = 1024
PROCESSES = 1024
DISK_ERROR, DISK_WARNING = 2**30, 10 * 2**30  # bytes
SWAPPED = 2**28  # bytes; a little is always swapped out

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        subject: part of the set-up.
        level: "ok", "warning" or "error".
        found: its state.
        needed: the state it should have; empty if all is well.
        way_out: the remedy; empty if all is well.
    """

    subject: str
    level: Level
    found: str
    needed: str = ""
    way_out: str = ""


def findings_of(facts: Facts) -> list[Finding]:
    """The findings, in a fixed order of subjects."""
    return [finding for check in CHECKS for finding in check(facts)]


def _versions(facts: Facts) -> Iterator[Finding]:
    python, text = facts.python, f"Python {_dotted(facts.python)}"
    if python == TESTED_PYTHON:
        yield Finding("Python", "ok", text)
    else:
        old, needed = python < TESTED_PYTHON, f"zeroshard is tested with {_dotted(TESTED_PYTHON)}"
        yield Finding("Python", "error" if old else "warning", text, needed, "Make a virtual environment with it.")
    torch, text = _numbers(facts.torch), f"torch {facts.torch}"
    if torch == TESTED_TORCH:
        yield Finding("torch", "ok", text)
    else:
        level: Level = "error" if torch < TESTED_TORCH else "warning"
        needed = f"zeroshard is tested with {_dotted(TESTED_TORCH)}"
        yield Finding("torch", level, text, needed, f'pip install "torch=={_dotted(TESTED_TORCH)}.*"')
    if facts.numpy is None or _numbers(facts.numpy) < NEEDED_NUMPY:
        text = "no numpy" if facts.numpy is None else f"numpy {facts.numpy}"
        needed = f"torch turns tensors into bytes with {_dotted(NEEDED_NUMPY)} or newer"
        yield Finding("numpy", "error", text, needed, f'pip install "numpy>={_dotted(NEEDED_NUMPY)}"')
    else:
        yield Finding("numpy", "ok", f"numpy {facts.numpy}")


def _gpus(facts: Facts) -> Iterator[Finding]:
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if facts.gpus:
        yield Finding("GPU", "ok", f"{facts.gpus} visible, torch is built for {facts.built_for}")
    elif facts.built_for is None and facts.gpu_driver:
        found = "a driver for GPUs is loaded, and torch is built for CPUs"
        yield Finding("GPU", "warning", found, "a torch that is built for CUDA", "Install torch's build for CUDA.")
    elif facts.built_for is None:
        yield Finding("GPU", "ok", "none, and torch is built for CPUs")
    elif hidden is not None and facts.gpu_driver:
        found = f"none is visible, and CUDA_VISIBLE_DEVICES is {hidden!r}"
        yield Finding("GPU", "warning", found, "numbers of GPUs that exist, or no such variable", "Unset it.")
    elif facts.gpu_driver:
        found = f"torch is built for {facts.built_for}, a driver is loaded, and no GPU can be used"
        way = "See what nvidia-smi says; in a container, pass the GPUs in (--gpus all)."
        yield Finding("GPU", "error", found, "a driver that is new enough, and GPUs that this process may use", way)
    else:
        found = f"none, and torch is built for {facts.built_for}"
        way = "Nothing, to train on CPUs; torch's build for CPUs is smaller."
        yield Finding("GPU", "warning", found, "a driver for GPUs, to train on them", way)


def _memory(facts: Facts) -> Iterator[Finding]:
    limit, free = facts.memory_limit, format_bytes(facts.usable_memory)
    if limit is not None and limit < facts.memory:
        found = f"{format_bytes(limit)} by its cgroup, where the machine shows {format_bytes(facts.memory)}"
        way = "Plan with the smaller number (it is in the profile), or raise the container's or the job's limit."
        yield Finding("memory", "warning", found, "equal numbers: programs see the larger one", way)
    else:
        yield Finding("memory", "ok", f"{format_bytes(facts.memory)}, {free} available")
    if facts.swap_used > SWAPPED:
        found, needed = f"{format_bytes(facts.swap_used)} are swapped out", "memory that does not wait for a disk"
        yield Finding("swap", "warning", found, needed, "End processes that hold memory, or plan with less.")
    else:
        yield Finding("swap", "ok", f"{format_bytes(facts.swap_used)} swapped out")


def _cores(facts: Facts) -> Iterator[Finding]:
    quota, allowed = facts.core_quota, facts.allowed_cores
    if quota is not None and quota < allowed:
        found = f"CPU time for {quota:g} by the cgroup, where the machine shows {facts.cores}"
        way = "Set OMP_NUM_THREADS to the quota over the number of ranks, or raise the quota."
        yield Finding("cores", "warning", found, "no more threads than that, or they take turns", way)
    else:
        yield Finding("cores", "ok", f"{allowed} of {facts.cores}")
    threads = facts.variables.get("OMP_NUM_THREADS")
    sharing = f"at most {facts.usable_cores} threads, the cores, in all ranks together"
    if threads is None:
        found = "OMP_NUM_THREADS is not set, so each process takes every core"
        half = max(1, facts.usable_cores // 2)
        way = f"export OMP_NUM_THREADS={half} for two ranks; torchrun and `zeroshard train --ranks` set it themselves."
        yield Finding("threads", "ok" if facts.usable_cores == 1 else "warning", found, sharing, way)
    elif not threads.isdecimal() or not 1 <= int(threads) <= facts.usable_cores:
        found = f"OMP_NUM_THREADS is {threads!r}, and there are {facts.usable_cores} cores"
        yield Finding("threads", "warning", found, sharing, "Set it to a whole number, the cores over the ranks.")
    else:
        yield Finding("threads", "ok", f"OMP_NUM_THREADS is {threads}")


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    size, free = facts.shared_memory, facts.shared_memory_free
    if size is None or free is None:
        found, needed = "there is no /dev/shm", "a tmpfs in which ranks share memory; without it they send"
        yield Finding("shared memory", "warning", found, needed, "Mount a tmpfs there.")
    else:
        needed = f"{format_bytes(SHARED_MEMORY)} or more, for ranks of a machine to share memory; without it they send"
        way = "In a container --shm-size 8g; else mount -o remount,size=8G /dev/shm."
        short = Finding(
            "shared memory", "ok", f"/dev/shm has {format_bytes(size)}, {format_bytes(free)} free", needed, way
        )
        yield _graded(short, free, {"warning": SHARED_MEMORY})


def _limits(facts: Facts) -> Iterator[Finding]:
    for subject, limit, least, option, why in (
        ("open files", facts.open_files, OPEN_FILES, "-n", f"{FILES_PER_RANK} sockets to each other rank, and files"),
        ("processes", facts.processes, PROCESSES, "-u", "ranks, and the threads of each"),
    ):
        if limit is not None and limit < least:
            found, needed = f"the limit is {limit:,}", f"{least:,}: {why}"
            yield Finding(subject, "warning", found, needed, f"ulimit {option} {least}, or higher, before the start.")
        else:
            yield Finding(subject, "ok", "no limit" if limit is None else f"the limit is {limit:,}")
    if facts.infiniband and facts.locked_memory is not None:
        found = f"{format_bytes(facts.locked_memory)} may be locked, and there is InfiniBand"
        yield Finding("locked memory", "warning", found, "no limit, for its buffers", "ulimit -l unlimited as root.")


def _network(facts: Facts) -> Iterator[Finding]:
    outward = [name for name in facts.interfaces if name != "lo"]
    chosen, listed = facts.variables.get("GLOO_SOCKET_IFNAME"), ", ".join(facts.interfaces) or "none"
    unknown = [name for name in (chosen or "").split(",") if name and name not in facts.interfaces]
    if unknown:
        found = f"GLOO_SOCKET_IFNAME names {unknown[0]!r}; up are {listed}"
        way = f"export GLOO_SOCKET_IFNAME={(outward or ['lo'])[0]}, or unset it."
        yield Finding("network", "error", found, "an interface that is there, or no rank reaches another", way)
    elif not outward:
        way = "Nothing for one machine; else give the container a network."
        yield Finding("network", "warning", f"up are {listed}", "one besides lo, for several machines", way)
    else:
        yield Finding("network", "ok", f"up are {listed}")
    way = f"For several machines, export GLOO_SOCKET_IFNAME={(outward or ['...'])[0]} or enter the name in /etc/hosts."
    needed = "an address of this machine that others reach, for several machines"
    if chosen and not unknown:
        yield Finding("hostname", "ok", f"not asked for, as GLOO_SOCKET_IFNAME is {chosen}")
    elif facts.address is None:
        found = f"{facts.hostname!r} has no address"
        yield Finding("hostname", "warning", found, needed, way)
    elif outward and (facts.address.startswith("127.") or facts.address == "::1"):
        found = f"{facts.hostname!r} is {facts.address}, which only this machine reaches"
        yield Finding("hostname", "warning", found, needed, way)
    else:
        yield Finding("hostname", "ok", f"{facts.hostname!r} is {facts.address}")


def _tools(facts: Facts) -> Iterator[Finding]:
    if facts.compiler is None:
        found, needed = "there is no C++ compiler", "c++, g++ or clang++, for models under torch.compile"
        yield Finding("compiler", "warning", found, needed, "Install g++; without torch.compile nothing needs it.")
    else:
        yield Finding("compiler", "ok", facts.compiler)
    found = f"{format_bytes(facts.disk_free)} free in {facts.disk}"
    needed = f"{format_bytes(DISK_WARNING)} or more, for runs and checkpoints"
    short = Finding("disk", "ok", found, needed, "Free some, or keep runs in another folder.")
    yield _graded(short, facts.disk_free, {"error": DISK_ERROR, "warning": DISK_WARNING})


def _graded(short: Finding, free: int, least: Mapping[Level, int]) -> Finding:
    """A finding of the first level that needs more than the `free` bytes; "ok", without a way out, if none does."""
    level = next((level for level, needed in least.items() if free < needed), None)
    return Finding(short.subject, "ok", short.found) if level is None else replace(short, level=level)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(_versions, _gpus, _memory, _cores, _shared_memory, _limits, _network, _tools),
)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
