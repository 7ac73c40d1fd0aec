"""Decisions about failures: which rank is at fault, and whether to restart. Pure functions of the ranks' states.

[Note: the cause, not its echo] When a rank dies, the connections of the others break, and within milliseconds several
ranks have failed. A death by a signal or an error of its own is a cause; a broken connection is an echo of one. Among
equals the first rank to fail is at fault.

[Note: NCCL's watchdog] NCCL's collectives do not block the host. If one does not end within its timeout, a thread of
torch writes "Watchdog caught collective operation timeout" and ends the process with SIGABRT. The cause is another rank
that did not come: of the ranks that still run, one that has stopped earlier. Without one it is the killed rank.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.comm.heartbeat import Collective
from zeroshard.supervisor.records import Culprit, FailureVerdict, RankState

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75  # exit codes, as everywhere on the command line
INTERRUPTED = 128 + signal.SIGINT  # exit code after Ctrl-C, as in shells
SETTLE = 0.5  # seconds from the first failure to the decision, for the cause to appear among its echoes
STUCK = 2.0  # seconds without progress before SIGABRT, after which the watchdog may have sent it, and not a crash
ECHO_TYPES = (
    "CommError",
    "BudgetExceededElsewhere",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "BrokenPipeError",
    "EOFError",
)
ECHO_TEXTS = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")
ECHO_SIGNALS = (signal.SIGABRT, signal.SIGTERM, signal.SIGPIPE)  # used by libraries and launchers to end processes


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds.

    Attributes:
        timeout: longest time without a heartbeat, or without progress of any rank.
        start: longest time without progress of any rank before the first step.
        linger: longest time without progress after another rank has ended well.
    """

    timeout: float = 60.0
    start: float = 600.0
    linger: float = 10.0


def finished(states: Sequence[RankState]) -> int | None:
    """The exit code of an attempt that ended without a fault: done, or stopped on request; None for all others."""
    codes = [state.exit for state in states]
    if None in codes:
        return None
    if STOPPED in codes and all(s.exit in (DONE, STOPPED) or _is_echo(s) for s in states):
        return STOPPED
    return DONE if all(code == DONE for code in codes) else None


def stopped_alone(states: Sequence[RankState]) -> str:
    """A sentence about ranks that stopped on request while others did not; empty if all did."""
    stopped = [state for state in states if state.exit == STOPPED]
    others = [f"rank {s.rank} {_end(s)}" for s in states if s.exit != STOPPED]
    if not others:
        return ""
    ranks = f"rank{'s' * (len(stopped) > 1)} {', '.join(str(s.rank) for s in stopped)}"
    return (
        f"{ranks} ended with exit code {STOPPED} (stopped on request), and the others did not: "
        f"{'; '.join(others)}. Start again to go on from the last checkpoint"
    )


def diagnose(states: Sequence[RankState], limits: Limits) -> Culprit | None:
    """The culprit of a failure; None while all is well or may still end well."""
    return _failed(states) or _silent(states, limits) or _left(states, limits) or _stalled(states, limits)


def decide(culprits: Sequence[Culprit], committed: Sequence[int], max_restarts: int) -> FailureVerdict:
    """Whether to restart after the last of several failures.

    Args:
        culprits: one for each failed attempt so far, in order.
        committed: step of the newest committed checkpoint of all ranks, after each of these attempts.
        max_restarts: restarts without a newer checkpoint.
    """
    last = culprits[-1]
    if last.code == WRONG_INPUT:
        return FailureVerdict(False, WRONG_INPUT, "wrong options, data or models are the same at every attempt")
    if last.kind == "node":
        return FailureVerdict(False, FAILED, "the job cannot go on without a node")
    if last.exit == STOPPED:
        return FailureVerdict(False, STOPPED, "it was stopped on request")
    if _error(last) is not None and any(_error(last) == _error(before) for before in culprits[:-1]):
        return FailureVerdict(False, FAILED, "the same step failed twice with the same error")
    best, restarts = -1, 0
    for newest in committed:
        best, restarts = max(best, newest), 1 if newest > best else restarts + 1
    if restarts > max_restarts:
        restarted = f"it was restarted {max_restarts} time{'s' * (max_restarts > 1)}"
        since = f"since the checkpoint of step {best}" if best >= 0 else "and no checkpoint"
        return FailureVerdict(False, FAILED, f"{restarted} {since}" if max_restarts else "no restarts are allowed")
    return FailureVerdict(True, FAILED, f"restart {restarts} of {max_restarts}")


