"""Actions print in a grammar that parses back, and nothing else parses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.errors import PlanError
from zeroshard.schedule import Action, Kind
from zeroshard.schedule.actions import BACKWARDS, COMPUTE, RECEIVES, SENDS

NUMBERS = st.integers(0, 10**6)
QUIET = sorted(set(Kind) - SENDS - RECEIVES)
ACTIONS = st.builds(Action, st.sampled_from(QUIET), NUMBERS, st.none() | NUMBERS, NUMBERS, st.none()) | st.builds(
    Action, st.sampled_from(sorted(SENDS | RECEIVES)), NUMBERS, st.none() | NUMBERS, NUMBERS, NUMBERS
)


@settings(derandomize=True, deadline=None)
@given(ACTIONS)
def test_actions_print_and_parse(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text, action",
    [
        ("F0.2@0", Action(Kind.FORWARD, 0, 2)),
        ("B1.0@3", Action(Kind.BACKWARD, 1, 0, 3)),
        ("I1.0@3", Action(Kind.INPUT_GRADIENT, 1, 0, 3)),
        ("W1.0@3", Action(Kind.WEIGHT_GRADIENT, 1, 0, 3)),
        ("SEND_F3.2@0>4", Action(Kind.SEND_FORWARD, 3, 2, 0, 4)),
        ("RECV_F3.2@0<2", Action(Kind.RECEIVE_FORWARD, 3, 2, 0, 2)),
        ("SEND_B3.2@0>2", Action(Kind.SEND_BACKWARD, 3, 2, 0, 2)),
        ("RECV_B3.2@0<4", Action(Kind.RECEIVE_BACKWARD, 3, 2, 0, 4)),
        ("GATHER0@0", Action(Kind.GATHER)),
        (" FREE12@4 ", Action(Kind.FREE, 12, None, 4)),
        ("REDUCE0.2@0", Action(Kind.REDUCE, 0, 2)),
        ("UPDATE0@0", Action(Kind.UPDATE)),
        ("DROP3@7", Action(Kind.DROP, 3, None, 7)),
        ("REPAY3.2@0>0", Action(Kind.REPAY, 3, 2, 0, 0)),
        ("COLLECT0.2@0<3", Action(Kind.COLLECT, 0, 2, 0, 3)),
        ("LEND0@1>3", Action(Kind.LEND, 0, None, 1, 3)),
        ("BORROW3.5@1<0", Action(Kind.BORROW, 3, 5, 1, 0)),
    ],
)
def test_the_grammar(text: str, action: Action) -> None:
    assert Action.parse(text) == action and str(action) == text.strip()


NO_ACTIONS = ["", "F", "F0", "F@0", "X0.1@0", "f0.1@0", "F0.@0", "F0.1@", "F-1@0", "F0.1@0 B0.1@0", "FORWARD0@0"]
WRONG_ARROWS = [
    "F0.1@0>1",
    "SEND_F0.1@0",
    "SEND_F0.1@0<1",
    "RECV_F1.1@0>0",
    "RECV_F1.1@0",
    "BORROW1@1>0",
    "SEND0.1@0>1",
]


@pytest.mark.parametrize("text", NO_ACTIONS + WRONG_ARROWS)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(PlanError, match=r"GATHER.*F0\.2@0"):
        Action.parse(text)


def test_kinds_are_told_apart() -> None:
    assert BACKWARDS < COMPUTE and not COMPUTE & (SENDS | RECEIVES) and not SENDS & RECEIVES
    assert len(SENDS) == len(RECEIVES)
