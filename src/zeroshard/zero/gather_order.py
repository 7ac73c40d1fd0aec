"""The order in which passes gather sliced units, as modules use them, with the next unit ahead.

[Note: one order for all ranks] Collectives match by order alone, so every rank walks one list per kind of pass,
whatever its own data: a unit that this rank skips is gathered and freed in its turn, because another rank may need it.
The list starts as the registration order; at the end of the first pass the ranks merge their records.

[Note: unplanned units] A rank that needs a unit which is not on the list first walks the rest of the list, so that no
other rank waits for it, and then announces the unit. The others read the announcement when their next pass begins: they
gather the unit too, and have it on their lists from then on. The backward of that forward begins with unplanned units,
in reverse order. A unit that one rank alone needs off the list of a backward is an error: the others update by then.

[Note: numbers of nodes] Autograd numbers the nodes of a graph as the forward makes them, and of those that are ready it
runs the one with the highest number first; a node that accumulates a parameter's gradient comes before all others. So
when a node runs that is older than the forward of a unit, nothing of that forward is left to run, and all gradients are
there that it gives, whatever its parameters, its inputs and its place in the model. The nodes of a re-entrant backward
have numbers of their own, which say nothing about the graph around it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import NamedTuple

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.comm.disagreement import went_on
from zeroshard.errors import CommError
from zeroshard.parts.weights import Gatherer, PassKind, Residence, Weights
from zeroshard.schedule import Schedule, with_gathers
from zeroshard.units import Unit

AT_ONCE = 3  # units that are gathered at once: the root, the one that computes, and one more
FRAME = 32  # bytes of an announcement
CALLS = 64  # forwards of a unit whose first nodes are stored for their backwards


class Announce(NamedTuple):
    """The next action of a rank, on which all ranks agree.

    Attributes:
        action: "begin" or "end" of a pass, or "unit" for the gather of an unplanned unit.
        number: of the pass that begins, or of the unit.
        kind: of the pass; None for a unit outside of passes.
    """

    action: str
    number: int
    kind: PassKind | None

    @classmethod
    def unpack(cls, frame: bytes) -> "Announce":
        """The announcement in these bytes."""
        first, *rest = frame.decode().split()
        if first == "unit":
            return cls("unit", int(rest[0]), PassKind(rest[1]) if rest[1:] else None)
        return cls("end", 0, PassKind(rest[0])) if first == "end" else cls("begin", int(rest[0]), PassKind(first))

    def pack(self) -> bytes:
        """The announcement as bytes of one length."""
        return str(self).ljust(FRAME).encode()

    def __str__(self) -> str:
        return {
            "begin": f"{self.kind} {self.number}", "end": f"end {self.kind}",
            "unit": f"unit {self.number} {self.kind or ''}".rstrip(),
        }[self.action]  # fmt: skip


class GatherOrder:
    """The units that one kind of pass gathers, in order.

    Attributes:
        settled: whether the ranks have merged their records of the latest pass that was not planned.
        known: whether they have done so before.
        unplanned: whether all ranks left the order in the pass under way.
    """

    def __init__(self, units: list[int], settled: bool = False) -> None:
        self.units = units
        self.settled = settled
        self.known = self.unplanned = False


class Pass:
    """One pass under way.

    Attributes:
        place: position of a backward in its graph; None in forwards.
        cursor: entries of the order that are done.
        started: entries whose gather was started.
        used: units that this rank used.
    """

    def __init__(self, kind: PassKind, order: GatherOrder) -> None:
        self.kind = kind
        self.place = PlaceInGraph() if kind is PassKind.BACKWARD else None
        self.order = order
        self.cursor = self.started = 0
        self.used: list[int] = []


class ByPass(Gatherer):
    """Gathers units when modules need them and frees them afterwards, in one order on all ranks.

    Args:
        units: all units in their fixed order.
        shards: the weights of each unit.
    """

    gathers = passes = True

    def __init__(self, units: Sequence[Unit], shards: Sequence[Sequence[Weights]], comm: Comm) -> None:
        self._units = units
        self._shards = shards
        self._comm = comm
        self._orders: dict[PassKind, GatherOrder] = {}
        self._passes: list[Pass] = []
        self._begun = 0
        self._pins = 0  # contexts under way that keep all units gathered
        self._in_use: dict[int, int] = {}  # units in use, with the node after which they are not
        self._calls = [deque[int](maxlen=CALLS) for _ in units]  # first nodes of their forwards since a backward
        self._computed_again: dict[int, None] = {}  # units whose recomputed forward has ended, the oldest first
        self._to_plan: dict[PassKind, list[int]] = {}  # unplanned units, for the lists of passes to come
        self._unplanned: list[int] = []  # unplanned units of the forwards since the last backward
        self._ended: PassKind | None = None  # the kind of the last pass

    @property
    def orders(self) -> dict[str, list[str]]:
        """The recorded order of each kind of pass, as unit names."""
        return {str(kind): [self._units[n].label for n in order.units] for kind, order in self._orders.items()}

    def inside(self, kind: PassKind) -> bool:
        """Whether a pass of this kind is under way."""
        return any(walk.kind is kind for walk in self._passes)

    def begin(self, kind: PassKind) -> None:
        """Begin a pass; all ranks must begin the same one.

        Raises:
            CommError: another rank begins another kind of pass, or has begun another number of passes.
        """
        if self._pins:  # all units are gathered, on every rank: nothing to agree on
            self._passes.append(Pass(kind, GatherOrder([], settled=True)))
            return
        self._begun += 1
        self._agree_on_next(Announce("begin", self._begun, kind))
        order = self._order(kind)
        for number in self._to_plan.pop(kind, ()):
            _insert(order.units, number, backwards=kind is PassKind.BACKWARD)
        if kind is PassKind.BACKWARD and self._unplanned:
            head = [unit for unit in order.units[:1] if unit == len(self._units) - 1]
            order = GatherOrder([*head, *reversed(self._unplanned), *order.units[len(head) :]], settled=True)
        elif self._ended is PassKind.BACKWARD:
            self._unplanned.clear()
        if kind is PassKind.FORWARD and self._ended is PassKind.BACKWARD:
            for calls in self._calls:
                calls.clear()
        self._ended = kind
        self._passes.append(Pass(kind, order))

    def end(self) -> None:
        """End the innermost pass; units that other ranks may have used are gathered and freed."""
        walk = self._passes[-1]
        self._advance(walk, len(walk.order.units))
        self._passes.pop()
        if not walk.order.settled:
            self._agree_on_next(Announce("end", 0, walk.kind))
            records = self._comm.agree_on(walk.used, f"order of {walk.kind}")
            if walk.order.unplanned:
                walk.order.units = merge([walk.order.units, *records] if walk.order.known else records)
            else:
                used = {number for record in records for number in record}
                walk.order.units = [number for number in walk.order.units if number in used]
            walk.order.known, walk.order.unplanned = True, False
            walk.order.settled = True

    def abandon(self) -> None:
        """End all passes after an error, and free all units."""
        self._passes.clear()
        self.free_all()

    def need(self, number: int, enters: bool = False) -> None:
        """Gather unit `number`; start to gather the next one, once the units that are done are free."""
        shards = self._shards[number]
        self._computed_again.pop(number, None)
        present = all(shard.residence is Residence.GATHERED for shard in shards)
        if present and number in self._in_use and not enters:
            return
        self._use(number)
        if present:
            return
        self.done()
        while self._computed_again and len(self._in_use) > AT_ONCE:
            self.done(next(iter(self._computed_again)))
        walk = self._passes[-1] if self._passes else None
        place = _find(walk.order.units, number, walk.cursor) if walk else None
        if walk is not None:
            walk.used.append(number)
        if walk is None or place is None:
            if walk is not None:
                self._advance(walk, len(walk.order.units))  # or the others would wait for this rank's gathers
            together = self._agree_on_next(Announce("unit", number, walk.kind if walk else None))
            if walk is not None and together:
                walk.order.settled, walk.order.unplanned = False, True
        else:
            self._advance(walk, place)
            self._start_up_to(walk, place + 1 + (len(self._in_use) < AT_ONCE))
            walk.cursor = place + 1
        for shard in shards:
            shard.finish_gather()

    def done(self, number: int | None = None, computed_again: bool = False) -> None:
        """Free unit `number`, unless its next gather is in flight; by default the units that a backward has passed."""
        if computed_again and number is not None:
            self._computed_again[number] = None
            return
        if number is None:
            place = self._passes[-1].place if self._passes else None
            node = place.node if place is not None else LATEST
            for passed in [unit for unit, first in self._in_use.items() if first > node]:
                self.done(passed)
            return
        self._in_use.pop(number, None)
        self._computed_again.pop(number, None)
        if self._pins:
            return
        for shard in self._shards[number]:
            if shard.residence is Residence.GATHERED:
                shard.free()

    def free_all(self) -> None:
        """Free every unit, unless they are pinned."""
        self._in_use.clear()
        self._computed_again.clear()
        if self._pins:
            return
        for shards in self._shards:
            for shard in shards:
                shard.free()

    @property
    def all_gathered(self) -> bool:
        """Whether all units are gathered."""
        return all(shard.residence is Residence.GATHERED for shards in self._shards for shard in shards)

    def _pin(self) -> None:
        """Gather every unit and keep it until the last `_unpin`; a collective call."""
        self._pins += 1
        if self._pins > 1:
            return
        for number in range(len(self._units)):
            for shard in self._shards[number]:
                shard.lend()
            self._start(number)
            for shard in self._shards[number]:
                shard.finish_gather()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep every unit gathered inside; a collective call."""
        self._pin()
        try:
            yield
        finally:
            self._unpin()

    @contextmanager
    def visit(self, number: int) -> Iterator[None]:
        """Keep one unit gathered inside, outside of any pass; a collective call."""
        for shard in self._shards[number]:
            shard.lend()
        self._start(number)
        for shard in self._shards[number]:
            shard.finish_gather()
        try:
            yield
        finally:
            for shard in self._shards[number]:
                shard.free()

    def lower(self, actions: Schedule) -> Schedule:
        """A list of compute with the gathers and frees that surround it."""
        return with_gathers(actions)

    def gather(self, numbers: Sequence[int], trains: bool = True) -> None:
        """Nothing: units are gathered as modules use them."""

    def free(self, numbers: Sequence[int]) -> None:
        """Free all units."""
        self.free_all()

    def _unpin(self) -> None:
        """Undo `_pin`."""
        self._pins -= 1
        self.free_all()

    def _use(self, number: int) -> None:
        """Count a unit as in use; in a backward, record the first node of the call whose backward runs."""
        walk, first = self._passes[-1] if self._passes else None, 0
        if walk is not None and number != len(self._units) - 1:
            calls = self._calls[number]
            if walk.place is not None:
                node = walk.place.node
                first = max((call for call in calls if call <= node), default=node)
            elif walk.kind is PassKind.FORWARD:
                calls.append(first_node())
        elif walk is None and number != len(self._units) - 1 and torch.is_grad_enabled():
            self._calls[number].append(first_node())  # [Note: lone calls]
        self._in_use[number] = first

    def _order(self, kind: PassKind) -> GatherOrder:
        if kind not in self._orders:
            root, forward = len(self._units) - 1, self._orders.get(PassKind.FORWARD)
            others = list(range(root)) if forward is None else [unit for unit in forward.units if unit != root]
            self._orders[kind] = GatherOrder([root, *(others[::-1] if kind is PassKind.BACKWARD else others)])
        return self._orders[kind]

    def _advance(self, walk: Pass, place: int) -> None:
        """Advance to `place` in the order; units in between are gathered for other ranks."""
        while walk.cursor < place:
            self._start_up_to(walk, walk.cursor + 1)
            self._drop_after_arrival(walk.order.units[walk.cursor])
            walk.cursor += 1

    def _drop_after_arrival(self, number: int) -> None:
        """Finish the gather of a unit that this rank does not use, and free the unit, unless an earlier use goes on."""
        for shard in self._shards[number]:
            if shard.residence is Residence.GATHERING:
                shard.finish_gather()
                if not (self._pins or number in self._in_use):
                    shard.free()

    def _start_up_to(self, walk: Pass, place: int) -> None:
        units = walk.order.units
        while walk.started < min(place, len(units)):
            if units[walk.started] in units[walk.cursor : walk.started]:
                return  # the same unit again: its next gather starts when this use of it is done
            self._start(units[walk.started])
            walk.started += 1

    def _start(self, number: int) -> None:
        trains = self._passes and self._passes[-1].kind is not PassKind.EVALUATION
        for shard in self._shards[number]:
            shard.start_gather(Purpose.GATHER_PARAMETERS if trains else Purpose.GATHER_TO_EVALUATE)

    def _agree_on_next(self, mine: Announce) -> bool:
        """Agree with the other ranks on the next action, after the gathers of unplanned units that some ranks announce.

        Returns:
            whether all ranks announced the same.
        """
        while True:
            everyone = [Announce.unpack(frame) for frame in self._comm.agree(mine.pack(), "begin of a pass")]
            unplanned = next((each for each in everyone if each.action == "unit"), None)
            if unplanned is None:
                self._check_alike(mine, everyone)
                return True
            self._gather_unplanned(unplanned, keep=mine == unplanned)
            if len(set(everyone)) == 1:
                return True
            self._plan(unplanned)
            if mine == unplanned:
                return False

    def _check_alike(self, mine: Announce, everyone: Sequence[Announce]) -> None:
        for rank, theirs in enumerate(everyone):
            if theirs != mine:  # here and on every other rank
                errors = self._comm.agree_on(self._comm.mesh.caught, "errors of passes")
                raise CommError(
                    f"The ranks disagree about what comes next: rank {self._comm.mesh.rank} begins pass '{mine}', rank "
                    f"{rank} pass '{theirs}'. Every rank must call forward and backward equally often and in the same "
                    f"order.{''.join(starmap(went_on, enumerate(errors)))}"
                )

    def _gather_unplanned(self, wanted: Announce, keep: bool) -> None:
        """Gather an unplanned unit on all ranks; those that do not `keep` it free it again."""
        trains = wanted.kind in (PassKind.FORWARD, PassKind.BACKWARD)
        for shard in self._shards[wanted.number]:
            shard.finish_gather()
            present = shard.residence is Residence.GATHERED
            shard.start_gather(Purpose.GATHER_PARAMETERS if trains else Purpose.GATHER_TO_EVALUATE)
            shard.finish_gather()
            if not (keep or present):
                shard.free()

    def _plan(self, wanted: Announce) -> None:
        """Add a unit that one rank needed alone to the lists of later passes.

        The backward of a forward gets it in reverse order too, whatever its list.
        """
        if wanted.kind is not None:
            self._to_plan.setdefault(wanted.kind, []).append(wanted.number)
        if wanted.kind is PassKind.FORWARD:
            self._to_plan.setdefault(PassKind.BACKWARD, []).append(wanted.number)
            self._unplanned.append(wanted.number)