def pass_on(culprit: Culprit) -> FailureVerdict:
    """The verdict under a launcher that restarts ranks itself: exit as the rank did."""
    code = culprit.code or FAILED
    return FailureVerdict(False, code if code > 0 else 128 - code, "the launcher decides what follows")


def stop_code(states: Sequence[RankState], killed: bool, interrupted: bool = False) -> int:
    """The exit code after a requested stop.

    Args:
        killed: whether ranks outlived the grace period and were killed.
        interrupted: whether the request was Ctrl-C.
    """
    codes = [state.exit for state in states]
    if killed or STOPPED in codes:
        return INTERRUPTED if interrupted else STOPPED
    if all(code == DONE for code in codes):
        return DONE
    if -signal.SIGTERM in codes:
        return INTERRUPTED if interrupted else 128 + signal.SIGTERM
    return FAILED


def _failed(states: Sequence[RankState]) -> Culprit | None:
    """The first rank that died or wrote a failure."""
    failed = [s for s in states if s.failure is not None or s.exit not in (None, DONE, STOPPED)]
    if not failed:
        return None
    if max(_since(state) for state in failed) < SETTLE and any(state.exit is None for state in states):
        return None
    first = min(failed, key=lambda s: (_is_echo(s), not (s.failure and s.failure.first), -_since(s), s.rank))
    ended = [s for s in states if s.exit in (DONE, STOPPED) and s.exited + SETTLE >= _since(first)]
    if ended and _is_echo(first):  # its connections broke because a rank had ended
        earliest = max(ended, key=lambda s: s.exited)
        others = ", ".join(str(s.rank) for s in states if s not in ended)
        return _culprit([earliest], "left", f"ended with exit code {earliest.exit} while rank {others} had not")
    earlier = _stopped_before(first, states)
    if earlier:
        return _culprit(earlier[:1], "stalled", f"made no progress for {earlier[0].idle:.0f} s, and {_watched(first)}")
    if first.exit is not None and first.exit < 0:
        return _culprit([first], "signal", _end(first), _is_echo(first))
    return _culprit([first], "exit", _end(first), _is_echo(first))


def _is_watched(state: RankState) -> bool:
    """Whether NCCL's watchdog may have ended a rank ([Note: NCCL's watchdog])."""
    started = state.heartbeat is not None and state.heartbeat.collective.number > 0
    return state.exit == -signal.SIGABRT and state.failure is None and started and state.idle - state.exited > STUCK


def _stopped_before(killed: RankState, states: Sequence[RankState]) -> list[RankState]:
    """The running ranks that stopped before the rank that the watchdog killed, the earliest first."""
    late = [s for s in states if s.exit is None and s.tells and s.idle > killed.idle] if _is_watched(killed) else []
    return sorted(late, key=lambda s: -s.idle)


def _watched(state: RankState) -> str:
    assert state.heartbeat is not None
    return (
        f"rank {state.rank} was killed by SIGABRT, as by NCCL's watchdog, in '{state.heartbeat.collective.label}' "
        f"(number {state.heartbeat.collective.number})"
    )


def _end(state: RankState) -> str:
    """How a rank failed or ended, as the predicate of "rank N"."""
    if state.failure is None and state.exit is not None and state.exit < 0:
        killed = f"was killed by {signal_name(-state.exit)}"
        if not _is_watched(state):
            return killed
        assert state.heartbeat is not None
        return (
            f"{killed} after {state.idle - state.exited:.0f} s without progress, as by NCCL's watchdog, in "
            f"'{state.heartbeat.collective.label}' (number {state.heartbeat.collective.number})"
        )
    if state.failure is None:
        return f"ended with exit code {state.exit}"
    first_line = state.failure.message.strip().partition("\n")[0]
    return f"raised {state.failure.type}: {first_line}"


