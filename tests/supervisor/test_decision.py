"""Who is to blame and what follows, decided over made-up ranks without any process."""

import json
import random
import signal
from dataclasses import asdict, replace
from typing import Any

import pytest

from zeroshard.comm.heartbeat import Collective, Failure, HeartbeatReading
from zeroshard.supervisor.decision import Limits, decide, diagnose, finished, pass_on, stop_code, stopped_alone
from zeroshard.supervisor.records import Culprit, RankState

LIMITS = Limits(timeout=60.0, start=600.0, linger=10.0)
ECHO = "Connection closed by peer [127.0.0.1]:4711"


def reading(rank: int, step: int = 5, **values: Any) -> HeartbeatReading:
    return HeartbeatReading(rank, 1000 + rank, step, **values)


def living(rank: int, **values: Any) -> RankState:
    return RankState(rank=rank, running=100.0, **{"heartbeat": reading(rank), **values})


def dead(rank: int, code: int, ago: float = 1.0, **values: Any) -> RankState:
    return living(rank, exit=code, exited=ago, **values)


def said(kind: str, message: str, ago: float = 1.0, first: bool = True) -> Failure:
    return Failure(kind, message, first, ago)


def waiting(rank: int, group: str, number: int, label: str, idle: float) -> RankState:
    return living(rank, idle=idle, heartbeat=reading(rank, waiting=True, collective=Collective(group, number, label)))


def test_all_is_well() -> None:
    assert diagnose([living(0), living(1)], LIMITS) is None
    assert diagnose([], LIMITS) is None
    assert finished([living(0), dead(1, 0)]) is None


@pytest.mark.parametrize(
    "codes, code", [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((0, 1), None), ((75, -9), None), ((2, 2), None)]
)
def test_ends_without_a_fault(codes: tuple[int, ...], code: int | None) -> None:
    assert finished([dead(rank, code) for rank, code in enumerate(codes)]) == code


def test_a_broken_connection_after_a_stop_is_no_fault() -> None:
    assert finished([dead(0, 75), dead(1, 1, failure=said("CommError", "a connection broke"))]) == 75
    assert finished([dead(0, 75), dead(1, 1, failure=said("ValueError", "no"))]) is None


def test_a_rank_that_stops_alone_is_named() -> None:
    """Whether the others ended well, broke with it, or are about to."""
    broken = said("CommError", "connection closed by peer")
    words = stopped_alone([dead(0, 0), dead(1, 75), dead(2, 1, failure=broken)])
    assert words.startswith("rank 1 ended with exit code 75 (stopped on request), and the others did not: ")
    assert "rank 0 ended with exit code 0; rank 2 raised CommError: connection closed by peer. Start again" in words
    assert stopped_alone([dead(0, 75), dead(1, 75)]) == ""
    culprit = diagnose([dead(1, 75, 1.0), living(2, failure=broken)], LIMITS)
    assert culprit is not None and (culprit.kind, culprit.ranks, culprit.exit) == ("left", (1,), 75)
    assert "ended with exit code 75 while rank 2 had not" in culprit.reason


def aborted(idle: float, **values: Any) -> RankState:
    """A rank that NCCL's watchdog has ended, a second after its last sign of progress was `idle - 1` seconds old."""
    heartbeat = reading(1, collective=Collective("gather", 7, "gather parameters of blocks.3"))
    return dead(1, -signal.SIGABRT, idle=idle, **{"heartbeat": heartbeat, **values})


def test_a_rank_that_nccls_watchdog_ends_is_the_echo_of_one_that_stopped_earlier() -> None:
    states = [living(0, idle=340.0, heartbeat=reading(0, phase="loading data")), aborted(331.0), living(2, idle=335.0)]
    culprit = diagnose(states, LIMITS)
    assert culprit is not None and (culprit.ranks, culprit.kind, culprit.phase) == ((0,), "stalled", "loading data")
    assert culprit.reason == (
        "made no progress for 340 s, and rank 1 was killed by SIGABRT, as by NCCL's watchdog, in 'gather parameters of "
        "blocks.3' (number 7)"
    )
    assert decide([culprit], [3], 3).restart


@pytest.mark.parametrize("others", [living(0, idle=330.5), dead(0, -signal.SIGABRT, 0.5, idle=331.0)])
def test_without_one_the_first_that_it_ends_is_named_with_its_collective(others: RankState) -> None:
    culprit = diagnose([others, aborted(331.0)], LIMITS)
    assert culprit is not None and (culprit.ranks, culprit.kind, culprit.follows) == ((1,), "signal", True)
    assert culprit.reason == (
        "was killed by SIGABRT after 330 s without progress, as by NCCL's watchdog, in 'gather parameters of blocks.3' "
        "(number 7)"
    )


