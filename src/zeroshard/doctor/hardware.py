"""The hardware that a plan is made for: rates of one device, rates of its links, and the number of devices.

Every rate is an attainable one: in a preset the vendor's peak times a stated efficiency (`devices.toml`), in a profile
of `zeroshard doctor` a measured one, in a file of the user the one given there.

[Note: traffic between nodes] Devices of one node share its network. A ring over several nodes sends one stream through
it, and s groups side by side (stride s) send s. Where every rank sends to every other (an exchange everywhere, a gather
between CPUs), each of the group's p ranks in the node sends to the N - p outside.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from zeroshard.doctor.presets import (
    DTYPES,
    Card,
    assumed,
    card_names,
    card_of,
    card_table,
    read_number,
    read_toml,
    refuse_unknown,
)
from zeroshard.errors import ConfigError, PlanError
from zeroshard.text import format_bytes, parse_bytes

Operation = Literal["gather", "exchange", "send"]
UPDATE_TRAFFIC = 28 / 12  # bytes that a host Adam moves per byte of states: 12 read, 12 written, gradient and weight
OPERATIONS: tuple[Operation, ...] = ("gather", "exchange", "send")
ROUNDS = {"cpu": 1, "cuda": 512, "xpu": 512}  # bytes to which allocations are rounded up; 512 by torch's allocators
COMMUNICATORS = 2  # of NCCL, whose buffers count as overhead: those of gathers and of reductions
EXAMPLE = 'device = "A100-80", nodes = 4, per_node = 8, inside_gbps = 1800, between_gbps = 400, host_memory = "1024GiB"'


@dataclass(frozen=True, slots=True)
class HardwareTable:
    """Measured times by size.

    Attributes:
        points: (bytes, seconds), sizes ascending, one or more.

    Raises:
        ConfigError: no points, sizes that do not ascend, or a number out of range.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [nbytes for nbytes, _ in self.points]
        if not sizes or any(a >= b for a, b in pairwise(sizes)):
            raise ConfigError(f"The sizes of a table are {sizes}; they must ascend, and there must be one or more.")
        if sizes[0] <= 0 or not all(0 < number < math.inf for point in self.points for number in point):
            raise ConfigError(
                f"A table has the points {self.points}; bytes and seconds must be more than 0 and finite."
            )

    def seconds(self, nbytes: float) -> float:
        """Linear between points, proportional beyond the last, the first point's time below the first."""
        at = bisect_left(self.points, (nbytes, 0.0))
        if at == 0:
            return self.points[0][1]
        smaller, seconds = self.points[at - 1]
        if at == len(self.points):
            return seconds * nbytes / smaller
        above, longer = self.points[at]
        return seconds + (longer - seconds) * (nbytes - smaller) / (above - smaller)


@dataclass(frozen=True)
class Device:
    """One device, with attainable rates.

    Attributes:
        name: for people.
        kind: "cpu", or the type of an accelerator by torch's name ("cuda" for ROCm too).
        memory_bytes: all of its memory (on CPUs: a rank's share of the host's).
        matrix_flops: matrix products' FLOP/s by dtype ("fp32", "bf16", "fp16"); a dtype left out runs as fp32.
        memory_bandwidth: bytes/s, read and written together.
        launch_seconds: time of the smallest operation.
        overhead_bytes: bytes of `memory_bytes` taken by context and libraries, with `COMMUNICATORS` of NCCL.
        communicator_bytes: bytes that each further communicator takes.
        peak_share: share of the vendor's peak that `matrix_flops` are; 1 for measured rates.
        host_link: bytes/s from and to host memory, each way; None where the device is the host.
        source: of the numbers, in one sentence.

    Raises:
        ConfigError: a number out of range, or an unknown kind or dtype.
    """

    name: str
    kind: str
    memory_bytes: int
    matrix_flops: Mapping[str, float]
    memory_bandwidth: float
    launch_seconds: float
    overhead_bytes: int = 0
    host_link: float | None = None
    source: str = ""
    communicator_bytes: int = 0
    peak_share: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ROUNDS:
            raise ConfigError(f"{self.name}: kind is {self.kind!r}; it must be one of {', '.join(ROUNDS)}.")
        if "fp32" not in self.matrix_flops or not set(self.matrix_flops) <= set(DTYPES):
            found = ", ".join(self.matrix_flops) or "nothing"
            raise ConfigError(f"{self.name}: matrix_flops has {found}; give fp32, and bf16 and fp16 if they differ.")
        rates = {"memory_bandwidth": self.memory_bandwidth, **self.matrix_flops}
        if self.host_link is not None:
            rates["host_link"] = self.host_link
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                raise ConfigError(f"{self.name}: {name} is {rate}; it must be more than 0 and finite.")
        if not 0 <= self.launch_seconds < math.inf:
            raise ConfigError(f"{self.name}: launch_seconds is {self.launch_seconds}; it must be 0 or more and finite.")
        if not 0 <= self.overhead_bytes < self.memory_bytes:
            sizes = f"{self.overhead_bytes:,} of {self.memory_bytes:,} bytes"
            raise ConfigError(f"{self.name}: overhead takes {sizes}; some memory must be left for tensors.")

    @property
    def capacity_bytes(self) -> int:
        """Bytes that tensors can use."""
        return self.memory_bytes - self.overhead_bytes

    def beside(self, communicators: int) -> int:
        """Bytes that tensors can use beside so many communicators of NCCL."""
        return max(0, self.capacity_bytes - max(0, communicators - COMMUNICATORS) * self.communicator_bytes)

    @property
    def rounds(self) -> int:
        """Granularity of allocations, in bytes."""
        return ROUNDS[self.kind]

    def op_seconds(self, flops: float, nbytes: float, dtype_name: str = "fp32") -> float:
        """Time of one operation by the roofline model.

        Args:
            flops: of its matrix products.
            nbytes: bytes read and written.
            dtype_name: "fp32", "bf16" or "fp16".
        """
        rate = self.matrix_flops.get(dtype_name, self.matrix_flops["fp32"])
        work = max(flops / rate, nbytes / self.memory_bandwidth)
        if self.kind != "cpu":  # launches are hidden, unless operations are shorter
            return max(work, self.launch_seconds)
        return work + self.launch_seconds


