"""The passes that add versions, reductions, updates and messages to an order of forwards and backwards."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.schedule import Action, Kind, Layout, Schedule, lower, with_gathers, with_reductions, with_update
from zeroshard.schedule.actions import COMPUTE, RECEIVES, SENDS
from zeroshard.schedule.lower import Skip
from zeroshard.schedule.orders import FLUSHING, one_f_one_b, one_f_one_b_part


def words(schedule: Schedule) -> str:
    return " ".join(map(str, schedule))


def parsed(text: str) -> Schedule:
    return [Action.parse(word) for word in text.split()]


TWO = "F0.0@0 B0.0@0 F0.1@0 B0.1@0"
SPLIT = "F0.0@0 I0.0@0 F0.1@0 W0.0@0 I0.1@0 W0.1@0"


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "RECV_F1.0@2<0 F1.0@2 I1.0@2 SEND_B1.0@2>0 W1.0@2 UPDATE1@2",
            "RECV_F1.0@2<0 GATHER1@2 F1.0@2 FREE1@2 GATHER1@2 I1.0@2 SEND_B1.0@2>0 W1.0@2 FREE1@2 UPDATE1@2",
        ),
        (TWO, "GATHER0@0 F0.0@0 FREE0@0 GATHER0@0 B0.0@0 FREE0@0 GATHER0@0 F0.1@0 FREE0@0 GATHER0@0 B0.1@0 FREE0@0"),
        (
            "F0.0@0 F0.1@0 F2.0@0 F2.1@0 B2.1@0 B2.0@0 B0.1@0 B0.0@0",
            "GATHER0@0 F0.0@0 F0.1@0 FREE0@0 GATHER2@0 F2.0@0 F2.1@0 FREE2@0 GATHER2@0 B2.1@0 B2.0@0 FREE2@0 "
            "GATHER0@0 B0.1@0 B0.0@0 FREE0@0",
        ),
    ],
)
def test_gathers_surround_runs_of_one_direction_on_one_chunk(text: str, expected: str) -> None:
    assert words(with_gathers(parsed(text))) == expected


@pytest.mark.parametrize(
    "text, each, expected",
    [
        (TWO, True, "F0.0@0 B0.0@0 REDUCE0.0@0 F0.1@0 B0.1@0 REDUCE0.1@0"),
        (TWO, False, "F0.0@0 B0.0@0 F0.1@0 B0.1@0 REDUCE0.1@0"),
        (SPLIT, True, "F0.0@0 I0.0@0 F0.1@0 W0.0@0 REDUCE0.0@0 I0.1@0 W0.1@0 REDUCE0.1@0"),
        ("F0.0@0 F1.0@0 B1.0@0 B0.0@0", False, "F0.0@0 F1.0@0 B1.0@0 REDUCE1.0@0 B0.0@0 REDUCE0.0@0"),
    ],
)
def test_reductions_follow_complete_gradients(text: str, each: bool, expected: str) -> None:
    assert words(with_reductions(parsed(text), each)) == expected


def test_updates_name_the_version_that_they_end() -> None:
    schedule = with_update([Action(Kind.FORWARD, 1, 0, 4), Action(Kind.FORWARD, 0, 0, 5)])
    assert words(schedule[2:]) == "UPDATE0@5 UPDATE1@4"


def test_a_stream_updates_and_drops_as_it_goes() -> None:
    """The first of two stages of PipeDream: microbatch j uses the weights after j - 1 updates."""
    lowered = lower.with_updates(one_f_one_b_part(Layout.equal(2), 0, 0, 4), 1, lambda j: max(0, j - 1))
    assert words(lowered) == (
        "F0.0@0 F0.1@0 B0.0@0 REDUCE0.0@0 UPDATE0@0 F0.2@1 B0.1@0 REDUCE0.1@0 DROP0@0 UPDATE0@1 "
        "F0.3@2 B0.2@1 REDUCE0.2@1 DROP0@1 UPDATE0@2"
    )


def test_a_stream_may_update_after_several_microbatches() -> None:
    """The last stage of 2BW: the first update leaves version 0 for the microbatches that are still to use it."""
    lowered = lower.with_updates(one_f_one_b_part(Layout.equal(1), 0, 0, 4), 2, lambda j: max(0, j // 2 - 1))
    assert words(lowered) == (
        "F0.0@0 B0.0@0 F0.1@0 B0.1@0 REDUCE0.1@0 UPDATE0@0 F0.2@0 B0.2@0 F0.3@0 B0.3@0 REDUCE0.3@0 DROP0@0 UPDATE0@1"
    )


@pytest.mark.parametrize(
    "text, every, expected",
    [
        ("F3.0@0 B3.0@0 F3.1@0 B3.1@0", 1, "F3.0@0 B3.0@0 REPAY3.0@0>0 F3.1@0 B3.1@0 REPAY3.1@0>0"),
        ("F3.0@0 B3.0@0 F3.1@0 B3.1@0", 2, "F3.0@0 B3.0@0 F3.1@0 B3.1@0 REPAY3.1@0>0"),
        ("F3.0@0 I3.0@0 W3.0@0 F1.0@0 B1.0@0", 1, "F3.0@0 I3.0@0 W3.0@0 REPAY3.0@0>0 F1.0@0 B1.0@0"),
    ],
)
def test_gradients_of_borrowed_weights_are_repaid(text: str, every: int, expected: str) -> None:
    assert words(lower.with_repayments(parsed(text), 3, every, owner=0)) == expected


def test_lent_weights_collect_gradients_and_go_out_anew() -> None:
    lowered = lower.with_lending(parsed("B0.1@2 REDUCE0.1@2 DROP0@2 UPDATE0@3 B2.1@2 REDUCE2.1@2 UPDATE2@3"), 0, 5)
    assert words(lowered) == (
        "B0.1@2 COLLECT0.1@2<5 REDUCE0.1@2 DROP0@2 UPDATE0@3 LEND0@4>5 B2.1@2 REDUCE2.1@2 UPDATE2@3"
    )


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 12), st.integers(0, 4), st.integers(0, 3))
def test_there_is_room_for_the_next_version_once_one_was_taken_in(m: int, lag: int, more: int) -> None:
    """Versions come in order, each for the first forward that uses it, and one ahead of the present one."""
    schedule = one_f_one_b(Layout.equal(2), 1, m)
    made = max(0, m - lag) + more
    lowered = lower.with_borrowing(schedule, 1, 0, lambda j: max(0, j - lag), 0, made)
    assert [action for action in lowered if action.kind is not Kind.BORROW] == schedule
    borrowed = [action for action in lowered if action.kind is Kind.BORROW]
    assert [action.version for action in borrowed] == list(range(1, max(made, len(borrowed)) + 1))
    present = 0
    for n, action in enumerate(lowered):
        if action.kind is Kind.FORWARD:
            assert action.microbatch is not None
            present = max(0, action.microbatch - lag)
        elif action.kind is Kind.BORROW and action.microbatch is not None:
            assert action == Action(Kind.BORROW, 1, present + 1 + lag, present + 1, 0)
            assert lowered[n - 1] == Action(Kind.FORWARD, 1, present + lag if present else 0)
        elif action.kind is Kind.BORROW:
            assert action.version > present and not [a for a in lowered[n:] if a.kind in COMPUTE]


def test_a_flush_borrows_at_the_end() -> None:
    assert words(lower.with_borrowing(parsed("F1.0@0 B1.0@0"), 1, 0, None, 0, 1)) == "F1.0@0 B1.0@0 BORROW1@1<0"


def test_messages_of_a_middle_stage() -> None:
    """Receives go `LOOKAHEAD` computes ahead; sends come at once."""
    layout = Layout.equal(3)
    lowered = lower.with_messages(parsed("F1.0@0 B1.0@0"), layout, 1)
    assert words(lowered) == "RECV_F1.0@0<0 RECV_B1.0@0<2 F1.0@0 SEND_F1.0@0>2 B1.0@0 SEND_B1.0@0>0"


def test_a_skip_is_received_as_early_as_its_source_is_ahead() -> None:
    layout, skips = Layout.equal(4), [Skip(0, 3), Skip(1, 3)]
    assert words(lower.with_messages(parsed("F0.0@0 B0.0@0"), layout, 0, skips=skips)) == (
        "RECV_B0.0@0<3 RECV_B0.0@0<1 F0.0@0 SEND_F0.0@0>1 SEND_F0.0@0>3 B0.0@0"
    )
    lowered = lower.with_messages(one_f_one_b(layout, 3, 8), layout, 3, skips=skips)
    place = {str(action): n for n, action in enumerate(a for a in lowered if a.kind in COMPUTE | RECEIVES)}
    before = [place[f"RECV_F3.5@0<{peer}"] for peer in range(3)]
    assert before == sorted(before)
    done = [
        sum(a.kind in COMPUTE for a in lowered[: lowered.index(Action.parse(f"RECV_F3.5@0<{p}"))]) for p in (0, 1, 2)
    ]
    assert done == [10 - 3 * lower.LOOKAHEAD, 10 - 2 * lower.LOOKAHEAD, 10 - lower.LOOKAHEAD]


def test_nothing_comes_back_of_values_without_a_gradient() -> None:
    layout, skips = Layout.equal(4), [Skip(0, 2), Skip(0, 3)]
    first, last = (
        words(lower.with_messages(parsed(f"F{n}.0@0 B{n}.0@0"), layout, n, skips=skips, one_way=skips[1:]))
        for n in (0, 3)
    )
    assert first == ("RECV_B0.0@0<2 RECV_B0.0@0<1 F0.0@0 SEND_F0.0@0>1 SEND_F0.0@0>2 SEND_F0.0@0>3 B0.0@0")
    assert last == "RECV_F3.0@0<0 RECV_F3.0@0<2 F3.0@0 B3.0@0 SEND_B3.0@0>2"


@pytest.mark.parametrize("name", sorted(FLUSHING))
@pytest.mark.parametrize("d, v", list(itertools.product((1, 2, 3, 4), (1, 2))))
def test_every_boundary_between_ranks_has_its_messages(name: str, d: int, v: int) -> None:
    layout = Layout.equal(d, v if name in ("naive", "gpipe", "interleaved") else 1)
    for rank in range(d):
        schedule = FLUSHING[name](layout, rank, 2 * d)
        lowered = lower.with_messages(schedule, layout, rank)
        assert [action for action in lowered if action.kind in COMPUTE] == schedule
        for n, action in enumerate(lowered):
            assert action.kind not in SENDS or action[1:3] == lowered[n - 1][1:3]
            assert action.kind not in SENDS | RECEIVES or action.peer != rank
        inputs, gradients = (
            [a for a in schedule if a.kind is Kind.FORWARD and a.chunk > 0],
            [a for a in schedule if a.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and a.chunk < layout.all_chunks - 1],
        )
        received = [a[1:3] for a in lowered if a.kind is Kind.RECEIVE_FORWARD]
        assert received == ([a[1:3] for a in inputs] if d > 1 else [])
        received = [a[1:3] for a in lowered if a.kind is Kind.RECEIVE_BACKWARD]
        assert received == ([a[1:3] for a in gradients] if d > 1 else [])


def test_receives_are_ready_in_time() -> None:
    layout = Layout.equal(4)
    lowered = lower.with_messages(one_f_one_b(layout, 1, 8), layout, 1)
    computes = [a for a in lowered if a.kind in COMPUTE]
    ahead = {Kind.RECEIVE_FORWARD: Kind.FORWARD, Kind.RECEIVE_BACKWARD: Kind.BACKWARD}
    for n, action in enumerate(lowered):
        if action.kind in ahead:
            use = computes.index(action._replace(kind=ahead[action.kind], peer=None))
            done = sum(a.kind in COMPUTE for a in lowered[:n])
            assert done == max(0, use - lower.LOOKAHEAD)
