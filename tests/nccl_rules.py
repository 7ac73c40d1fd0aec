"""NCCL's rules on a machine without NCCL: calls of torch.distributed are recorded on gloo, and judged as between GPUs.

`recording` takes a mesh of the suite's pool, gives one whose groups stand for NCCL's, and makes `Comm` take the
branches for accelerators. Each rank checks its own calls (dtype, memory, aliases, threads); `judge` compares the ranks.

The rules are those of torch 2.13's ProcessGroupNCCL. Groups are connected at their first operation; messages of two
ranks in a group have a communicator of their own, for both directions, with one stream on each rank. A message needs
its receive: tags are ignored, and a send does not end before the receive has begun. Where the default group was made
with `device_id` ("eager"), a group has one communicator for everything.
"""

import contextlib
import gc
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard as zs
from zeroshard.comm import collectives
from zeroshard.comm.mesh import part_of
from zeroshard.memory.host import HostMemory
from zeroshard.platform import transport
from zeroshard.tensor.split import collectives as split_collectives
from zeroshard.tensor.split import technique

SUPPORTED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
NOT_SUMMED = {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}  # a sum of bools is their maximum
UNJUDGED = (
    *("barrier", "monitored_barrier", "send", "recv", "batch_isend_irecv", "all_gather", "gather", "scatter", "reduce"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "reduce_scatter"),
    *("all_to_all", "send_object_list", "recv_object_list", "new_subgroups", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce_coalesced", "all_gather_coalesced"),
)
INSIDE = ("/platform/", "/comm/collectives.py", "/comm/pending.py", "/nccl_rules.py", "/unittest/", "/contextlib.py")
MESSAGES = ("send", "receive")


class Group(NamedTuple):
    """A process group that a rank has made: its world ranks, its backend, and the call's place."""

    members: tuple[int, ...]
    backend: str
    where: str


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation that a rank has started.

    Attributes:
        number: of the operation on this rank.
        group: torch's name of the group, the same on its ranks.
        peer: the other rank of a message, in the world.
        sizes: what the ranks must agree on: elements, or for an all-to-all the bytes to and from each rank.
        tag: of a message; NCCL ignores it.
        waits: number of waits before it on this rank, which its stream takes over.
    """

    rank: int
    number: int
    kind: str
    group: str
    members: tuple[int, ...]
    dtype: str
    sizes: Any
    where: str
    waits: int
    peer: int = -1
    tag: int = 0

    @property
    def pair(self) -> tuple[int, int]:
        """The sender and the receiver of a message."""
        return (self.rank, self.peer) if self.kind == "send" else (self.peer, self.rank)

    def communicator(self, eager: bool = False) -> tuple[Any, ...]:
        """The communicator, whose operations run one after the other on each rank."""
        return (self.group, *sorted(self.pair)) if self.peer >= 0 and not eager else (self.group,)

    def __str__(self) -> str:
        to = {"send": f" to rank {self.peer}", "receive": f" from rank {self.peer}"}.get(self.kind, "")
        return f"rank {self.rank}: {self.kind}{to} ({self.where})"


@dataclass(slots=True)
class Record:
    """What one rank did.

    Attributes:
        waits: numbers of operations, in the order of waits that have ended.
        findings: rules that its own calls broke.
        most: communicators that had operations under way at once, at most.
    """

    rank: int
    groups: list[Group] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    most: int = 0

    def communicators(self, eager: bool = False) -> set[tuple[Any, ...]]:
        """The communicators that NCCL would have made."""
        return {launch.communicator(eager) for launch in self.launches}


class Recorder:
    """Records and checks the calls of one rank, between `recording`'s begin and end."""

    def __init__(self) -> None:
        self.record = Record(dist.get_rank())
        self._backends: dict[str, str] = {}
        self._host: list[Tensor] = []  # slabs in host memory; the references keep their addresses from being used again
        self._threads: dict[tuple[Any, ...], int] = {}
        self._open: dict[int, tuple[Any, ...]] = {}  # communicators of operations without a wait yet
        self._collecting = False
        self._real = {name: getattr(dist, name) for name in ("new_group", *CALLS)}
        self._slab = HostMemory.slab

    def new_group(self, ranks: Any = None, **options: Any) -> Any:
        """Make a group, and note who is in it."""
        made = self._real["new_group"](ranks, **options)
        members = tuple(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        backend = options.get("backend") or "nccl"
        self.record.groups.append(Group(members, backend, place_of(sys._getframe(1))))
        if made is not None and made != dist.GroupMember.NON_GROUP_MEMBER:
            self._backends[made.group_name] = backend
        return made

    def slab(self, memory: HostMemory, *args: Any, **options: Any) -> Tensor:
        """Make a slab, and remember that it lies in host memory."""
        made = self._slab(memory, *args, **options)
        self._host.append(made)
        return made

    def call(self, name: str, *args: Any, group: Any = None, **options: Any) -> Any:
        """One of `CALLS`."""
        real = self._real[name]
        if group is not None and self._backends.get(group.group_name) == "gloo":
            return real(*args, group=group, **options)
        where = place_of(sys._getframe(1))
        group = dist.GroupMember.WORLD if group is None else group
        members = tuple(dist.get_process_group_ranks(group))
        kind, tensors, sizes, rules = CALLS[name](args, options, group)
        ends = [options[end] for end in ("group_dst", "group_src") if end in options and kind in MESSAGES]
        peer, tag = (dist.get_global_rank(group, ends[0]), options.get("tag", 0)) if ends else (-1, 0)
        number, waits = len(self.record.launches), len(self.record.waits)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        launch = Launch(
            *(self.record.rank, number, kind, group.group_name, members, dtype, sizes, where, waits, peer, tag)
        )
        self.record.launches.append(launch)
        for rule in (*rules, *self._broken(launch, tensors)):
            self.record.findings.append(f"{launch}: {rule}")
        self._open[number] = launch.communicator()
        self.record.most = max(self.record.most, len(set(self._open.values())))
        work = real(*args, group=group, **options)
        return None if work is None else Watched(self, number, work)

    def ended(self, number: int) -> None:
        """A wait for an operation has ended."""
        if self._open.pop(number, None) is not None:
            self.record.waits.append(number)

    def collecting(self, phase: str, info: Any) -> None:
        """Called by the garbage collector."""
        self._collecting = phase == "start"

    def close(self) -> Record:
        """The record, with findings about operations without a wait, where a later one of their kind had one.

        Those that were under way at the end are none.
        """
        waited = {self._line(number): number for number in sorted(self.record.waits)}  # the last of each
        for number in self._open:
            if number < waited.get(self._line(number), -1):
                self.record.findings.append(f"{self.record.launches[number]}: its end was never waited for")
        return self.record

    def _line(self, number: int) -> tuple[Any, ...]:
        launch = self.record.launches[number]
        return launch.communicator(), launch.kind, launch.where

    def _broken(self, launch: Launch, tensors: Sequence[Tensor]) -> Iterator[str]:
        for tensor in tensors:
            if tensor.dtype not in SUPPORTED:
                yield f"NCCL has no {tensor.dtype}"
            if not tensor.is_contiguous():
                yield f"the tensor {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous"
            if tensor.layout is not torch.strided:
                yield f"the tensor is {tensor.layout}"
            if any(overlap(tensor, slab) for slab in self._host):
                yield "the tensor lies in host memory, and NCCL reads a device's"
        if len({tensor.dtype for tensor in tensors}) > 1:
            yield f"the tensors have the dtypes {[str(tensor.dtype) for tensor in tensors]}"
        first = self._threads.setdefault(launch.communicator(), threading.get_ident())
        if first != threading.get_ident():
            yield f"thread {threading.current_thread().name!r} uses a communicator that another thread has used"
        if self._collecting or any(name == "__del__" for name in functions_of(sys._getframe(1))):
            yield "it begins in a finalizer, at another time on each rank"


class Watched(dist.Work):
    """Work whose successful waits are recorded."""

    def __init__(self, recorder: Recorder, number: int, work: dist.Work) -> None:
        super().__init__()
        self._recorder, self._number, self._work = recorder, number, work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._recorder.ended(self._number)
        return done


def _gathered(args: Any, options: Any, group: Any) -> tuple[str, list[Tensor], Any, list[str]]:
    full, own = args
    broken, ranks = [], group.size()
    if full.numel() != ranks * own.numel():
        broken.append(f"{full.numel()} elements are gathered from {own.numel()} on each of {ranks} ranks")
    elif overlap(full, own) and full.data_ptr() + group.rank() * own.nbytes != own.data_ptr():
        broken.append("the slice lies in the result, and at another place than this rank's")
    return "all_gather", [full, own], own.numel(), broken


def _exchanged(args: Any, options: Any, group: Any) -> tuple[str, list[Tensor], Any, list[str]]:
    into, out, receives, sends = args
    broken, ranks = [], group.size()
    if overlap(into, out):
        broken.append("an all-to-all writes into its own operand")
    for tensor, sizes in ((into, receives), (out, sends)):
        rows = tensor.shape[0] if tensor.dim() else 0
        if sizes is None and rows % ranks:
            broken.append(f"{rows} rows do not divide into {ranks} equal parts")
        if sizes is not None and (len(sizes) != ranks or sum(sizes) != rows):
            broken.append(f"the parts {sizes} do not make {rows} rows for {ranks} ranks")
    return "all_to_all", [into, out], (_bytes_of(out, sends, ranks), _bytes_of(into, receives, ranks)), broken


def _bytes_of(tensor: Tensor, sizes: Sequence[int] | None, ranks: int) -> tuple[int, ...]:
    """Bytes of the part for each rank."""
    if sizes is None:
        return (tensor.nbytes // ranks,) * ranks
    row = tensor[:1].nbytes if tensor.shape[0] else 0
    return tuple(size * row for size in sizes)


def _reduced(args: Any, options: Any, group: Any) -> tuple[str, list[Tensor], Any, list[str]]:
    tensor, operation = args
    summed = operation == dist.ReduceOp.SUM and tensor.dtype in NOT_SUMMED
    broken = [f"NCCL does not add {tensor.dtype} up"] if summed else []
    return f"all_reduce {operation}", [tensor], tensor.numel(), broken


def _broadcast(args: Any, options: Any, group: Any) -> tuple[str, list[Tensor], Any, list[str]]:
    return f"broadcast from {options['group_src']}", [args[0]], args[0].numel(), []


def _sent(args: Any, options: Any, group: Any) -> tuple[str, list[Tensor], Any, list[str]]:
    return "send", [args[0]], args[0].numel(), []


def _received(args: Any, options: Any, group: Any) -> tuple[str, list[Tensor], Any, list[str]]:
    return "receive", [args[0]], args[0].numel(), []


CALLS: dict[str, Callable[[Any, Any, Any], tuple[str, list[Tensor], Any, list[str]]]] = {
    "all_gather_single": _gathered,
    "all_to_all_single": _exchanged,
    "all_reduce": _reduced,
    "broadcast": _broadcast,
    "isend": _sent,
    "irecv": _received,
}


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share bytes, by the addresses of their first and last elements."""
    return bool(a.numel() and b.numel()) and a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr() + (last + 1) * tensor.itemsize)


def functions_of(frame: Any) -> Iterator[str]:
    """The names of the functions that are under way, from the innermost."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def place_of(frame: Any) -> str:
    """File and line of the innermost caller above comm and the transports."""
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in INSIDE):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"


@contextlib.contextmanager
def recording(mesh: zs.Mesh) -> Iterator[tuple[zs.Mesh, Recorder]]:
    """Inside, a mesh of the same ranks whose calls are recorded; a collective call of its ranks."""
    recorder = Recorder()

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            raise AssertionError(f"torch.distributed.{name} has no rules in nccl_rules.py: write them first")

        return call

    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        for name in CALLS:
            put(dist, name, lambda *args, _name=name, **options: recorder.call(_name, *args, **options))
        for name in (name for name in UNJUDGED if hasattr(dist, name)):
            put(dist, name, refused(name))
        put(dist, "new_group", recorder.new_group)
        put(HostMemory, "slab", lambda memory, *args, **options: recorder.slab(memory, *args, **options))
        put(transport, "MOST_ROTATIONS", 0)  # which are for CPUs
        for module in (collectives, technique, split_collectives):
            put(module, "is_accelerator", lambda device: True)
        gc.callbacks.append(recorder.collecting)
        stack.callback(gc.callbacks.remove, recorder.collecting)
        yield part_of(mesh, [list(range(mesh.ranks))], "as between GPUs"), recorder


def judge(records: Sequence[Record], streams: bool = False) -> list[str]:
    """All findings: those of each rank, and those about the ranks together.

    Args:
        streams: whether the last messages of each rank may be on their way, as in a pipeline that was not flushed.
    """
    if streams:
        records = without_last_sends(records)
    found = [finding for record in records for finding in record.findings]
    found += [*_judge_groups(records), *_judge_collectives(records), *_judge_messages(records)]
    return found or hangs(records)


def without_last_sends(records: Sequence[Record]) -> list[Record]:
    """The records without messages that no rank had begun to receive at the end."""
    left: dict[Any, int] = defaultdict(int)
    for record in records:
        for launch in record.launches:
            left[launch.group, launch.pair] += (launch.kind == "receive") - (launch.kind == "send")
    kept = []
    for record in records:
        launches = []
        for launch in reversed(record.launches):
            if launch.kind == "send" and left[launch.group, launch.pair] < 0:
                left[launch.group, launch.pair] += 1
            else:
                launches.append(launch)
        kept.append(replace(record, launches=launches[::-1]))
    return kept


def _judge_groups(records: Sequence[Record]) -> Iterator[str]:
    """Members make a group in the same order; all ranks make equally many, as ncclCommSplit needs it."""
    first = records[0]
    for record in records:
        if len(record.groups) != len(first.groups):
            yield f"rank {record.rank} made {len(record.groups)} groups, and rank {first.rank} {len(first.groups)}"
        for other in records[record.rank + 1 :]:
            mine, theirs = (
                [group for group in each.groups if {record.rank, other.rank} <= {*group.members}]
                for each in (record, other)
            )
            for a, b in zip(mine, theirs, strict=False):
                if a[:2] != b[:2]:
                    yield f"rank {record.rank} made a group of {a[:2]} ({a.where}), rank {other.rank} of {b[:2]}"
            if len(mine) != len(theirs):
                yield f"ranks {record.rank} and {other.rank} made {len(mine)} and {len(theirs)} groups in common"


def _judge_collectives(records: Sequence[Record]) -> Iterator[str]:
    """All ranks of a group start the same collectives in the same order."""
    by_group: dict[str, dict[int, list[Launch]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for launch in record.launches:
            if launch.peer < 0:
                by_group[launch.group][record.rank].append(launch)
    for of in by_group.values():
        first, *others = of.values()
        for other in others:
            for a, b in zip(first, other, strict=False):
                exchanged = a.kind == "all_to_all"
                if (a.kind, a.dtype) != (b.kind, b.dtype) or (not exchanged and a.sizes != b.sizes):
                    yield f"{a} of {a.sizes} {a.dtype} meets {b} of {b.sizes} {b.dtype}"
                    break
                at, to = (a.members.index(each.rank) for each in (a, b))
                if exchanged and (a.sizes[0][to] != b.sizes[1][at] or b.sizes[0][at] != a.sizes[1][to]):
                    yield f"{a} and {b} send and receive other numbers of bytes: {a.sizes} and {b.sizes}"
                    break
            if len(first) != len(other):
                a, b = first[0].rank, other[0].rank
                yield f"ranks {a} and {b} started {len(first)} and {len(other)} collectives in one group"
        missing = {*first[0].members} - of.keys()
        if missing:
            yield f"{first[0]}: rank {sorted(missing)} of its group started none"


def _judge_messages(records: Sequence[Record]) -> Iterator[str]:
    """The n-th send to a rank is that rank's n-th receive, whatever their tags."""
    channels: dict[Any, tuple[list[Launch], list[Launch]]] = defaultdict(lambda: ([], []))
    for record in records:
        for launch in record.launches:
            if launch.peer >= 0:
                channels[launch.group, launch.pair][launch.kind == "receive"].append(launch)
    for (_, (source, destination)), (sends, receives) in channels.items():
        for a, b in zip(sends, receives, strict=False):
            if (a.sizes, a.dtype, a.tag) != (b.sizes, b.dtype, b.tag):
                yield f"{a} of {a.sizes} {a.dtype} meets {b} of {b.sizes} {b.dtype}, which waits for another message"
                break
        if len(sends) != len(receives):
            yield f"rank {source} sent {len(sends)} messages to rank {destination}, which received {len(receives)}"


def hangs(records: Sequence[Record], eager: bool = False) -> list[str]:
    """The first operations that would never end on each rank, where every stream goes as far as it can.

    An operation begins once the one before it in its communicator has ended, and all that was waited for before it was
    started; it ends once it has begun on all its ranks.
    """
    lines: dict[tuple[int, Any], deque[Launch]] = defaultdict(deque)
    keys: dict[tuple[int, int], Any] = {}
    for record in records:
        counts: dict[Any, int] = defaultdict(int)
        for launch in record.launches:
            lines[record.rank, launch.communicator(eager)].append(launch)
            channel = (launch.group, launch.pair) if launch.peer >= 0 else (launch.group,)
            counts[channel] += 1
            keys[record.rank, launch.number] = *channel, counts[channel]
    ended: dict[int, set[int]] = {record.rank: set() for record in records}
    passed = {record.rank: 0 for record in records}  # waits whose operations have ended
    waits = {record.rank: record.waits for record in records}
    going = True
    while going:
        going, begun = False, defaultdict(list)
        for (rank, _), line in lines.items():
            while passed[rank] < len(waits[rank]) and waits[rank][passed[rank]] in ended[rank]:
                passed[rank] += 1
            if line and line[0].waits <= passed[rank]:
                begun[keys[rank, line[0].number]].append(line[0])
        for launches in begun.values():
            if len(launches) == (2 if launches[0].peer >= 0 else len(launches[0].members)):
                going = True
                for launch in launches:
                    ended[launch.rank].add(launch.number)
                    lines[launch.rank, launch.communicator(eager)].popleft()
    return [f"{line[0]} never ends: {_reason(line[0], passed, waits, records)}" for line in lines.values() if line]


def _reason(launch: Launch, passed: dict[int, int], waits: dict[int, list[int]], records: Sequence[Record]) -> str:
    """Why an operation does not begin or does not end."""
    if launch.waits <= passed[launch.rank]:
        return "another rank does not begin it"
    number = waits[launch.rank][passed[launch.rank]]
    launches = next(record.launches for record in records if record.rank == launch.rank)
    return f"its stream waits for {next(each for each in launches if each.number == number)}"