def _silent(states: Sequence[RankState], limits: Limits) -> Culprit | None:
    silent = [s for s in states if s.exit is None and s.silent > limits.timeout]
    if not silent:
        return None
    blamed = [s for s in silent if s.suspended] or silent
    why = (
        "the process is stopped"
        if blamed[0].suspended
        else "the process gets no time to run, or is stuck in the kernel"
    )
    return _culprit(blamed, "silent", f"gave no sign of life for {blamed[0].silent:.0f} s: {why}")


def _left(states: Sequence[RankState], limits: Limits) -> Culprit | None:
    """A rank that ended without a fault while the others wait for it."""
    ended, running = [s for s in states if s.exit is not None], [s for s in states if s.exit is None]
    if not ended or not running:
        return None
    first = max(ended, key=lambda s: s.exited)
    if min(first.exited, *(s.idle for s in running)) <= limits.linger:
        return None
    others = ", ".join(str(s.rank) for s in running)
    return _culprit([first], "left", f"ended with exit code {first.exit} while rank {others} had not")


def _stalled(states: Sequence[RankState], limits: Limits) -> Culprit | None:
    """No main thread makes progress: ranks outside of a collective are at fault, else those in a different one."""
    if not states or not all(s.tells and s.exit is None for s in states):
        return None
    busy = [s for s in states if not s.waits]
    started = any(s.step >= 0 for s in states)
    idle = min(s.idle for s in states)
    if idle <= (limits.timeout if started or not busy else max(limits.start, limits.timeout)):
        return None
    if busy and len(busy) < len(states):
        return _culprit(busy, "stalled", f"made no progress for {idle:.0f} s while the others wait in a collective")
    if busy:
        return _culprit(busy, "stalled", f"made no progress for {idle:.0f} s, outside of any collective")
    return _divergent(states, idle)


def _divergent(states: Sequence[RankState], idle: float) -> Culprit:
    """All ranks wait: the smallest group in one collective is at fault, of equal groups the furthest behind."""
    groups: dict[Collective, list[RankState]] = {}
    for state in states:
        assert state.heartbeat is not None
        groups.setdefault(state.heartbeat.collective, []).append(state)
    if len(groups) == 1:
        label = next(iter(groups))[2]
        if len(states) == 1:  # of many ranks: a launcher started this supervisor for one
            return _culprit(states, "stalled", f"waited {idle:.0f} s in '{label}' for the others")
        return _culprit(states, "stalled", f"all waited {idle:.0f} s in '{label}': a message was lost")
    order = sorted(groups.items(), key=lambda group: (len(group[1]), group[0][1], group[1][0].rank))
    (_, number, label), fewest = order[0]
    (_, other_number, other_label), most = order[-1]
    ranks = ", ".join(str(s.rank) for s in most)
    return _culprit(
        fewest,
        "stalled",
        f"waited {idle:.0f} s in '{label}' (number {number}) and rank {ranks} in '{other_label}' "
        f"(number {other_number})",
    )


def _culprit(blamed: Sequence[RankState], kind: str, reason: str, follows: bool = False) -> Culprit:
    first = blamed[0]
    return Culprit(
        ranks=tuple(state.rank for state in blamed),
        kind=kind,
        reason=reason,
        host=first.host,
        exit=first.exit,
        step=first.step,
        phase=first.heartbeat.phase if first.heartbeat else "",
        failure=first.failure,
        follows=follows,
    )


def _since(state: RankState) -> float:
    """Seconds since the first sign of a rank's failure."""
    return max(state.exited if state.exit is not None else 0.0, state.failure.when if state.failure else 0.0)


def _is_echo(state: RankState) -> bool:
    """Whether another rank's end would explain this rank's."""
    if state.exit is not None and state.exit < 0:
        return -state.exit in ECHO_SIGNALS
    if state.failure is None:
        return False
    message = state.failure.message.lower()
    return state.failure.type in ECHO_TYPES or any(text in message for text in ECHO_TEXTS)


def _error(culprit: Culprit) -> tuple[int, str, str] | None:
    """Step, type and message, by which failures are compared; None for signals and echoes, which repeat by chance."""
    if culprit.kind != "exit" or culprit.failure is None or culprit.follows:
        return None
    return culprit.step, culprit.failure.type, culprit.failure.message


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
