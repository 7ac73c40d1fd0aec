"""Rehearsal: the collectives of one rank when no other process exists, so that an engine can be run and measured.

A collective ends at once. Every other rank is assumed to send and to hold the same as this one; tensors without values
are not moved at all. The counts of comm and its buffers are those of a real run.

[Note: predicted time] A virtual clock advances by the time that each operation would take. A collective occupies its
link from its start, and a wait for it takes only the time that is left; so the overlap is that of the engine.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zeroshard.memory import Disk, HostMemory, Room, SimulatedDisk
from zeroshard.memory.ledger import Ledger
from zeroshard.memory.transfers import Eager, Modelled, Task, TaskRunner
from zeroshard.platform.real import Platform
from zeroshard.platform.shared_memory import SharedMemory, Signal
from zeroshard.platform.transport import Arrival, Bounds, Group, Network, Scratch, Sizes

WireSeconds = Callable[[str, int, Sequence[int]], float]  # of an operation, its bytes and its ranks
LinkOf = Callable[[Sequence[int]], str]  # the name of the link between some ranks
Make = Callable[[int, torch.dtype], torch.Tensor]  # zeroed elements


@dataclass(slots=True)
class Clock:
    """Predicted time on one rank.

    Attributes:
        now: seconds since the start.
        spent: seconds by cause; they add up to `now`.
        cause: of the current operations.
        link_free: time from which each link is free.
        stands: whether the clock is stopped, for operations that would run beside the main thread.
        waits: for transfers, as (end, seconds).
    """

    now: float = 0.0
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    cause: str = "compute"
    link_free: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stands: bool = False
    waits: list[tuple[float, float]] = field(default_factory=list)

    def spend(self, seconds: float, cause: str | None = None) -> None:
        """Advance the clock, unless it is stopped."""
        if self.stands:
            return
        self.now += seconds
        self.spent[cause or self.cause] += seconds

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stop the clock inside."""
        before, self.stands = self.stands, True
        try:
            yield
        finally:
            self.stands = before

    def occupy(self, link: str, seconds: float) -> float:
        """Put a transfer on a link; returns the time of its arrival."""
        self.link_free[link] = max(self.now, self.link_free[link]) + seconds
        return self.link_free[link]

    def wait_until(self, end: float) -> None:
        """Wait for a transfer that arrives at `end`."""
        if end > self.now:
            seconds = end - self.now
            self.spend(seconds, "wire")
            self.waits.append((self.now, seconds))