@dataclass(frozen=True)
class Link:
    """A link between devices: a rate and a latency, or measured times of each operation.

    Attributes:
        bandwidth: bytes/s that one device sends while it receives as much.
        latency: seconds of one message, or of one step of a ring.
        tables: by operation, seconds by the bytes that one rank sends; used instead of the rate.

    Raises:
        ConfigError: a number out of range, or neither a rate nor all tables.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    tables: Mapping[str, HardwareTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bandwidth is None and any(operation not in self.tables for operation in OPERATIONS):
            found = ", ".join(self.tables) or "nothing"
            raise ConfigError(f"A link has times for {found}; it needs {', '.join(OPERATIONS)}, or a bandwidth.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigError(f"A link has {self.bandwidth} bytes/s; it must have more than 0.")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"The latency of a link is {self.latency} s; it must be 0 or more and finite.")

    def seconds(self, operation: Operation, nbytes: float, ranks: int = 2) -> float:
        """Time of one collective.

        Args:
            operation: "gather", "exchange" (with the sum) or "send".
            nbytes: of the whole buffer [N*S], of which each rank sends (N-1)/N; of the message for "send".
            ranks: N, the size of the group; nothing is sent in a group of one.
        """
        if ranks < 2:
            return 0.0
        steps = 1 if operation == "send" else ranks - 1
        sent = nbytes if operation == "send" else nbytes * (ranks - 1) / ranks
        if operation in self.tables:
            return self.tables[operation].seconds(sent)
        assert self.bandwidth is not None
        return steps * self.latency + sent / self.bandwidth


@dataclass(frozen=True)
class Machines:
    """Equal devices in equal nodes; ranks fill one node after the other.

    Attributes:
        device: the kind of all devices.
        count: number of devices.
        per_node: devices in one node.
        inside: link between devices of one node; each device has its own.
        between: link of one node to the others, which its devices share.
        host_memory: bytes of one node's host memory; None is no limit.
        local: whether these are the CPUs of this machine, on which a step can be tried out.
        host_bandwidth: bytes/s of one node's host memory, read and written, which its devices share; assumed if None.
        disk_bandwidth: bytes/s of one node's disk, half of them read and half written; assumed if None.

    Raises:
        ConfigError: a number out of range.
    """

    device: Device
    count: int
    per_node: int
    inside: Link
    between: Link
    host_memory: int | None = None
    local: bool = False
    host_bandwidth: float | None = None
    disk_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.host_memory is not None and self.host_memory < 1:
            raise ConfigError(f"host_memory is {self.host_memory}; it must be 1 or more, or absent for no limit.")

    @classmethod
    def of(cls, name: str, count: int, per_node: int | None = None, between_gbps: float | None = None) -> "Machines":
        """Cards of one kind, with the links that such machines come with.

        Args:
            name: of a built-in card, or the path of a file with the keys of one.
            between_gbps: rate of one node, in gigabits (10^9) per second and direction.

        Raises:
            PlanError, ConfigError: no such card, or a wrong file.
        """
        card, efficiency = card_of(name), card_table()["efficiency"]["link"]
        gbps = between_gbps or card.between_gbps
        return cls(
            _attainable(card),
            count,
            per_node or assumed("per_node"),
            Link(card.inside_gbytes * 1e9 * efficiency, assumed("inside_latency")),
            Link(gbps * 1e9 / 8 * efficiency, assumed("between_latency")),
        )

    @classmethod
    def load(cls, path: Path) -> "Machines":
        """Read a TOML file: a device (the name of a preset, or a table of its own), nodes, and links.

        Rates of links are attainable ones, in gigabits (10^9) per second and direction.

        Raises:
            ConfigError: the file cannot be read, or describes no machines.
        """
        table = read_toml(path)
        try:
            return _machines(table)
        except (ConfigError, PlanError) as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def nodes(self) -> int:
        """Nodes, the last of which may be partly used."""
        return -(-self.count // self.per_node)

    def leaves(self, ranks: int, stride: int = 1) -> bool:
        """Whether some group of `ranks` ranks, each `stride` after the one before, has members on several nodes.

        Groups are those into which all ranks fall: blocks of ranks·stride ranks with `stride` groups in each.
        """
        block = ranks * stride
        return ranks > 1 and self.count > self.per_node and (block > self.per_node or self.per_node % block != 0)

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The link of the slowest group; see `leaves`."""
        return self.between if self.leaves(ranks, stride) else self.inside

    def wire_seconds(self, operation: Operation, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Time of one collective, with concurrent ones in the parallel groups ([Note: traffic between nodes]).

        Args:
            operation: "gather", "exchange" (with the sum) or "send" (to the rank `stride` further; `ranks` is then 2,
                or as many stages as there are, for the slowest of their links).
            nbytes: of the whole buffer [N*S], of which each rank sends (N-1)/N; of the message for "send".
            ranks: N, the size of the group.
            stride: the distance of its ranks.
        """
        if not self.leaves(ranks, stride):
            return self.inside.seconds(operation, nbytes, ranks)
        beside = min(stride, self.per_node)
        members = min(ranks - 1, max(1, self.per_node // stride))
        pairwise = operation == "exchange" or (operation == "gather" and self.device.kind == "cpu")
        load = beside * (members * (ranks - members) / (ranks - 1) if pairwise else 1)
        within = self.inside.seconds(operation, nbytes, ranks) if members > 1 and operation != "send" else 0.0
        return max(within, self.between.seconds(operation, nbytes * load, ranks))

    def all_reduce_seconds(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Time of a sum that all ranks of a group get, by rings: one that scatters, and one that gathers.

        Args:
            nbytes: of the buffer.
            ranks: N, the size of the group; stride: the distance of its ranks.
        """
        return 2 * self.wire_seconds("gather", nbytes, ranks, stride)

    @property
    def host_rate(self) -> float:
        """Bytes/s of host memory, read and written, for each device: on CPUs it is the device's own memory."""
        if self.device.kind == "cpu":
            return self.device.memory_bandwidth
        whole = self.host_bandwidth or 1e9 * assumed("host_memory_gbytes")
        return float(whole / min(self.count, self.per_node))

    @property
    def host_room(self) -> int:
        """Bytes of a node's host memory for each of its devices."""
        return sys.maxsize if self.host_memory is None else self.host_memory // min(self.count, self.per_node)

    def node_holds(self, nbytes: float) -> bool:
        """Whether a node's host memory has so many bytes."""
        return nbytes <= self.host_room * min(self.count, self.per_node)

    def copy_seconds(self, nbytes: float) -> float:
        """Time of a copy between a device and its host's memory, with another in the other direction."""
        if self.device.kind == "cpu":
            return 2 * nbytes / self.host_rate
        return float(nbytes / (self.device.host_link or 1e9 * assumed("host_gbytes")))

    def update_seconds(self, nbytes: float) -> float:
        """Time of an update on the host over `nbytes` of states."""
        return UPDATE_TRAFFIC * nbytes / self.host_rate

    def disk_seconds(self, nbytes: float) -> float:
        """Time to read `nbytes` of states from the disk and to write them back."""
        whole = self.disk_bandwidth or 1e9 * assumed("disk_gbytes")
        return float(2 * nbytes * min(self.count, self.per_node) / whole)

    def __str__(self) -> str:
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.count} x {self.device.name} ({format_bytes(self.device.memory_bytes)}){nodes}"


