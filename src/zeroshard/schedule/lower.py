"""Lowering: pure passes that add to a rank's compute what memory and the wire need."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from zeroshard.schedule.actions import BACKWARDS, COMPUTE, Action, Kind, Schedule
from zeroshard.schedule.layout import Layout

VersionRule = Callable[[int], int]
LOOKAHEAD = 2  # enough for every order that takes what it receives in soon, even if sends block
LOANS_UNDER_WAY = 2  # messages of one loan and direction that need no receive before the sender goes on
GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # what completes a microbatch's gradients


class Loan(NamedTuple):
    """Weights that two chunks share: the owner updates them, the borrower gets each version and repays gradients."""

    owner: int
    borrower: int


def with_gathers(schedule: Schedule) -> Schedule:
    """Gather a chunk for each run of forwards, or of backwards, that nothing else comes between (ZeRO 3).

    A breadth-first schedule so gathers a chunk once per pass, and one that alternates gathers it for each microbatch.
    """
    lowered: Schedule = []
    gathered: tuple[int, int, bool] | None = None  # chunk and version that are gathered, and whether for forwards
    last = 0  # where the list of the last compute ends
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

    For schedules that never flush. Microbatches are this rank's, counted from 0; `version_of` says which version a
    microbatch uses, and never falls. A version is dropped before the update, which may then take its place.
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
    """Have room for the next version of what `chunk` borrows as soon as the last one was taken in.

    Args:
        version_of: the lent version that a microbatch uses, which is the one that the owner uses for it; None where
            all use the same, and the next version comes at the end.
        posted: the last version that there is room for before the list begins.
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


def with_messages(schedule: Schedule, layout: Layout, rank: int, lookahead: int = LOOKAHEAD) -> Schedule:
    """Send every output that another rank takes in right after it is made; be ready to receive it ahead of its use.

    Args:
        lookahead: compute actions by which a receive buffer is ready before its use.
    """
    needs = {n: _receives(a, layout, rank) for n, a in enumerate(schedule) if a.kind in COMPUTE}
    lowered: Schedule = []
    for action in _ahead(schedule, needs, lookahead):
        lowered.append(action)
        if action.kind in COMPUTE:
            lowered += _sends(action, layout, rank)
    return lowered


def _ahead(schedule: Schedule, needs: Mapping[int, Schedule], lookahead: int) -> Schedule:
    """Put what an action needs before the compute that comes `lookahead` earlier."""
    computes = [n for n, action in enumerate(schedule) if action.kind in COMPUTE]
    early: dict[int, Schedule] = {}
    for place, n in enumerate(computes):
        early.setdefault(computes[max(0, place - lookahead)], []).extend(needs.get(n, ()))
    lowered: Schedule = []
    for n, action in enumerate(schedule):
        lowered += early.get(n, ())
        lowered.append(action)
    return lowered


def _receives(action: Action, layout: Layout, rank: int) -> Schedule:
    kind, chunk, j, version, _ = action
    assert j is not None
    if kind is Kind.FORWARD and chunk > 0:
        peer, kind = layout.rank_of(chunk - 1, j), Kind.RECEIVE_FORWARD
    elif kind in BACKWARDS and chunk < layout.all_chunks - 1:
        peer, kind = layout.rank_of(chunk + 1, j), Kind.RECEIVE_BACKWARD
    else:
        return []
    return [Action(kind, chunk, j, version, peer)] if peer != rank else []


def _sends(action: Action, layout: Layout, rank: int) -> Schedule:
    kind, chunk, j, version, _ = action
    assert j is not None
    if kind is Kind.FORWARD and chunk < layout.all_chunks - 1:
        peer, kind = layout.rank_of(chunk + 1, j), Kind.SEND_FORWARD
    elif kind in BACKWARDS and chunk > 0:
        peer, kind = layout.rank_of(chunk - 1, j), Kind.SEND_BACKWARD
    else:
        return []
    return [Action(kind, chunk, j, version, peer)] if peer != rank else []