def test_an_abort_in_the_middle_of_work_is_not_the_watchdogs() -> None:
    culprit = diagnose([living(0, idle=300.0), aborted(1.2)], LIMITS)
    assert culprit is not None and str(culprit).startswith("rank 1 was killed by SIGABRT (")
    wrote = said("CommError", "Rank 1 waited 300 s for 'gather parameters of blocks.3' and gave up.")
    culprit = diagnose([living(0, idle=340.0), aborted(331.0, failure=wrote)], LIMITS)
    assert culprit is not None and str(culprit).startswith("rank 1 raised CommError: Rank 1 waited 300 s")


CAUSES = [
    (dead(1, -signal.SIGKILL), "signal", "rank 1 was killed by SIGKILL"),
    (dead(1, -signal.SIGSEGV), "signal", "rank 1 was killed by SIGSEGV"),
    (dead(1, 3), "exit", "rank 1 ended with exit code 3"),
    (dead(1, 1, failure=said("ValueError", "bad\nmore")), "exit", "rank 1 raised ValueError: bad"),
    (living(1, failure=said("ValueError", "bad")), "exit", "rank 1 raised ValueError: bad"),
]


@pytest.mark.parametrize("cause, kind, words", CAUSES)
def test_the_cause_is_named_and_not_its_echoes(cause: RankState, kind: str, words: str) -> None:
    """Whatever the order, and also when an echo was seen first."""
    echoes = [
        dead(0, 1, 1.2, failure=said("RuntimeError", ECHO, 1.3)),
        dead(2, 1, 0.9, failure=said("CommError", "Rank 2 stopped in 'x' because a connection broke", 1.4)),
        dead(3, -signal.SIGABRT, 1.5),
        living(4),
    ]
    states = [cause, *echoes]
    for seed in range(6):
        random.Random(seed).shuffle(states)
        culprit = diagnose(states, LIMITS)
        assert culprit is not None and (culprit.ranks, culprit.kind, culprit.follows) == ((1,), kind, False)
        assert str(culprit) == f"{words} (after step 5)"


def test_among_equals_the_first_is_to_blame() -> None:
    late, early = (dead(r, 1, failure=said("ValueError", str(r), ago)) for r, ago in ((0, 1.0), (1, 2.0)))
    culprit = diagnose([late, early], LIMITS)
    assert culprit is not None and culprit.ranks == (1,)
    assert late.failure and early.failure
    announced = [late, replace(early, failure=replace(early.failure, first=False))]
    culprit = diagnose(announced, LIMITS)
    assert culprit is not None and culprit.ranks == (0,)  # the ranks agreed in the store who was first


def test_only_echoes_name_the_first_of_them() -> None:
    culprit = diagnose([dead(r, 1, failure=said("CommError", "cut", 3 - r)) for r in (0, 1)], LIMITS)
    assert culprit is not None and culprit.ranks == (0,) and culprit.follows


def test_judgement_waits_until_the_cause_can_show() -> None:
    fresh = dead(0, 1, 0.1, failure=said("CommError", "a connection broke", 0.2))
    assert diagnose([fresh, living(1)], LIMITS) is None
    assert diagnose([fresh, dead(1, -9, 0.0)], LIMITS) is not None  # nobody is left to wait for


def test_silence() -> None:
    culprit = diagnose([living(0, silent=61.0), living(1, silent=61.0, suspended=True)], LIMITS)
    assert culprit is not None and (culprit.kind, culprit.ranks) == ("silent", (1,))
    assert "no sign of life for 61 s: the process is stopped" in str(culprit)
    assert diagnose([living(0, silent=59.0)], LIMITS) is None
    assert diagnose([dead(0, 0, 5.0, silent=100.0), living(1)], LIMITS) is None


def test_a_rank_that_leaves_early() -> None:
    culprit = diagnose([dead(0, 0, 11.0), living(1, idle=11.0)], LIMITS)
    assert culprit is not None and (culprit.kind, culprit.ranks) == ("left", (0,))
    assert diagnose([dead(0, 0, 9.0), living(1, idle=11.0)], LIMITS) is None
    assert diagnose([dead(0, 0, 11.0), living(1, idle=1.0)], LIMITS) is None  # it still works


def test_an_infinite_loop_is_where_nobody_is_waited_for() -> None:
    states = [waiting(0, "gather", 9, "w", 61.0), living(1, idle=61.5), waiting(2, "gather", 9, "w", 61.0)]
    culprit = diagnose(states, LIMITS)
    assert culprit is not None and (culprit.kind, culprit.ranks) == ("stalled", (1,))
    assert diagnose([*states, living(3, idle=2.0)], LIMITS) is None  # somebody gets on


def test_the_divergent_collective_is_named() -> None:
    states = [waiting(r, "gather", 9, "w", 61.0) for r in (0, 1, 3)] + [waiting(2, "reduce", 4, "g", 61.0)]
    culprit = diagnose(states, LIMITS)
    assert culprit is not None and culprit.ranks == (2,)
    assert "in 'g' (number 4) and rank 0, 1, 3 in 'w' (number 9)" in culprit.reason
    alike = diagnose([waiting(r, "gather", 9, "w", 61.0) for r in (0, 1)], LIMITS)
    assert alike is not None and alike.ranks == (0, 1) and "all waited 61 s in 'w'" in alike.reason
    alone = diagnose([waiting(5, "gather", 9, "w", 61.0)], LIMITS)
    assert alone is not None and str(alone) == "rank 5 waited 61 s in 'w' for the others (after step 5)"


