"""The profile of this machine: rates that `zeroshard doctor` measured, in a file for the planner."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zeroshard.doctor.hardware import (
    COMMUNICATORS,
    OPERATIONS,
    Device,
    HardwareTable,
    Link,
    Machines,
    communicator_bytes,
)
from zeroshard.errors import DataError, PlanError

VERSION = 1
PAIR = 2  # processes that measure at once
Transport = Literal["network", "shared"]
Clock = Literal["wall", "cpu"]


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured operation: the bytes that a rank sends, and seconds by the clock and of CPU time per rank."""

    nbytes: int
    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Beside:
    """The rates of one process beside another: FLOP/s of fp32 matrices, and bytes/s of a copy."""

    matrix: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """The measurements of one machine.

    Attributes:
        version: of the file format.
        date: of the measurement, as ISO 8601.
        machine: the processor or the GPU.
        kind: "cpu", or the type of an accelerator by torch's name.
        torch: its version.
        threads: of CPU kernels in each process.
        cores: number that this process may use.
        devices: number of GPUs; 1 on CPUs.
        device_memory: bytes of a GPU; on CPUs the available bytes of host memory.
        device_overhead: bytes of a GPU in use before the first tensor.
        host_memory: available bytes.
        shared_memory: bytes of /dev/shm; 0 without.
        matrix_flops: FLOP/s by dtype, one process alone.
        memory_bandwidth: bytes/s that a copy reads and writes, one process alone.
        beside: both rates in each of two processes at once; None where that was not measured.
        op_seconds: time of one small operation with autograd.
        host_up: bytes/s from pinned memory to the GPU; None without one.
        host_down: bytes/s back.
        disk_write: bytes/s of a file written and synced; None where it could not be measured.
        disk_read: bytes/s of the same file read again.
        collectives: by transport ("network", "shared") and operation, by size; between two processes.
        signal: a gather in memory that all ranks map, which only signals; None without shared memory.
        problems: by quantity, why it could not be measured.
    """

    date: str
    machine: str
    kind: str
    torch: str
    threads: int
    cores: int
    devices: int
    device_memory: int
    device_overhead: int
    host_memory: int
    shared_memory: int
    matrix_flops: Mapping[str, float]
    memory_bandwidth: float
    beside: Beside | None
    op_seconds: float
    host_up: float | None
    host_down: float | None
    disk_write: float | None
    disk_read: float | None
    collectives: Mapping[str, Mapping[str, tuple[Timing, ...]]]
    signal: Timing | None
    problems: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write the profile as JSON; makes its folder.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            raise DataError(f"The profile {path} cannot be written ({error.strerror}); name another file.") from error

    @classmethod
    def load(cls, path: Path) -> "MachineProfile":
        """Read a profile written by `save`.

        Raises:
            DataError: no such file, or no profile of this version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return _profile(content)
        except OSError as error:
            raise DataError(
                f"The profile {path} cannot be read ({error.strerror}); `zeroshard doctor` makes one."
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no profile of this machine ({error}); `zeroshard doctor` makes one.") from error

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @property
    def transport(self) -> Transport:
        """The transport between ranks of this machine that `Plan` takes by default."""
        return "shared" if self.kind == "cpu" and "shared" in self.collectives else "network"

    def machines(
        self, count: int, transport: Transport = "network", clock: Clock = "wall", memory: int | None = None
    ) -> Machines:
        """This machine with `count` ranks.

        Args:
            transport: of collectives; messages of pipelines always go through the network.
            clock: by which collectives are timed: elapsed time ("wall") or CPU time ("cpu").
            memory: bytes for each rank; on CPUs an equal share of what was available by default.

        Raises:
            PlanError: more ranks than GPUs, or collectives that could not be measured.
        """
        if count < 1 or (self.kind != "cpu" and count > self.devices):
            have = f"{self.devices} GPU{'s' * (self.devices > 1)}" if self.kind != "cpu" else "CPUs"
            raise PlanError(f"{count} ranks on this machine, which has {have}: ask for fewer, or name a device.")
        shared = self.host_memory // count
        link = self._link(transport, clock) if count > 1 else Link(math.inf)
        device = self._device(count, memory or (shared if self.kind == "cpu" else self.device_memory))
        disk = 2 / (1 / self.disk_read + 1 / self.disk_write) if self.disk_read and self.disk_write else None
        local = self.kind == "cpu"
        return Machines(device, count, count, link, link, self.host_memory, local, disk_bandwidth=disk)

    def _device(self, count: int, memory: int) -> Device:
        matrix, copies, communicator = 1.0, 1.0, communicator_bytes(self.kind)
        libraries = self.device_overhead + (count > 1) * COMMUNICATORS * communicator
        if self.kind == "cpu" and count > 1:
            if self.beside is not None:
                matrix = min(1.0, self.beside.matrix / self.matrix_flops["fp32"])
                copies = min(1.0, self.beside.memory / self.memory_bandwidth) * PAIR / count
            matrix *= min(1.0, max(PAIR * self.threads, self.cores) / (count * self.threads))
        return Device(
            name=self.machine,
            kind=self.kind,
            memory_bytes=memory,
            matrix_flops={dtype: rate * matrix for dtype, rate in self.matrix_flops.items()},
            memory_bandwidth=self.memory_bandwidth * copies,
            launch_seconds=self.op_seconds,
            overhead_bytes=min(libraries, memory - 1),
            communicator_bytes=communicator,
            host_link=None if self.host_up is None or self.host_down is None else min(self.host_up, self.host_down),
            source=f"Measured by zeroshard doctor on {self.date[:10]}, torch {self.torch}, {self.threads} threads.",
        )

    def _link(self, transport: Transport, clock: Clock) -> Link:
        found = {**self.collectives.get("network", {}), **self.collectives.get(transport, {})}
        if transport not in self.collectives or any(operation not in found for operation in OPERATIONS):
            why = next((self.problems[name] for name in (transport, "network") if name in self.problems), "")
            raise PlanError(
                f"The profile has no times of collectives over {transport}{f' ({why})' if why else ''}; "
                "run `zeroshard doctor` again."
            )
        tables = {
            operation: HardwareTable(tuple((row.nbytes, getattr(row, clock)) for row in rows))
            for operation, rows in found.items()
        }
        return Link(
            latency=getattr(self.signal, clock) if transport == "shared" and self.signal else 0.0, tables=tables
        )


def default_path(environment: Mapping[str, str]) -> Path:
    """Path of the profile: zeroshard/machine.json in the user's cache folder.

    Args:
        environment: the process's variables, of which XDG_CACHE_HOME names that folder if it is set.
    """
    given = environment.get("XDG_CACHE_HOME", "")
    cache = Path(given) if Path(given).is_absolute() else Path(environment.get("HOME") or Path.home()) / ".cache"
    return cache / "zeroshard" / "machine.json"


def _profile(content: Any) -> MachineProfile:
    names = {entry.name for entry in dataclasses.fields(MachineProfile)}
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else content
        raise ValueError(f"its version is {version!r}, and this program reads {VERSION}")
    if content.keys() != names:
        raise ValueError(f"fields are missing or unknown: {', '.join(sorted(content.keys() ^ names))}")
    beside, signal = content.pop("beside"), content.pop("signal")
    collectives = {
        transport: {operation: tuple(Timing(**row) for row in rows) for operation, rows in operations.items()}
        for transport, operations in content.pop("collectives").items()
    }
    _check_numbers(content)
    return MachineProfile(
        **content,
        beside=None if beside is None else Beside(**beside),
        signal=None if signal is None else Timing(**signal),
        collectives=collectives,
    )


def _check_numbers(content: dict[str, Any]) -> None:
    texts = ("date", "machine", "kind", "torch", "problems", "matrix_flops")
    numbers = {name: value for name, value in content.items() if name not in texts}
    for name, value in {**numbers, **content["matrix_flops"]}.items():
        missing = value is None and name.startswith(("host_", "disk_"))
        if not missing and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise ValueError(f"{name} is {value!r}; it must be 0 or more, and finite")
