"""Rules for the list of one rank: weights, gradients and versions, inputs and outputs."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from zeroshard.errors import PlanError
from zeroshard.schedule.actions import BACKWARDS, COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule

Rule = str | None  # the rule that an action breaks; None if it breaks none
COLLECTIVES = (Kind.GATHER, Kind.REDUCE, Kind.UPDATE)  # all replicas of a chunk take part
RECEIVE_OF = {  # the receive that a send needs at its peer
    Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.REPAY: Kind.COLLECT,
    Kind.LEND: Kind.BORROW,
}
SEND_OF = {receive: send for send, receive in RECEIVE_OF.items()}
EXPECTED = (Kind.GATHER, Kind.REPAY, Kind.COLLECT, Kind.LEND, Kind.BORROW)  # they bind actions before them too
NUMBERED = COMPUTE | {Kind.REDUCE} | (SENDS | RECEIVES) - {Kind.LEND, Kind.BORROW}  # they name a microbatch


def refusal(rank: int, place: int, action: Action, rule: str) -> PlanError:
    """The error for an action that breaks a rule."""
    return PlanError(f"Rank {rank}, action {place}, {action}, {rule}.")


@dataclass(slots=True)
class Loans:
    """Messages between a chunk and the chunks that share weights with it, by their ranks."""

    repaid: dict[int | None, int | None] = field(default_factory=dict)  # the last microbatch repaid to each rank
    collected: dict[int | None, int | None] = field(default_factory=dict)  # the last microbatch from each rank
    lent: dict[int | None, int] = field(default_factory=dict)  # the last version lent to each rank
    lenders: set[int | None] = field(default_factory=set)
    coming: set[int | None] = field(default_factory=set)  # microbatches whose forward waits for a new version

    def expect(self, action: Action) -> None:
        """Note that the list holds this message of a loan."""
        match action.kind:
            case Kind.REPAY:
                self.repaid[action.peer] = None
            case Kind.COLLECT:
                self.collected[action.peer] = None
            case Kind.LEND:
                self.lent[action.peer] = 0
            case Kind.BORROW:
                self.lenders.add(action.peer)

    def end(self, latest: int, fed: int) -> Rule:
        """The rule that the loans break as a whole; after microbatch `fed` the stream is cut off."""
        passed_by = [j for j in self.coming if j is not None and j < fed]
        if passed_by:
            return f"borrows a version for microbatches that have no forward here: {names(passed_by)}"
        if any(version != latest for version in self.lent.values()):
            return f"has not lent its latest version, {latest}"
        if self.lent.keys() != self.collected.keys():
            return f"lends to ranks {names(self.lent)} and collects gradients from {names(self.collected)}"
        if self.lenders != self.repaid.keys():
            return f"borrows from ranks {names(self.lenders)} and repays gradients to {names(self.repaid)}"
        return None


@dataclass(slots=True)
class ChunkState:
    """The state of one chunk on one rank after a part of the list. Dictionaries map microbatches to versions."""

    gathers: bool = False
    loans: Loans = field(default_factory=Loans)
    latest: int = 0
    alive: set[int] = field(default_factory=lambda: {0})
    gathered: int | None = None
    forwards: dict[int | None, int] = field(default_factory=dict)
    backwards: dict[int | None, int] = field(default_factory=dict)
    halves: dict[int | None, int] = field(default_factory=dict)  # input gradients without their weight gradients so far
    sent: set[tuple[Kind, int | None, int | None]] = field(default_factory=set)
    unreduced: dict[int | None, int] = field(default_factory=dict)
    newest: int | None = None  # the last microbatch whose gradients are complete
    reductions: list[int] = field(default_factory=list)  # microbatches in each reduction since the last update
    users: Counter[int] = field(default_factory=Counter)  # version: microbatches between their forward and reduction

    def expect(self, action: Action) -> None:
        """Note that the list holds an action."""
        self.gathers |= action.kind is Kind.GATHER
        self.loans.expect(action)

    def follow(self, action: Action) -> Rule:
        """Apply one action; returns the rule that it breaks."""
        match action.kind:
            case Kind.FORWARD | Kind.BACKWARD | Kind.INPUT_GRADIENT | Kind.WEIGHT_GRADIENT:
                return self._compute(action)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                return self._send(action)
            case Kind.GATHER | Kind.FREE:
                return self._gather(action)
            case Kind.REPAY | Kind.COLLECT:
                return self._settle(action)
            case Kind.REDUCE:
                return self._reduce(action)
            case Kind.UPDATE:
                return self._update(action)
            case Kind.DROP:
                return self._drop(action.version)
            case Kind.LEND:
                if action.version != self.latest or action.version not in self.alive:
                    return f"does not lend the latest version, {self.latest}"
                self.loans.lent[action.peer] = action.version
            case Kind.BORROW:
                if action.microbatch in self.forwards:
                    return "comes after the forward that is to take it in"
                self.loans.coming |= {action.microbatch} - {None}
        return None

    def _compute(self, action: Action) -> Rule:
        kind, _, j, version, _ = action
        if kind is Kind.FORWARD:
            if j in self.forwards:
                return "repeats a forward"
            self.forwards[j] = version
            self.users[version] += 1
            self.loans.coming.discard(j)
        elif j not in self.forwards:
            return "has no forward before it"
        elif version != self.forwards[j]:
            return f"uses other weights than its forward (@{self.forwards[j]})"
        elif kind is Kind.WEIGHT_GRADIENT:
            if self.halves.pop(j, None) is None:
                return f"has no {Kind.INPUT_GRADIENT} before it, or repeats"
        elif j in self.backwards:
            return "repeats a backward"
        else:
            self.backwards[j] = version
        if version not in self.alive:
            return f"uses a version that is not there; there are {sorted(self.alive)}"
        if self.gathers and self.gathered != version:
            return "uses weights that are not gathered"
        if kind is Kind.INPUT_GRADIENT:
            self.halves[j] = version
        elif kind is not Kind.FORWARD:
            self.unreduced[j] = version
            self.newest = j
        return None

    def _send(self, action: Action) -> Rule:
        kind, _, j, version, peer = action
        made = self.forwards if kind is Kind.SEND_FORWARD else self.backwards
        if j not in made:
            return "sends a tensor that was not made before"
        if version != made[j]:
            return f"sends a tensor that was made with another version (@{made[j]})"
        if (kind, j, peer) in self.sent:
            return "repeats a send"
        self.sent.add((kind, j, peer))
        return None

    def _gather(self, action: Action) -> Rule:
        if action.kind is Kind.FREE:
            if self.gathered != action.version:
                return "frees weights that are not gathered"
            self.gathered = None
        elif self.gathered is not None:
            return "gathers weights that are gathered already"
        elif action.version not in self.alive:
            return f"gathers a version that is not there; there are {sorted(self.alive)}"
        else:
            self.gathered = action.version
        return None

    def _settle(self, action: Action) -> Rule:
        if action.microbatch not in self.unreduced or action.microbatch != self.newest:
            return "is not between the backward of its microbatch and the reduction"
        if action.version != self.unreduced[self.newest]:
            return f"is about gradients that were made with another version (@{self.unreduced[self.newest]})"
        peers = self.loans.repaid if action.kind is Kind.REPAY else self.loans.collected
        peers[action.peer] = self.newest
        return None

    def _reduce(self, action: Action) -> Rule:
        if not self.unreduced:
            return "has no backward before it"
        if action.microbatch != self.newest:
            return f"follows the backward of microbatch {self.newest}"
        if action.version != self.unreduced[self.newest]:
            return f"is about gradients that were made with another version (@{self.unreduced[self.newest]})"
        self.reductions.append(len(self.unreduced))
        self.users.subtract(self.unreduced.values())
        self.unreduced.clear()
        if len(self.reductions) > 1 and max(self.reductions[0], self.reductions[-1]) > 1:
            return "leaves backwards that were not reduced one by one; reduce after every backward, or after the last"
        return None

    def _update(self, action: Action) -> Rule:
        if action.version != self.latest:
            return f"does not start from the latest version, {self.latest}"
        if self.unreduced or not self.reductions:
            return "comes before the gradients are reduced"
        if self.gathered is not None:
            return "changes weights that are gathered"
        if any(microbatch != self.newest for microbatch in self.loans.repaid.values()):
            return "comes before the gradients of borrowed weights are repaid"
        if any(microbatch != self.newest for microbatch in self.loans.collected.values()):
            return "comes before the gradients of those who borrow these weights are collected"
        if any(version != self.latest for version in self.loans.lent.values()):
            return f"comes before version {self.latest} is lent"
        self.latest += 1
        self.alive.add(self.latest)
        self.reductions.clear()
        return None

    def _drop(self, version: int) -> Rule:
        if version not in self.alive:
            return f"drops a version that is not there; there are {sorted(self.alive)}"
        if self.users[version]:
            return f"drops a version with {self.users[version]} microbatches in flight or unreduced"
        if version == self.gathered:
            return "drops weights that are gathered"
        if version == self.latest and not self.reductions:
            return "drops the latest version without an update that replaces it"
        self.alive.remove(version)
        return None

    def end(self) -> Rule:
        """The rule that the list breaks as a whole."""
        unfinished = self.forwards.keys() - self.backwards.keys()
        if unfinished:
            return f"has forwards without a backward: microbatches {names(unfinished)}"
        if self.halves:
            return f"has input gradients without weight gradients: microbatches {names(self.halves)}"
        if self.gathered is not None:
            return "is still gathered"
        if not self.latest:
            return "has not been updated"
        if self.unreduced or self.reductions:
            return "has gradients that came after its last update"
        fed = max((j for j in self.forwards if j is not None), default=-1)
        return self.loans.end(self.latest, fed)


def names(numbers: Iterable[object]) -> str:
    """Numbers in order, for a message."""
    return ", ".join(sorted(map(str, numbers), key=lambda name: (len(name), name)))


@dataclass(slots=True)
class ScheduleState:
    """The state of one rank after a part of its list."""

    last: int
    chunks: dict[int, ChunkState] = field(default_factory=lambda: defaultdict(ChunkState))
    posts: dict[tuple[Kind, int, int | None], list[int]] = field(default_factory=dict)  # places of unused receives
    channels: dict[tuple[Kind, int | None], deque[int]] = field(default_factory=lambda: defaultdict(deque))
    inputs: dict[int, list[int]] = field(default_factory=dict)  # place of a compute: places of its inputs' receives
    collectives: list[tuple[int, str]] = field(default_factory=list)  # (place, text)

    @classmethod
    def of(cls, schedule: Schedule, rank: int, ranks: int, last: int) -> "ScheduleState":
        """Follow a rank's list from its start to its end; `last` is the model's last chunk."""
        state = cls(last)
        for action in schedule:
            if action.kind in EXPECTED:
                state.chunks[action.chunk].expect(action)
        for place, action in enumerate(schedule):
            rule = _form(action, rank, ranks) or state._follow(place, action, schedule)
            if rule:
                raise refusal(rank, place, action, rule)
        for place, *_ in state.posts.values():
            raise refusal(rank, place, schedule[place], "is a receive that no compute uses")
        for number, chunk in state.chunks.items():
            rule = chunk.end()
            if rule:
                raise PlanError(f"Rank {rank}: at the end of its list, chunk {number} {rule}.")
        return state

    def _follow(self, place: int, action: Action, schedule: Schedule) -> Rule:
        kind = action.kind
        if kind in COMPUTE:
            rule = self._take_in(place, action, schedule)
            if rule:
                return rule
        elif kind is Kind.RECEIVE_FORWARD or kind is Kind.RECEIVE_BACKWARD:
            key = kind, action.chunk, action.microbatch
            if any(schedule[other].peer == action.peer for other in self.posts.setdefault(key, [])):
                return "repeats a receive"
            self.posts[key].append(place)
            self.channels[kind, action.peer].append(place)
        chunk = self.chunks[action.chunk]
        if kind in COLLECTIVES:
            covered = f" of {len(chunk.unreduced)} microbatches" if kind is Kind.REDUCE else ""
            self.collectives.append((place, f"{kind}{action.chunk}@{action.version}{covered}"))
        return chunk.follow(action)

    def _take_in(self, place: int, action: Action, schedule: Schedule) -> Rule:
        kind, number, j, version, _ = action
        if kind is Kind.FORWARD and number > 0:
            receive, before = Kind.RECEIVE_FORWARD, number - 1
        elif kind in BACKWARDS and number < self.last:
            receive, before = Kind.RECEIVE_BACKWARD, number + 1
        else:
            return None
        self.inputs[place] = self.posts.pop((receive, number, j), [])
        if not self.inputs[place]:
            chunk = self.chunks[before]
            made = chunk.forwards if kind is Kind.FORWARD else chunk.backwards
            return None if j in made else f"has no input: neither a {receive} nor chunk {before} comes before it"
        for post in self.inputs[place]:
            if schedule[post].version != version:
                return f"uses another version than {schedule[post]} before it says"
            first = self.channels[receive, schedule[post].peer].popleft()
            if first != post:
                return f"takes in {schedule[post]} before {schedule[first]}, which was to come first on that channel"
        return None


def _form(action: Action, rank: int, ranks: int) -> Rule:
    if action.kind in NUMBERED and action.microbatch is None:
        return "names no microbatch"
    if action.kind in SENDS or action.kind in RECEIVES:
        if action.peer is None or not 0 <= action.peer < ranks:
            return f"names no peer; there are ranks 0 to {ranks - 1}"
        if action.peer == rank:
            return "is a message of a rank to itself"
    return None
