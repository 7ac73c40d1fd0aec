"""The record of a device of paper: operations of threads and streams, their order, and the races among them.

An actor is a thread of the host, a stream, or the stream of a communicator. Each has a vector clock: of every actor,
the number of its last operation that is surely over. A wait joins the clock of an event into that of the waiting actor,
and an operation that is launched on a stream starts after all that its thread had done or waited for. Two accesses to
the same bytes, one of them a write, race unless the clock of the later one covers the earlier one; that they were
carried out one after the other here proves nothing about a device.

[Note: spoilt copies] A write under a copy to the host spoils the copy alone. If the copy was not used yet, the finding
is kept back until an operation reads it; a copy that is given up, as `saved.offload` does, is no fault.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Clock = dict[str, int]
SOURCES = Path(__file__).resolve().parents[2]
SKIPPED = ("paper/record.py", "paper/device.py", "paper/operations.py", "paper/collectives.py", "paper/threads.py")
SELF_MADE = "tests/"


@dataclass(frozen=True, slots=True)
class Site:
    """A line of zeroshard, or of a test, from which an operation was started."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Site("outside", 0)
_NAMES: dict[str, str | None] = {}


def _name_of(filename: str) -> str | None:
    """The path of a file below the repository; None for files of others, and for those that record."""
    if filename not in _NAMES:
        path = Path(filename)
        inside = path.is_relative_to(SOURCES) and ".venv" not in path.parts
        name = path.relative_to(SOURCES).as_posix() if inside else None
        _NAMES[filename] = None if name is None or name.endswith(SKIPPED) else name
    return _NAMES[filename]


def site() -> Site:
    """The innermost line of zeroshard or of a test in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        name = _name_of(frame.f_code.co_filename)
        if name is not None:
            return Site(name, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes [low, high) of a block that operation `number` of an actor reads or writes."""

    actor: str
    number: int
    name: str
    at: Site
    low: int
    high: int
    writes: bool

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.name} on {self.actor} at {self.at}"