def test_before_the_first_step_there_is_more_time() -> None:
    def young(rank: int, idle: float, **values: Any) -> RankState:
        return living(rank, idle=idle, heartbeat=reading(rank, step=-1, **values))

    assert diagnose([young(0, 599.0, phase="data"), young(1, 599.0, phase="data")], LIMITS) is None
    assert diagnose([young(0, 601.0, phase="data"), young(1, 601.0, phase="data")], LIMITS) is not None
    assert diagnose([young(0, 1e6), young(1, 1e6)], LIMITS) is None  # a script that tells nothing is left alone
    assert diagnose([living(0, idle=1e6, heartbeat=None)], LIMITS) is None
    stuck = [young(r, 61.0, waiting=True, collective=Collective("control", 1, "a")) for r in (0, 1)]
    assert diagnose(stuck, LIMITS) is not None  # nobody computes: no reason to wait longer


WRONG = Failure("PlanError", "no", True, 1.0, code=2)


def failure(step: int, message: str | None = "bad", **values: Any) -> Culprit:
    words = said("ValueError", message) if message else None
    return Culprit(**{"ranks": (1,), "kind": "exit", "reason": "", "exit": 1, "step": step, "failure": words, **values})


@pytest.mark.parametrize(
    "culprits, committed, restarts, restart, code",
    [
        ([failure(7)], [-1], 3, True, 1),
        ([failure(7), failure(7)], [-1, -1], 3, False, 1),  # the same step, the same error
        ([failure(7), failure(7, "else")], [-1, -1], 3, True, 1),
        ([failure(7), failure(8)], [-1, -1], 3, True, 1),
        ([failure(7), failure(8), failure(7)], [-1, -1, -1], 3, False, 1),
        ([failure(7), failure(7)], [0, 5], 3, False, 1),  # also after a newer checkpoint
        ([failure(7, None, kind="signal", exit=-9)] * 2, [-1, -1], 3, True, 1),  # a kill may come twice by accident
        ([failure(7, follows=True)] * 2, [-1, -1], 3, True, 1),  # so may a network that breaks
        ([failure(7, None)] * 4, [-1] * 4, 3, False, 1),  # three restarts are spent
        ([failure(7, None)] * 4, [-1, -1, -1, 5], 3, True, 1),  # progress gives them back
        ([failure(7, None)] * 7, [5] * 7, 3, False, 1),
        ([failure(7, None)] * 4, [5, 6, 6, 6], 3, True, 1),
        ([failure(7, None)], [5], 0, False, 1),
        ([failure(7, exit=2)], [-1], 3, False, 2),  # wrong input
        ([failure(7, None, exit=None, failure=WRONG)], [-1], 3, False, 2),  # while the rank is ending
        ([failure(7, None, kind="left", exit=75)], [-1], 3, False, 75),
        ([failure(7, None, kind="node", exit=None)], [-1], 3, False, 1),
    ],
)
def test_restart_or_stop(
    culprits: list[Culprit], committed: list[int], restarts: int, restart: bool, code: int
) -> None:
    verdict = decide(culprits, committed, restarts)
    assert (verdict.restart, verdict.code) == (restart, code), verdict.why


@pytest.mark.parametrize("ended, code", [(-11, 139), (3, 3), (2, 2), (75, 75), (0, 1), (None, 1)])
def test_under_another_launcher_the_code_is_the_ranks(ended: int | None, code: int) -> None:
    verdict = pass_on(failure(7, exit=ended))
    assert (verdict.restart, verdict.code) == (False, code)


@pytest.mark.parametrize(
    "codes, killed, code",
    [
        ((75, 75), False, 75),
        ((0, 0), False, 0),
        ((75, -15), False, 75),
        ((-15, -15), False, 143),
        ((-9, -9), True, 75),
        ((1, 0), False, 1),
    ],
)
def test_the_code_after_a_stop(codes: tuple[int, ...], killed: bool, code: int) -> None:
    assert stop_code([dead(rank, code) for rank, code in enumerate(codes)], killed) == code
    interrupted = stop_code([dead(rank, code) for rank, code in enumerate(codes)], killed, interrupted=True)
    assert interrupted == (130 if code in (75, 143) else code)  # Ctrl-C, as shells have it


@pytest.mark.parametrize(
    "state",
    [
        RankState(rank=0),
        dead(1, -9, failure=said("ValueError", "é\n"), stack="Thread", suspended=True, host="a"),
        waiting(2, "gather", 9, "w", 61.0),
    ],
)
def test_a_state_travels_as_json(state: RankState) -> None:
    assert RankState.from_dict(json.loads(json.dumps(asdict(state)))) == state
