"""In which order units are gathered: one list per kind of pass, the same on all ranks, with the next unit prefetched.

[Note: one order for all ranks] Collectives match by order alone, so every rank walks the same list whatever its own
data makes it do: a unit that this rank skips is gathered and dropped in its turn, because another rank may need it.
The list starts as the registration order; at the end of the first pass the ranks merge what each of them used.
A rank that wants a unit off the list goes through the rest of the list first, so that no other rank waits for it, and
asks then; the others hear it when they begin their next pass, gather the unit with it, and have it on their lists from
then on; the backward of that forward begins with such units in the reverse order. A unit that one rank alone wants off
the list of a backward is an error: the others update by then.

[Note: numbers of nodes] Autograd numbers the nodes of a graph as the forward makes them, and of those that are ready it
runs the one with the highest number first; a node that accumulates a parameter's gradient comes before all others. So
when a node runs that is older than the forward of a unit, nothing of that forward is left to run, and all gradients are
there that it gives, whatever its parameters, its inputs and its place in the model. The nodes of a re-entrant backward
have numbers of their own, which say nothing about the graph around it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from zeroshard.comm.collectives import Comm, Purpose
from zeroshard.errors import CommError, PlanError
from zeroshard.parts.weights import Gatherer, PassKind, Residence, Weights
from zeroshard.schedule import Schedule, with_gathers
from zeroshard.units import Unit

AT_ONCE = 3  # units that are gathered at once: the root, the one that computes, and one more
DETOUR, WORD = "unit", 32  # the first word of one who wants a unit off the list; characters of a rank's words
CALLS = 64  # forwards of a unit that are remembered for their backwards


class GatherOrder:
    """The units that one kind of pass gathers, in order; `settled` once the ranks have merged their records."""

    def __init__(self, units: list[int], settled: bool = False) -> None:
        self.units = units
        self.settled = settled
        self.known = False  # whether a pass has settled it before
        self.detoured = False  # whether the pass under way left it, on all ranks alike


class Pass:
    """One walk under way: its place in the order and in the graph, and the units that this rank used."""

    def __init__(self, kind: PassKind, order: GatherOrder) -> None:
        self.kind = kind
        self.place = PlaceInGraph() if kind is PassKind.BACKWARD else None
        self.order = order
        self.cursor = 0  # entries of the order that are done
        self.started = 0  # entries whose gather was started
        self.used: list[int] = []


class ByPass(Gatherer):
    """Brings units to this rank when modules need them and takes them away when those are done.

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
        self._in_use: dict[int, int] = {}  # units that this rank needed and is not done with, until which node
        self._calls = [deque[int](maxlen=CALLS) for _ in units]  # first nodes of their forwards since a backward
        self._computed_again: dict[int, None] = {}  # units whose recomputed forward has ended, the oldest first
        self._wanted: dict[PassKind, list[int]] = {}  # units for the lists of passes to come
        self._detours: list[int] = []  # units that single ranks wanted in the forwards since the last backward
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
            CommError: another rank begins another kind of pass, or is at another one.
        """
        if self._pins:  # all units are gathered, on every rank: nothing to agree on
            self._passes.append(Pass(kind, GatherOrder([], settled=True)))
            return
        self._begun += 1
        self._meet(f"{kind} {self._begun}")
        order = self._order(kind)
        for number in self._wanted.pop(kind, ()):
            _insert(order.units, number, backwards=kind is PassKind.BACKWARD)
        if kind is PassKind.BACKWARD and self._detours:
            head = [unit for unit in order.units[:1] if unit == len(self._units) - 1]
            order = GatherOrder([*head, *reversed(self._detours), *order.units[len(head) :]], settled=True)
        elif self._ended is PassKind.BACKWARD:
            self._detours.clear()
        if kind is PassKind.FORWARD and self._ended is PassKind.BACKWARD:
            for calls in self._calls:
                calls.clear()
        self._ended = kind
        self._passes.append(Pass(kind, order))

    def end(self) -> None:
        """End the innermost pass: gather and drop what other ranks may have used and this one did not."""
        walk = self._passes[-1]
        self._advance(walk, len(walk.order.units))
        self._passes.pop()
        if not walk.order.settled:
            self._meet(f"end {walk.kind}")
            records = self._comm.agree_on(walk.used, f"order of {walk.kind}")
            if walk.order.detoured:
                walk.order.units = merge([walk.order.units, *records] if walk.order.known else records)
            else:
                used = {number for record in records for number in record}
                walk.order.units = [number for number in walk.order.units if number in used]
            walk.order.known, walk.order.detoured = True, False
            walk.order.settled = True

    def abandon(self) -> None:
        """Leave all passes after an error, freeing what they hold."""
        self._passes.clear()
        self.free_all()

    def need(self, number: int, enters: bool = False) -> None:
        """Gather unit `number` before this returns; start to fetch the one after it, once those passed are free."""
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
            together = self._meet(f"{DETOUR} {number} {walk.kind if walk else ''}".rstrip())
            if walk is not None and together:
                walk.order.settled, walk.order.detoured = False, True
        else:
            self._advance(walk, place)
            self._start_up_to(walk, place + 1 + (len(self._in_use) < AT_ONCE))
            walk.cursor = place + 1
        for shard in shards:
            shard.finish_gather()

    def done(self, number: int | None = None, computed_again: bool = False) -> None:
        """Free unit `number`, unless its next gather is already under way; by default those that a backward passed."""
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
        """From here on, units are gathered as modules use them."""

    def free(self, numbers: Sequence[int]) -> None:
        """Free what is left of it."""
        self.free_all()

    def _unpin(self) -> None:
        """Free what `_pin` gathered."""
        self._pins -= 1
        self.free_all()

    def _use(self, number: int) -> None:
        """Enter a unit among those in use, in a backward with the first node of the call that it has come to."""
        walk, first = self._passes[-1] if self._passes else None, 0
        if walk is not None and number != len(self._units) - 1:
            calls = self._calls[number]
            if walk.place is not None:
                node = walk.place.node
                first = max((call for call in calls if call <= node), default=node)
            elif walk.kind is PassKind.FORWARD:
                calls.append(first_node())
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
        """Finish a gather of a unit that this rank does not use, and free the unit, unless an earlier use goes on."""
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

    def _meet(self, mine: str) -> bool:
        """Agree with the other ranks on what comes next, after all units that some of them want off the list.

        Args:
            mine: what this rank begins, or `DETOUR` with the unit that it wants and the kind of pass.

        Returns:
            whether all ranks said the same.
        """
        while True:
            everyone = [
                word.decode().strip() for word in self._comm.agree(mine.ljust(WORD).encode(), "begin of a pass")
            ]
            wanted = next((word for word in everyone if word.startswith(DETOUR)), None)
            if wanted is None:
                self._check_alike(mine, everyone)
                return True
            number = int(wanted.split()[1])
            trains = wanted.split()[2:] in ([PassKind.FORWARD], [PassKind.BACKWARD])
            self._bring_off_the_list(number, trains, keep=mine == wanted)
            if len(set(everyone)) == 1:
                return True
            self._learn(number, wanted.split()[2:])
            if mine == wanted:
                return False

    def _check_alike(self, mine: str, everyone: Sequence[str]) -> None:
        for rank, theirs in enumerate(everyone):
            if theirs != mine:
                raise CommError(
                    f"The ranks disagree about what comes next: rank {self._comm.mesh.rank} begins pass '{mine}', rank "
                    f"{rank} pass '{theirs}'. Every rank must call forward and backward equally often and in the same "
                    f"order."
                )

    def _bring_off_the_list(self, number: int, trains: bool, keep: bool) -> None:
        """Gather a unit on all ranks, of which some drop it again."""
        for shard in self._shards[number]:
            shard.finish_gather()
            present = shard.residence is Residence.GATHERED
            shard.start_gather(Purpose.GATHER_PARAMETERS if trains else Purpose.GATHER_TO_EVALUATE)
            shard.finish_gather()
            if not (keep or present):
                shard.free()

    def _learn(self, number: int, kind: Sequence[str]) -> None:
        """Let later passes have a unit on their list that one rank wanted alone.

        The backward of a forward has it in the reverse order besides, whatever its list is.
        """
        for name in kind:
            self._wanted.setdefault(PassKind(name), []).append(number)
            if name == PassKind.FORWARD:
                self._wanted.setdefault(PassKind.BACKWARD, []).append(number)
                self._detours.append(number)


def merge(records: Sequence[Sequence[int]]) -> list[int]:
    """A list that holds every record in its order, the shortest for two (pairwise, in rank order: deterministic)."""
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
    """Put a unit into a list, before the first unit but the first that comes after it in the order of a pass."""
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
    """The place of one backward in its graph; made when it begins."""

    def __init__(self) -> None:
        self._task = torch._C._current_graph_task_id()
        self._node = LATEST

    @property
    def node(self) -> int:
        """The number of the node that runs; inside of a re-entrant backward, of the last seen of the one around it."""
        if torch._C._current_graph_task_id() == self._task:
            node = torch._C._current_autograd_node()
            if node is not None:
                self._node = node._sequence_nr()
        return self._node


class ByChunk(Gatherer):
    """Units that come and go with the chunk of a pipeline that they are in, where its list of actions says so.

    Args:
        units: of this rank.
        weights: of each unit.
    """

    gathers = True

    def __init__(self, units: Sequence[Unit], weights: Sequence[Sequence[Weights]]) -> None:
        self._units, self._weights = units, weights
        self._pins = 0

    @property
    def all_gathered(self) -> bool:
        """Whether all units of this rank are gathered."""
        return all(each.residence is Residence.GATHERED for weights in self._weights for each in weights)

    def need(self, number: int, enters: bool = False) -> None:
        """Check that a unit is gathered.

        Raises:
            PlanError: it is of a chunk that does not run now.
        """
        if any(each.residence is not Residence.GATHERED for each in self._weights[number]):
            raise PlanError(
                f"A parameter of unit '{self._units[number].label}' is read while another chunk of the model runs, and "
                f"is not gathered (zero=3). Read it in the module that holds it, or use zero=2."
            )

    def gather(self, numbers: Sequence[int], trains: bool = True) -> None:
        """Gather these units; a collective call."""
        if not self._pins:
            self._bring([each for number in numbers for each in self._weights[number]], trains)

    def free(self, numbers: Sequence[int]) -> None:
        """Keep only slices of these units."""
        if not self._pins:
            for each in (each for number in numbers for each in self._weights[number]):
                each.free()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep every unit of this rank gathered inside; a collective call."""
        every = [each for weights in self._weights for each in weights]
        with self._lent(every if not self._pins else []):
            self._pins += 1
            try:
                yield
            finally:
                self._pins -= 1

    def visit(self, number: int) -> AbstractContextManager[None]:
        """Keep one unit gathered inside; a collective call."""
        return self._lent(list(self._weights[number]))

    @contextmanager
    def _lent(self, several: Sequence[Weights]) -> Iterator[None]:
        for each in several:
            each.lend()
        self._bring(several, trains=False)
        try:
            yield
        finally:
            for each in several:
                each.free()

    def _bring(self, several: Sequence[Weights], trains: bool) -> None:
        for each in several:
            each.start_gather(Purpose.GATHER_PARAMETERS if trains else Purpose.GATHER_TO_EVALUATE)
        for each in several:
            each.finish_gather()