def preset(name: str) -> Device:
    """A built-in card, or one of a file ([`card_of`][zeroshard.doctor.presets.card_of]), with attainable rates.

    Raises:
        PlanError, ConfigError: no such card, or a wrong file.
    """
    return _attainable(card_of(name))


def _attainable(card: Card) -> Device:
    efficiency = card_table()["efficiency"]
    share = f"{efficiency['matrix']:.0%} of the matrix rate and {efficiency['memory']:.0%} of the memory's are assumed"
    return Device(
        name=card.name,
        kind="cuda",
        memory_bytes=card.memory,
        matrix_flops={dtype: 1e12 * rate * efficiency["matrix"] for dtype, rate in card.peak_tflops.items()},
        memory_bandwidth=1e9 * card.memory_gbytes * efficiency["memory"],
        launch_seconds=assumed("launch_seconds"),
        overhead_bytes=parse_bytes(assumed("overhead")),
        host_link=1e9 * card.host_gbytes * efficiency["host"],
        source=f"{card.source}; {share}.",
        communicator_bytes=communicator_bytes("cuda"),
        peak_share=efficiency["matrix"],
    )


def communicator_bytes(kind: str) -> int:
    """Bytes that a communicator of NCCL is assumed to take of a device of a kind."""
    return parse_bytes(assumed("communicator") if kind != "cpu" else 0)


