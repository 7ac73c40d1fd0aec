"""Lowering: pure passes that add gathers, reductions, updates and messages to a rank's compute."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zeroshard.schedule.actions import BACKWARDS, COMPUTE, Action, Kind, Schedule
from zeroshard.schedule.layout import Layout

VersionRule = Callable[[int], int]
LOOKAHEAD = 2  # computes; enough for every order that uses its inputs soon, even if sends block
LOANS_UNDER_WAY = 2  # messages of one loan and direction that a sender may have without a receive
GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # they complete a microbatch's gradients


class Loan(NamedTuple):
    """Weights that two chunks share: the owner updates them, the borrower gets each version and repays gradients."""

    owner: int
    borrower: int


class Skip(NamedTuple):
    """A message that passes over chunks, from the chunk that makes or holds values to the next that reads them.

    [Note: skips] A value goes from its chunk to the next one that reads it, and from there on to the next; chunks
    between them get nothing. One rank that holds both keeps it. The target is the first chunk after the source on its
    stage, so that the chunk and the peer of an action name the message; what a later chunk of that stage reads waits
    there. A gradient comes back the same way, if the values have one. Between two ranks all messages of one direction
    pass over equally many chunks, so that both ends have them in one order.
    """

    source: int
    target: int


def with_gathers(schedule: Schedule) -> Schedule:
    """Gather a chunk for each unbroken run of its forwards or of its backwards (ZeRO 3).

    A breadth-first schedule gathers a chunk once per pass, an alternating one for each microbatch.
    """
    lowered: Schedule = []
    gathered: tuple[int, int, bool] | None = None  # chunk, version, whether for forwards
    last = 0  # position after the last compute
    for action in schedule:
        if action.kind in COMPUTE:
            needed = (action.chunk, action.version, action.kind is Kind.FORWARD)
            if needed != gathered:
                if gathered is not None:
                    lowered.insert(last, Action(Kind.FREE, gathered[0], None, gathered[1]))
                lowered.append(Action(Kind.GATHER, action.chunk, None, action.version))
            gathered = needed
            last = len(lowered) + 1
        lowered.append(action)
    if gathered is not None:
        lowered.insert(last, Action(Kind.FREE, gathered[0], None, gathered[1]))
    return lowered


def with_reductions(schedule: Schedule, each_microbatch: bool) -> Schedule:
    """Reduce the gradients of each backward, or of the last backward of each chunk only."""
    last = {action.chunk: n for n, action in enumerate(schedule) if action.kind in GRADIENTS}
    lowered: Schedule = []
    for n, action in enumerate(schedule):
        lowered.append(action)
        if action.kind in GRADIENTS and (each_microbatch or last[action.chunk] == n):
            lowered.append(action._replace(kind=Kind.REDUCE))
    return lowered


def with_update(schedule: Schedule) -> Schedule:
    """Update each chunk at the end."""
    versions = {action.chunk: action.version for action in schedule}
    return schedule + [Action(Kind.UPDATE, chunk, None, versions[chunk]) for chunk in sorted(versions)]


def with_updates(schedule: Schedule, every: int, version_of: VersionRule) -> Schedule:
    """Number the versions, update after every `every`-th backward, and drop versions after their last use.

    For schedules that never flush. Microbatches are this rank's, counted from 0; `version_of` gives the
    version that a microbatch uses, and never falls. A version is dropped before the update, which may reuse its buffer.
    """
    lowered: Schedule = []
    for action in schedule:
        j = action.microbatch
        assert j is not None
        version = version_of(j)
        lowered.append(action._replace(version=version))
        if action.kind is Kind.BACKWARD and (j + 1) % every == 0:
            latest = (j + 1) // every - 1
            lowered.append(Action(Kind.REDUCE, action.chunk, j, version))
            lowered += [Action(Kind.DROP, action.chunk, None, old) for old in range(version, version_of(j + 1))]
            lowered.append(Action(Kind.UPDATE, action.chunk, None, latest))
    return lowered


def with_repayments(schedule: Schedule, chunk: int, every: int, owner: int) -> Schedule:
    """Send the gradients of weights that `chunk` borrows to the owner's rank, after every `every`-th microbatch."""
    lowered: Schedule = []
    for action in schedule:
        lowered.append(action)
        j = action.microbatch
        if action.chunk == chunk and action.kind in GRADIENTS and j is not None and (j + 1) % every == 0:
            lowered.append(action._replace(kind=Kind.REPAY, peer=owner))
    return lowered


def with_borrowing(
    schedule: Schedule, chunk: int, owner: int, version_of: VersionRule | None, posted: int, made: int
) -> Schedule:
    """Post the receive of the next version that `chunk` borrows as soon as the version before it was used.

    Args:
        version_of: the version that owner and borrower use for a microbatch; None where all microbatches use the same
            and the next version comes at the end.
        posted: the last version whose receive is posted before the list begins.
        made: the last version that the owner makes by the end of the list.
    """
    lowered: Schedule = []
    for action in schedule:
        lowered.append(action)
        if version_of and action.kind is Kind.FORWARD and action.chunk == chunk and action.microbatch is not None:
            while posted <= version_of(action.microbatch):
                posted += 1
                first = action.microbatch + 1
                while version_of(first) < posted:
                    first += 1
                lowered.append(Action(Kind.BORROW, chunk, first, posted, owner))
    return lowered + [Action(Kind.BORROW, chunk, None, version, owner) for version in range(posted + 1, made + 1)]