@dataclass(slots=True)
class Block:
    """The memory of one storage.

    Attributes:
        on_device: whether it lies on the device; else it is memory of the host.
        locked: whether it is page-locked: "pool" of torch's allocator, which frees it when no copy uses it,
            "registered" with the driver, or "".
        label: names it in findings.
        stream: in whose pool of the caching allocator its memory lies.
        shared: streams that `record_stream` named since.
        address: of its first byte.
        spoilt: bytes [low, high) of spoilt copies, each with the finding that their next reader makes.
    """

    nbytes: int
    address: int
    on_device: bool = False
    locked: str = ""
    label: str = ""
    stream: str = ""
    shared: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    spoilt: list[tuple[int, int, Callable[[str], None]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """A race, or another fault that only a device would show."""

    kind: str
    tensor: str
    first: str
    second: str
    missing: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.tensor}\n    {self.first}\n    {self.second}\n    missing: {self.missing}"


class Record:
    """The clocks, blocks and findings of one rank.

    Attributes:
        clocks: by actor; a clock holds the number of its actor's own last operation too.
        findings: in the order in which they were found, each pair of lines once.
        synchronisations: waits of the host for the device, by line and name.
        launches: of each communicator, its operations in order, with dtype and elements.
        copies: by actor and number, the writes of copies to the host.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.findings: list[Finding] = []
        self.synchronisations: Counter[tuple[str, str]] = Counter()
        self.launches: dict[str, list[str]] = {}
        self.copies: dict[tuple[str, int], tuple[Block, Access]] = {}
        self.lock = threading.RLock()
        self._seen: set[tuple[object, ...]] = set()

    def clock(self, actor: str) -> Clock:
        """The clock of an actor, at first empty."""
        return self.clocks.setdefault(actor, {actor: 0})

    def join(self, actor: str, clock: Clock) -> None:
        """All that a clock covers is over before what the actor does from now on."""
        own = self.clock(actor)
        for other, number in clock.items():
            if number > own.get(other, 0):
                own[other] = number

    def tick(self, actor: str) -> int:
        """The number of a new operation."""
        own = self.clock(actor)
        own[actor] += 1
        return own[actor]

    def snapshot(self, actor: str) -> Clock:
        """A copy of an actor's clock."""
        return dict(self.clock(actor))

    def access(self, block: Block, new: Access) -> None:
        """Compare an access with those before it, then remember it."""
        if block.spoilt:
            block.spoilt = list(_without(block.spoilt, new))
        clock, kept = self.clock(new.actor), []
        for old in block.accesses:
            apart = old.high <= new.low or new.high <= old.low
            covered = clock.get(old.actor, 0) >= old.number
            if not apart and not covered and (old.writes or new.writes):
                self._race(block, old, new)
            inside = new.low <= old.low and old.high <= new.high
            replaced = inside and covered and (new.writes or (not old.writes and old.actor == new.actor))
            if not replaced:
                kept.append(old)
        kept.append(new)
        block.accesses = kept

    def _race(self, block: Block, old: Access, new: Access) -> None:
        if old.writes and not new.writes:
            kind = "read before the writer ended"
            if "communicator" in new.actor:
                kind = "collective before its input is there"
            elif "communicator" in old.actor:
                kind = "output of a collective read without its wait"
        elif new.writes and not old.writes:
            kind = "write while a reader may still run"
        else:
            kind = "write while a writer may still run"
        if block.locked and new.actor.startswith("thread") and not old.actor.startswith("thread"):
            kind = "page-locked memory used by the host before its copy ended"
        missing = f"{new.actor} waits for {old.actor}"
        copied = self._unused_copy(old) if new.writes else None
        if copied is None:
            self.find(kind, block, old, str(new), missing, new.at)
            return
        host, copy = copied

        def used(by: str) -> None:
            self.find(kind, block, old, f"{new}, then of the copy a {by}", missing, new.at)

        host.spoilt.append((copy.low, copy.high, used))

    def _unused_copy(self, read: Access) -> tuple[Block, Access] | None:
        """The write of the copy to the host whose read this is, if no operation used its bytes since."""
        block, copy = self.copies.get((read.actor, read.number), (None, None))
        if block is None or copy is None:
            return None
        uses = [each for each in block.accesses if each.low < copy.high and copy.low < each.high]
        return (block, copy) if uses and uses[-1] is copy else None

    def released(self, block: Block, thread: str, what: str = "release") -> None:
        """The memory of a block is given back: all that used it must be over, or be ordered before its next use."""
        at = site()
        if block.on_device:
            clock = dict(self.clock(block.stream)) if block.stream else {}
            for other, number in self.clock(thread).items():
                clock[other] = max(number, clock.get(other, 0))
            exempt, kind = {block.stream, *block.shared}, "release while another stream may still use it"
            missing = f"{block.stream} waits for {{}} (or record_stream) before the release"
        elif block.locked == "pool":
            exempt, kind, missing = set(), "", ""
        else:
            clock, exempt = self.clock(thread), {thread}
            kind = f"{'page-locked ' if block.locked else ''}memory of the host released before its copy ended"
            missing = f"{thread} waits for {{}}"
        for old in block.accesses if kind else ():
            on_host = old.actor.startswith(("thread", "gloo"))  # gloo holds what it sends
            if old.actor not in exempt and not on_host and clock.get(old.actor, 0) < old.number:
                self.find(kind, block, old, f"{what} by {thread} at {at}", missing.format(old.actor), at)
        block.accesses, block.spoilt = [], []

    def find(self, kind: str, block: Block, old: Access, second: str, missing: str, at: Site) -> None:
        """Keep a finding, unless the same lines gave the same one."""
        key = (kind, old.at, old.name, at)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(Finding(kind, block.label or "a tensor without a name", str(old), second, missing))

    def complain(self, kind: str, tensor: str, first: str, second: str, missing: str) -> None:
        """Keep a finding that is no race of two accesses."""
        key = (kind, tensor, first, second)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(Finding(kind, tensor, first, second, missing))


def _without(
    spoilt: list[tuple[int, int, Callable[[str], None]]], new: Access
) -> Iterator[tuple[int, int, Callable[[str], None]]]:
    """The bytes of spoilt copies that are left after an access ([Note: spoilt copies])."""
    for low, high, used in spoilt:
        if new.high <= low or high <= new.low:
            yield low, high, used
        elif not new.writes:
            used(str(new))
        else:
            yield from ((a, b, used) for a, b in ((low, new.low), (new.high, high)) if a < b)


def disagreements(launches: Sequence[dict[str, list[str]]]) -> Iterator[Finding]:
    """Where ranks launched unlike operations of one communicator, or in unlike orders: NCCL would hang.

    Args:
        launches: `Record.launches` of the ranks that share their communicators' names.
    """
    names = dict.fromkeys(name for each in launches for name in each)
    for name in names:
        holders = [(rank, each[name]) for rank, each in enumerate(launches) if name in each]
        first_rank, wanted = holders[0]
        for rank, found in holders[1:]:
            length = max(len(wanted), len(found))
            for number in range(length):
                one = wanted[number] if number < len(wanted) else "nothing"
                other = found[number] if number < len(found) else "nothing"
                if _matching(one) != _matching(other):
                    yield Finding(
                        "ranks launch operations of one communicator in different orders",
                        f"{name}, operation {number}",
                        f"rank {first_rank}: {one}",
                        f"rank {rank}: {other}",
                        "the same order on all ranks",
                    )
                    break


def _matching(launch: str) -> str:
    """A launch as all ranks must see it: without its line."""
    return launch.partition(" at ")[0]