def _machines(table: Mapping[str, Any]) -> Machines:
    keys = ("device", "nodes", "per_node", "inside_gbps", "between_gbps", "host_memory", "host_memory_gbytes")
    refuse_unknown(table, keys, "a description of machines", EXAMPLE)
    if "device" not in table:
        raise ConfigError(f"there is no device; write {EXAMPLE}.")
    described = table["device"]
    nodes, per_node = _whole(table, "nodes"), _whole(table, "per_node")
    inside, between = _link(table, "inside_gbps", per_node > 1), _link(table, "between_gbps", nodes > 1)
    if isinstance(described, str):
        standard = Machines.of(described, nodes * per_node, per_node)
        device, inside, between = standard.device, inside or standard.inside, between or standard.between
    elif isinstance(described, dict):
        device = _device(described)
    else:
        raise ConfigError(f"device is {described!r}; it must be a name, such as {card_names()[0]!r}, or a table.")
    for name, link, others in (("inside_gbps", inside, per_node > 1), ("between_gbps", between, nodes > 1)):
        if others and link is None:
            raise ConfigError(f"{name} is missing, and there are several to link; give it in gigabits per second.")
    memory = parse_bytes(table["host_memory"]) if "host_memory" in table else None
    bandwidth = read_number(table, "host_memory_gbytes")
    unused = Link(math.inf)
    host = None if bandwidth is None else 1e9 * bandwidth
    inside, between = inside or unused, between or unused
    return Machines(device, nodes * per_node, per_node, inside, between, memory, host_bandwidth=host)


def _device(table: Mapping[str, Any]) -> Device:
    example = 'name = "mine", kind = "cuda", memory = "24GiB", tflops = { fp32 = 20, bf16 = 80 }, memory_gbytes = 800'
    keys = ("name", "kind", "memory", "overhead", "tflops", "memory_gbytes", "host_gbytes", "launch_us")
    refuse_unknown(table, keys, "a device", example)
    for key in ("memory", "tflops", "memory_gbytes"):
        if key not in table:
            raise ConfigError(f"the device has no {key}; write {example}.")
    if not isinstance(table["tflops"], dict):
        raise ConfigError(f"tflops is {table['tflops']!r}; it must be a table, such as {{ fp32 = 20, bf16 = 80 }}.")
    host, launch = read_number(table, "host_gbytes"), read_number(table, "launch_us")
    kind = table.get("kind", "cuda")
    return Device(
        name=str(table.get("name", "own device")),
        kind=kind,
        memory_bytes=parse_bytes(table["memory"]),
        matrix_flops={dtype: 1e12 * (read_number(table["tflops"], dtype) or 0.0) for dtype in table["tflops"]},
        memory_bandwidth=1e9 * (read_number(table, "memory_gbytes") or 0.0),
        launch_seconds=assumed("launch_seconds") if launch is None else 1e-6 * launch,
        overhead_bytes=parse_bytes(table.get("overhead", assumed("overhead") if kind != "cpu" else 0)),
        host_link=None if host is None else 1e9 * host,
        source="As the file says.",
        communicator_bytes=communicator_bytes(kind),
    )


def _link(table: Mapping[str, Any], key: str, needed: bool) -> Link | None:
    gbps = read_number(table, key)
    latency = assumed(key.replace("gbps", "latency"))
    return None if gbps is None or not needed else Link(gbps * 1e9 / 8, latency)


def _whole(table: Mapping[str, Any], key: str) -> int:
    """The whole number under a key; 1 where there is none."""
    number = table.get(key, 1)
    if type(number) is not int or number < 1:
        raise ConfigError(f"{key} is {number!r}; it must be a whole number of 1 or more.")
    return number