def with_lending(schedule: Schedule, chunk: int, borrower: int, every: int = 1) -> Schedule:
    """Collect the borrower's gradients before the last reduction of an update, and send it every new version."""
    lowered: Schedule = []
    for action in schedule:
        j = action.microbatch
        if action.chunk == chunk and action.kind is Kind.REDUCE and j is not None and (j + 1) % every == 0:
            lowered.append(action._replace(kind=Kind.COLLECT, peer=borrower))
        lowered.append(action)
        if action.chunk == chunk and action.kind is Kind.UPDATE:
            lowered.append(Action(Kind.LEND, chunk, None, action.version + 1, borrower))
    return lowered


def with_messages(
    schedule: Schedule,
    layout: Layout,
    rank: int,
    lookahead: int = LOOKAHEAD,
    skips: Sequence[Skip] = (),
    one_way: Sequence[Skip] = (),
) -> Schedule:
    """Send every output that another rank needs right after it is made; post its receive ahead of its use.

    Args:
        lookahead: compute actions by which a receive buffer is ready before its use, times the number of chunks from
            the source to the target: so much further the source is in its list.
        skips: the messages that pass over chunks.
        one_way: those of them that bring no gradient back.
    """
    back = [skip for skip in skips if skip not in one_way]
    holders = _Holders(layout, rank)
    for distance in sorted({target - source for source, target in skips}, reverse=True):
        alike, behind = ([skip for skip in each if skip.target - skip.source == distance] for each in (skips, back))
        schedule = _ahead(schedule, partial(_received, holders, alike, behind), lookahead * distance)
    lowered: Schedule = []
    for action in _ahead(schedule, partial(_beside, holders, RECEIVED), lookahead):
        lowered.append(action)
        if action.kind in COMPUTE:
            lowered += _beside(holders, SENT, action)
            lowered += _sent(holders, skips, back, action) if skips else ()
    return lowered


class _Holders(dict[int, range]):
    """By chunk, the ranks of all replicas to which messages of a rank go in turn; no rank for a chunk that is none."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()
        self.rank, self._layout = rank, layout

    def __missing__(self, chunk: int) -> range:
        layout = self._layout
        members = layout.members(chunk % layout.stages)[layout.place_of(self.rank) :: layout.ranks_per_replica]
        self[chunk] = found = members if 0 <= chunk < layout.all_chunks else range(0)
        return found


def _ahead(schedule: Schedule, receives: Callable[[Action], Schedule], lookahead: int) -> Schedule:
    """Put the receives that a compute needs before the compute that comes `lookahead` earlier."""
    computes = [action for action in schedule if action.kind in COMPUTE]
    lowered: Schedule = []
    posted, ahead = 0, lookahead + 1  # computes whose receives are posted, and that must be
    for action in schedule:
        if action.kind in COMPUTE:
            for later in computes[posted:ahead]:
                lowered += receives(later)
            posted, ahead = ahead, ahead + 1
        lowered.append(action)
    return lowered


RECEIVED = {Kind.FORWARD: (Kind.RECEIVE_FORWARD, -1), **dict.fromkeys(BACKWARDS, (Kind.RECEIVE_BACKWARD, 1))}
SENT = {Kind.FORWARD: (Kind.SEND_FORWARD, 1), **dict.fromkeys(BACKWARDS, (Kind.SEND_BACKWARD, -1))}


def _beside(holders: _Holders, messages: Mapping[Kind, tuple[Kind, int]], action: Action) -> Schedule:
    """The message of a compute from or to the chunk beside it."""
    kind, chunk, j, version, _ = action
    if kind not in messages:
        return []
    message, step = messages[kind]
    ranks = holders[chunk + step]
    assert j is not None
    peer = ranks[j % len(ranks)] if ranks else holders.rank
    return [] if peer == holders.rank else [Action(message, chunk, j, version, peer)]


def _received(holders: _Holders, skips: Sequence[Skip], back: Sequence[Skip], action: Action) -> Schedule:
    """The receives of a compute's inputs by `skips`, and by `back` of gradients."""
    kind, chunk, _, _, _ = action
    if kind is Kind.FORWARD:
        sources = [source for source, target in skips if target == chunk]
        return _between(action, Kind.RECEIVE_FORWARD, sources, holders)
    if kind in BACKWARDS:
        targets = [target for source, target in back if source == chunk]
        return _between(action, Kind.RECEIVE_BACKWARD, targets, holders)
    return []


def _sent(holders: _Holders, skips: Sequence[Skip], back: Sequence[Skip], action: Action) -> Schedule:
    """The sends of a compute's outputs by `skips`, and by `back` of gradients."""
    kind, chunk, _, _, _ = action
    if kind is Kind.FORWARD:
        targets = [target for source, target in skips if source == chunk]
        return _between(action, Kind.SEND_FORWARD, targets, holders)
    if kind in BACKWARDS:
        sources = [source for source, target in back if target == chunk]
        return _between(action, Kind.SEND_BACKWARD, sources, holders)
    return []


def _between(action: Action, kind: Kind, others: Sequence[int], holders: _Holders) -> Schedule:
    """Messages of a kind between an action's chunk and those of `others` that exist and are on other ranks."""
    _, chunk, j, version, _ = action
    assert j is not None
    peers = [ranks[j % len(ranks)] for other in others if (ranks := holders[other])]
    return [Action(kind, chunk, j, version, peer) for peer in peers if peer != holders.rank]