def merge(records: Sequence[Sequence[int]]) -> list[int]:
    """A list that contains every record in its order, the shortest for two (pairwise, in rank order: deterministic)."""
    merged: list[int] = []
    for record in records:
        merged = _supersequence(merged, list(record))
    return merged


def _supersequence(a: list[int], b: list[int]) -> list[int]:
    if a == b or not b:
        return a
    common = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            common[i][j] = 1 + common[i + 1][j + 1] if a[i] == b[j] else max(common[i + 1][j], common[i][j + 1])
    merged: list[int] = []
    i, j = 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            merged, i, j = [*merged, a[i]], i + 1, j + 1
        elif common[i + 1][j] >= common[i][j + 1]:
            merged, i = [*merged, a[i]], i + 1
        else:
            merged, j = [*merged, b[j]], j + 1
    return merged + a[i:] + b[j:]


def _insert(units: list[int], number: int, backwards: bool) -> None:
    """Insert a unit into a list by its number, after the first entry (the root)."""
    if number not in units:
        after = (place for place, other in enumerate(units) if place and (other < number) == backwards)
        units.insert(next(after, len(units)), number)


def _find(units: list[int], number: int, start: int) -> int | None:
    return next((place for place in range(start, len(units)) if units[place] == number), None)


LATEST = 2**64 - 1  # the number of nodes that accumulate


def first_node() -> int:
    """The number of the first node of a forward that begins now in this thread.

    Without gradients it may be that of a re-entrant recomputation, whose node is the last that was made.
    """
    number: int = torch._C._autograd._get_sequence_nr()
    return number if torch.is_grad_enabled() else number - 1


class PlaceInGraph:
    """The position of one backward in its graph; made when it begins."""

    def __init__(self) -> None:
        self._task = torch._C._current_graph_task_id()
        self._node = LATEST

    @property
    def node(self) -> int:
        """The number of the node that runs; inside of a re-entrant backward, the last seen in the one around it."""
        if torch._C._current_graph_task_id() == self._task:
            node = torch._C._current_autograd_node()
            if node is not None:
                self._node = node._sequence_nr()
        return self._node
