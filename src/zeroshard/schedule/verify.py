"""Verification: lists that break a rule are refused before anything runs.

First each list is checked alone (`rules`), then against the lists of other ranks (`_CrossChecks`), and last all lists
are walked at once under sends that block (`_Walk`). The time is linear in the number of actions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from zeroshard.errors import PlanError
from zeroshard.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from zeroshard.schedule.lower import LOANS_UNDER_WAY
from zeroshard.schedule.rules import RECEIVE_OF, SEND_OF, ScheduleState, names, refusal


def verify(lists: Sequence[Schedule]) -> None:
    """Check that the list of each rank is complete, that the lists fit together, and that no rank waits for ever.

    A list is one step of a schedule that flushes, or a stream from its start to its end; versions count from 0. SEND_F
    and SEND_B are taken to block until the peer has posted the receive, so that lists that pass need no other buffers;
    REPAY and LEND send a copy; a sender keeps up to `LOANS_UNDER_WAY` of them per loan and direction.

    Raises:
        PlanError: the first action that breaks a rule, its rank and place, and the rule; or, in a deadlock, the action
            that each rank waits for.
    """
    last = max((action.chunk for schedule in lists for action in schedule), default=-1)
    ranks = [ScheduleState.of(schedule, rank, len(lists), last) for rank, schedule in enumerate(lists)]
    checks = _CrossChecks(lists, ranks)
    checks.check_microbatches(last)
    checks.check_collectives()
    checks.match_messages()
    _Walk(checks).run()


class _Place(NamedTuple):
    rank: int
    number: int


class _Holder(NamedTuple):
    rank: int
    chunk: int


_Content = tuple[int | None, int | None]


class _CrossChecks:
    """Rules between the lists of several ranks."""

    def __init__(self, lists: Sequence[Schedule], ranks: Sequence[ScheduleState]) -> None:
        self.lists = lists
        self.ranks = ranks
        self.members: dict[int, list[int]] = defaultdict(list)  # ranks by chunk
        for rank, state in enumerate(ranks):
            for number, chunk in state.chunks.items():
                if chunk.forwards:
                    self.members[number].append(rank)
        self.messages: list[tuple[_Place, _Place]] = []  # a send and its receive
        self.loans: dict[_Holder, set[_Holder]] = {}  # by borrower: owners

    def check_microbatches(self, last: int) -> None:
        """Every microbatch passes every chunk, each on one rank.

        Raises:
            PlanError: the first microbatch that does not.
        """
        chunk_ranks: list[dict[int | None, int]] = []
        for number in range(last + 1):
            ranks_of: dict[int | None, int] = {}
            for rank in self.members[number]:
                for j in self.ranks[rank].chunks[number].forwards:
                    if ranks_of.setdefault(j, rank) != rank:
                        raise PlanError(
                            f"Microbatch {j} passes chunk {number} on rank {ranks_of[j]} and on rank {rank}."
                        )
            chunk_ranks.append(ranks_of)
        for number, ranks_of in enumerate(chunk_ranks):
            missing = chunk_ranks[0].keys() ^ ranks_of.keys()
            if missing:
                raise PlanError(f"Chunks 0 and {number}: only one is passed by microbatches {names(missing)}.")

    def check_collectives(self) -> None:
        """Ranks that hold the same chunk gather, reduce and update equally often and in the same order.

        Raises:
            PlanError: the first action that another rank does not do.
        """
        for members in self.members.values():
            first = self.ranks[members[0]].collectives
            for rank in members[1:]:
                own = self.ranks[rank].collectives
                for (place, mine), (other, theirs) in zip_longest(own, first, fillvalue=(-1, "nothing more")):
                    if mine != theirs:
                        at, number, expected = (rank, place, theirs) if place >= 0 else (members[0], other, mine)
                        peer = members[0] if place >= 0 else rank
                        raise self.refusal(_Place(at, number), f"is where rank {peer} does {expected}")

    def match_messages(self) -> None:
        """Every send has its receive and the other way round, in the same order on every channel.

        Raises:
            PlanError: the first message without its other end, or out of order.
        """
        channels: dict[tuple[int, int | None, Kind], tuple[list[_Place], list[_Place]]] = defaultdict(lambda: ([], []))
        for rank, schedule in enumerate(self.lists):
            for number, action in enumerate(schedule):
                if action.kind in SENDS:
                    channels[rank, action.peer, action.kind][0].append(_Place(rank, number))
                elif action.kind in RECEIVES and action.peer is not None:
                    channels[action.peer, rank, SEND_OF[action.kind]][1].append(_Place(rank, number))
        for sends, receives in channels.values():
            out, into = ([self._content(place) for place in places] for places in (sends, receives))
            if out != into:
                raise self._mismatch(sends, receives, out, into)
            for send, receive in zip(sends, receives, strict=True):
                if self.action(send).kind is Kind.LEND:
                    self.loans.setdefault(self.holder(receive), set()).add(self.holder(send))
                self.messages.append((send, receive))
        self._check_repayments()

    def _check_repayments(self) -> None:
        unpaid = {(borrower, owner) for borrower, owners in self.loans.items() for owner in owners}
        for send, receive in self.messages:
            if self.action(send).kind is Kind.REPAY:
                borrower, owner = self.holder(send), self.holder(receive)
                if owner not in self.loans.get(borrower, ()):
                    rule = f"is collected as {self.action(receive)}, from which chunk {borrower.chunk} borrows nothing"
                    raise self.refusal(send, rule)
                unpaid.discard((borrower, owner))
        for borrower, owner in unpaid:
            raise PlanError(
                f"Rank {borrower.rank}: chunk {borrower.chunk} borrows from chunk {owner.chunk} of rank {owner.rank} "
                f"and repays it no gradients."
            )

    def _mismatch(
        self, sends: list[_Place], receives: list[_Place], out: list[_Content], into: list[_Content]
    ) -> PlanError:
        lost, awaited = Counter(out) - Counter(into), Counter(into) - Counter(out)
        for place, content in [*zip(sends, out, strict=True), *zip(receives, into, strict=True)]:
            action = self.action(place)
            if content in (lost if action.kind in SENDS else awaited):
                other = RECEIVE_OF.get(action.kind) or SEND_OF[action.kind]
                return self.refusal(place, f"has no {other} that belongs to it on rank {action.peer}")
        first = next(n for n, content in enumerate(out) if content != into[n])
        rule = f"comes where rank {receives[first].rank} takes in {self.action(receives[first])} first"
        return self.refusal(sends[first], rule)

    def _content(self, place: _Place) -> _Content:
        """The chunk and microbatch of a message at its receiver, or the version of lent weights."""
        kind, chunk, j, version, peer = self.action(place)
        match kind:
            case Kind.SEND_FORWARD:
                return min((c for c in self.chunks_of(peer, j) if c > chunk), default=chunk + 1), j
            case Kind.SEND_BACKWARD:
                return max((c for c in self.chunks_of(peer, j) if c < chunk), default=chunk - 1), j
            case Kind.LEND | Kind.BORROW:
                return None, version
            case Kind.REPAY | Kind.COLLECT:  # the ranks' own rules tie it to one update; microbatches may differ
                return None, None
        return chunk, j

    def chunks_of(self, rank: int | None, j: int | None) -> Iterator[int]:
        """The chunks that a microbatch passes on a rank."""
        chunks = self.ranks[rank].chunks if rank is not None else {}
        return (number for number, chunk in chunks.items() if j in chunk.forwards)

    def refusal(self, place: _Place, rule: str) -> PlanError:
        """The error for the action at `place`."""
        return refusal(*place, self.action(place), rule)

    def action(self, place: _Place) -> Action:
        """The action at `place`."""
        return self.lists[place.rank][place.number]

    def holder(self, place: _Place) -> _Holder:
        """The rank and chunk of the action at `place`."""
        return _Holder(place.rank, self.action(place).chunk)


# An action in the walk: the event that it counts down on arrival, the events that must be zero before the rank goes on,
# and the event that it counts down on leaving.
_Step = tuple[int | None, tuple[int, ...], int | None]
_NOTHING: _Step = (None, (), None)


class _Walk:
    """All lists, walked at once: events count down to zero, and a rank waits at the first that is not."""

    def __init__(self, checks: _CrossChecks) -> None:
        self._checks = checks
        self._lists = checks.lists
        self._counts = [1] * (2 * len(checks.messages))  # message n is posted in event 2n and sent in event 2n + 1
        self._reductions: dict[tuple[int, int], int] = {}  # by chunk and earlier reductions of it: the event
        self._ends: list[dict[int, int]] = [{} for _ in self._lists]  # by place of a send or receive: message
        for message, places in enumerate(checks.messages):
            for place in places:
                self._ends[place.rank][place.number] = message
        self._steps = [self._plan(rank) for rank in range(len(self._lists))]
        self._at = [0] * len(self._lists)

    def _plan(self, rank: int) -> list[_Step]:
        reduced, ends = Counter[int](), self._ends[rank]
        steps: list[_Step] = []
        coming: dict[tuple[int, int | None], list[int]] = defaultdict(list)  # by chunk and microbatch: messages
        loaned: dict[tuple[Kind, int, int | None], list[int]] = defaultdict(list)  # the messages of each loan
        borrowed: dict[tuple[int, _Holder], int] = {}  # by chunk and owner: the message with the present weights
        for number, action in enumerate(self._lists[rank]):
            kind, chunk = action.kind, action.chunk
            if kind in COMPUTE:
                for message in coming.pop((chunk, action.microbatch), ()) if kind is Kind.FORWARD else ():
                    borrowed[chunk, self._checks.holder(self._checks.messages[message][0])] = message
                steps.append((None, self._inputs(_Place(rank, number), borrowed), None))
            elif kind is Kind.SEND_FORWARD or kind is Kind.SEND_BACKWARD:
                steps.append((None, (2 * ends[number],), 2 * ends[number] + 1))
            elif kind in SENDS:  # of a loan, which may have several messages under way
                earlier = loaned[kind, chunk, action.peer]
                waits = (2 * earlier[-LOANS_UNDER_WAY],) if len(earlier) >= LOANS_UNDER_WAY else ()
                steps.append((None, waits, 2 * ends[number] + 1))
                earlier.append(ends[number])
            elif kind in RECEIVES:
                if kind is Kind.BORROW:
                    coming[chunk, action.microbatch].append(ends[number])
                needs = (2 * ends[number] + 1,) if kind is Kind.COLLECT else ()
                steps.append((2 * ends[number], needs, None))
            elif kind is Kind.REDUCE:
                event = self._reductions.setdefault((chunk, reduced[chunk]), len(self._counts))
                if event == len(self._counts):
                    self._counts.append(len(self._checks.members[chunk]))
                reduced[chunk] += 1
                steps.append((event, (event,), None))
            else:
                steps.append(_NOTHING)
        return steps

    def _inputs(self, place: _Place, borrowed: Mapping[tuple[int, _Holder], int]) -> tuple[int, ...]:
        """The events that a compute waits for: the sends of its input and of the weights that it borrows."""
        action, ranks = self._lists[place.rank][place.number], self._checks.ranks
        posts = ranks[place.rank].inputs.get(place.number, ())
        needs = [2 * self._ends[place.rank][post] + 1 for post in posts]
        beside = action.chunk - 1 if action.kind is Kind.FORWARD else action.chunk + 1
        sources = [self._checks.holder(self._checks.messages[event // 2][0]).chunk for event in needs]
        if sources and beside not in (*sources, *self._checks.chunks_of(place.rank, action.microbatch)):
            rule = f"has no input of chunk {beside}, only of {names(sources)}"
            raise self._checks.refusal(place, rule)
        if action.kind is Kind.FORWARD:
            for owner in self._checks.loans.get(_Holder(place.rank, action.chunk), ()):
                message = borrowed.get((action.chunk, owner))
                have = 0 if message is None else self._checks.action(self._checks.messages[message][0]).version
                uses = (ranks[rank].chunks[owner.chunk].forwards for rank in self._checks.members[owner.chunk])
                wanted = next((own[action.microbatch] for own in uses if action.microbatch in own), None)
                if have != wanted:
                    rule = f"uses version {have} of the weights of chunk {owner.chunk}, which itself uses {wanted}"
                    raise self._checks.refusal(place, rule)
                needs += [] if message is None else [2 * message + 1]
        return tuple(needs)

    def run(self) -> None:
        """Walk to the end.

        Raises:
            PlanError: a deadlock, with the action that each rank waits for.
        """
        counts, at = self._counts, self._at
        arrived = [False] * len(at)  # whether the arrival at the present action has been counted
        waiting: dict[int, list[int]] = defaultdict(list)
        ready = list(range(len(at)))
        while ready:
            rank = ready.pop()
            steps = self._steps[rank]
            while at[rank] < len(steps):
                arrives, needs, leaves = steps[at[rank]]
                if arrives is not None and not arrived[rank]:
                    counts[arrives] -= 1
                    ready += waiting.pop(arrives, ()) if not counts[arrives] else ()
                arrived[rank] = True
                lacks = next((event for event in needs if counts[event]), None)
                if lacks is not None:
                    waiting[lacks].append(rank)
                    break
                if leaves is not None:
                    counts[leaves] -= 1
                    ready += waiting.pop(leaves, ())
                at[rank] += 1
                arrived[rank] = False
        if waiting:
            raise PlanError(self._deadlock(waiting))

    def _deadlock(self, waiting: Mapping[int, Sequence[int]]) -> str:
        blocked = sorted((rank, event) for event, ranks in waiting.items() for rank in ranks)
        places = [(rank, self._at[rank], event) for rank, event in blocked]
        lines = [
            f"rank {r} at action {n}, {self._lists[r][n]}, waits for {self._text_of(event)}" for r, n, event in places
        ]
        return f"No rank can go on: {'; '.join(lines)}. Let receives come earlier, or change the order."

    def _text_of(self, event: int) -> str:
        if event < 2 * len(self._checks.messages):
            rank, number = self._checks.messages[event // 2][1 - event % 2]
            return f"{self._lists[rank][number]} on rank {rank}, action {number}"
        chunk, before = next(key for key, number in self._reductions.items() if number == event)
        return f"reduction {before} of chunk {chunk} on ranks {names(self._checks.members[chunk])}"