@dataclass(frozen=True)
class Rehearsal(Platform):
    """The platform of one rank whose peers do not exist.

    Attributes:
        members: the ranks of the mesh by their numbers in the whole world.
        shares: whether the ranks are assumed to share memory, where the plan lets them.
        values: whether tensors have values; a collective then fills results with this rank's own.
        measured: whether compute time is measured CPU time; the clock then only adds the time of collectives.
        apart: whether the CPU time of copies between tiers and of host jobs then counts by their causes.
        clock: of the rehearsal.
        wire_seconds: gives the time of a collective; 0 by default.
        link_of: gives the link that a collective takes; one for all by default.
        made: called with each buffer in common memory, and the number of ranks.
        compute: called with the bytes and the number of skipped operations.
        task_seconds: gives the time of a copy between tiers, or of a host job; 0 by default.
        make_on_host: makes each buffer that is not on the device.
        host_room: bytes of host memory for this rank.
        accelerated: whether the ranks are assumed to have accelerators, whose collectives send all slices at once.
        beside_devices: gives a context in which new tensors are where the model was made.
    """

    imitates: ClassVar[bool] = True

    members: Sequence[int]
    shares: bool = False
    values: bool = False
    measured: bool = False
    apart: bool = False
    clock: Clock = field(default_factory=Clock)
    wire_seconds: WireSeconds = lambda operation, nbytes, members: 0.0
    link_of: LinkOf = lambda members: ""
    made: Callable[[torch.Tensor, int], None] = lambda buffer, ranks: None
    compute: Callable[[int, int], None] = lambda nbytes, operations: None
    task_seconds: Callable[[Task], float] = lambda task: 0.0
    make_on_host: Make = lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    host_room: int = 0
    accelerated: bool = False
    beside_devices: Callable[[], AbstractContextManager[None]] = nullcontext

    def part(self, ranks: Sequence[int]) -> "Rehearsal":
        """The rehearsal of a mesh of some of the ranks."""
        return replace(self, members=[self.members[rank] for rank in ranks])

    def now(self) -> float:
        """Seconds of the clock, or of CPU time."""
        return time.process_time() if self.measured else self.clock.now

    def network(self, rank: int, ranks: int, device: torch.device) -> Network:
        """A network without other ranks."""
        return RehearsedNetwork(rank, ranks, device, self)

    def share(
        self, rank: int, ranks: int, agree_on: Callable[[Any, str], list[Any]], nbytes: int
    ) -> SharedMemory | str:
        """Memory that no other rank maps, or the reason why there is none."""
        return OwnMemory(rank, ranks, self) if self.shares else "the ranks are assumed to be on different machines"

    def decides(self, rank: int) -> bool:
        """True, as there is no other rank."""
        return True

    def skips(self, nbytes: int, operations: int) -> bool:
        """True for tensors without values; the clock advances all the same."""
        if not self.values:
            self.compute(nbytes, operations)
        return not self.values

    def rooms(self) -> list[Room]:
        """None: the rehearsed machine is another one; the planner counts its memory."""
        return []

    def host(self, ledger: Ledger, device: torch.device) -> HostMemory:
        """Memory that is only counted."""
        return HostMemory(ledger, device, make=self.make_on_host, room=self.host_room)

    def disk(self, folder: Path, ledger: Ledger, timeout: float) -> Disk:
        """A disk that is only counted."""
        return SimulatedDisk(ledger, self.make_on_host)

    def executor(self, device: torch.device, timeout: float) -> TaskRunner:
        """Tasks on the clock of the rehearsal, or by the CPU time that they take."""
        return MeasuredTasks(self.clock) if self.apart else Modelled(self.clock, self.task_seconds)

    def begin(self, operation: str, nbytes: int) -> dist.Work:
        """Put a collective onto its link; where time is measured it takes CPU time, and no overlap hides it."""
        seconds = self.wire_seconds(operation, nbytes, self.members)
        if self.measured:
            self.clock.spent["wire"] += seconds
            return Imagined(self.clock)
        return Imagined(self.clock, self.clock.occupy(self.link_of(self.members), seconds) if seconds else 0.0)

    def fill(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a buffer with copies of `values`, if tensors have values; in a real run other ranks do this work."""
        if self.values and into.numel() and values.numel():
            start = time.process_time()
            for part in into.split(values.numel()):
                part.copy_(values[: part.numel()])
            self.clock.spent["aside"] += time.process_time() - start


class MeasuredTasks(Eager):
    """Runs tasks at once, and counts their CPU time by cause, as if the main thread waited for all of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def begin(self, task: Task) -> None:
        """Run the task; its time is not counted as the main thread's."""
        before, start = self._clock.spent["aside"], time.process_time()
        task.run()
        seconds = time.process_time() - start - (self._clock.spent["aside"] - before)
        self._clock.spent["aside"] += seconds
        self._clock.spent[task.cause] += seconds


class RehearsedNetwork(Network):
    """The network of a rehearsal."""

    def __init__(self, rank: int, ranks: int, device: torch.device, rehearsal: Rehearsal) -> None:
        super().__init__(rank, ranks, device)
        self._rehearsal = rehearsal
        self._rotates = self._rotates and not rehearsal.accelerated

    def gather(self, full: torch.Tensor, own: torch.Tensor, group: Group, bounds: Bounds = None) -> dist.Work:
        """A gather in which every rank holds `own`."""
        super().gather(full, own, group, bounds)
        return self._rehearsal.begin("gather", full.nbytes)

    def exchange(
        self, full: torch.Tensor, group: Group, scratch: Scratch, bounds: Bounds = None
    ) -> tuple[dist.Work, Arrival]:
        """An exchange in which every rank sends the same as this one."""
        _, arrival = super().exchange(full, group, scratch, bounds)
        return self._rehearsal.begin("exchange", full.nbytes), arrival

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, group: Group) -> dist.Work:
        """Copies of this rank's own values."""
        self._rehearsal.fill(full, own)
        return Imagined(self._rehearsal.clock)

    def all_to_all(
        self, into: torch.Tensor, out: torch.Tensor, receives: Sizes, sends: Sizes, group: Group
    ) -> dist.Work:
        """Copies of this rank's own values."""
        self._rehearsal.fill(into, out)
        return Imagined(self._rehearsal.clock)

    def all_to_all_rows(
        self, into: torch.Tensor, rows: torch.Tensor, receives: list[int], sends: list[int], group: Group
    ) -> dist.Work:
        """An exchange in which every rank has rows such as these; their values are not filled in."""
        return self._rehearsal.begin("exchange", max(into.nbytes, rows.nbytes))

    def all_reduce(self, tensor: torch.Tensor, group: Group, maximum: bool) -> dist.Work:
        """An all-reduce in which every rank holds the same."""
        rehearsal = self._rehearsal
        if rehearsal.values and not maximum:
            start = time.process_time()
            tensor.mul_(self._ranks)
            rehearsal.clock.spent["aside"] += time.process_time() - start
        return rehearsal.begin("all-reduce", tensor.nbytes)

    def gather_frames(self, frame: bytes, group: Group) -> tuple[dist.Work | None, Callable[[], list[bytes]]]:
        """A gather in which every rank sends the same frame; ends at once, and is not counted."""
        self._rehearsal.begin("gather", len(frame) * self._ranks).wait()
        return None, lambda: [frame] * self._ranks

    def broadcast(self, tensor: torch.Tensor, source: int, group: Group) -> dist.Work | None:
        """A broadcast in which the source has this rank's values."""
        return Imagined(self._rehearsal.clock)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, group: Group) -> dist.Work | None:
        """Send nothing: the simulator times messages of pipelines, except for measured CPU time."""
        rehearsal = self._rehearsal
        return rehearsal.begin("send", tensor.nbytes) if rehearsal.measured else Imagined(rehearsal.clock)

    def receive(self, into: torch.Tensor, peer: int, tag: int, group: Group) -> dist.Work | None:
        """Fill with zeros, if tensors have values."""
        self._rehearsal.fill(into, torch.zeros(1, dtype=into.dtype))
        return Imagined(self._rehearsal.clock)


class OwnMemory(SharedMemory):
    """Ordinary buffers of this process, instead of memory shared with ranks that do not exist."""

    def __init__(self, rank: int, ranks: int, rehearsal: Rehearsal) -> None:
        self.rank, self.ranks = rank, ranks
        self._rehearsal = rehearsal
        self._shared: set[int] = set()
        self._published: dict[str, torch.Tensor] = {}

    def common(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed buffer."""
        buffer = torch.zeros(numel, dtype=dtype)
        self._shared.add(buffer.untyped_storage()._cdata)
        self._rehearsal.made(buffer, self.ranks)
        return buffer

    def mine(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed buffer."""
        return torch.zeros(numel, dtype=dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Nothing: a buffer is freed with its last view."""

    def is_common(self, tensor: torch.Tensor) -> bool:
        """Whether `common` made it."""
        return tensor.untyped_storage()._cdata in self._shared

    def publish(self, label: str, tensor: torch.Tensor) -> None:
        """Store a buffer, to be read as another rank's."""
        self._published[label] = tensor

    def theirs(self, rank: int, label: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This rank's own buffer; zeros where it has too few elements."""
        own = self._published[label].view(dtype)
        return own[start : start + numel] if start + numel <= own.numel() else own.new_zeros(numel)

    def post(self, signal: Signal) -> None:
        """Do nothing, as there is no other rank."""

    def work(self, signal: Signal, number: int | None = None) -> dist.Work:  # type: ignore[override]
        """Work that takes the time of a signal to the other ranks."""
        return self._rehearsal.begin("signal", 0)


class Imagined(dist.Work):
    """Work that ends at a time of the clock; a wait for it advances the clock."""

    def __init__(self, clock: Clock, end: float = 0.0) -> None:
        super().__init__()
        self._clock, self._end = clock, end

    def is_completed(self) -> bool:
        """Whether its end has passed."""
        return self._end <= self._clock.now

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Advance the clock to the end of the work."""
        self._clock.wait_until(self._end)
        return True
