"""The answer of a rank arrives as it was sent, and ranks that did different things are named."""

import math

import pytest

from zeroshard.errors import CommError
from zeroshard.step.decision import Answer, check_same_step
from zeroshard.step.losses import LossReport


def answer(step: int = 3, digests: tuple[int, ...] = (1, 2**32 - 1)) -> Answer:
    losses = LossReport(*([1] * len(LossReport._fields)))
    return Answer(step, digests, 7, math.pi, False, losses, [0, 2], bytes([1, 0, 1, 1]))


def test_an_answer_arrives_as_it_was_sent() -> None:
    frame = answer().pack(3)
    assert Answer.unpack(frame, 3, 2) == answer() and len(frame) == len(answer()._replace(unreduced=[]).pack(3))


def test_ranks_that_did_different_things_are_named() -> None:
    check_same_step([answer(), answer()])
    with pytest.raises(CommError, match="rank 0 is at step 3 and rank 1 at step 4"):
        check_same_step([answer(), answer(4)])
    with pytest.raises(CommError, match="gathered and reduced different units"):
        check_same_step([answer(), answer(), answer(digests=(1, 0))])


def test_what_ranks_did_inside_of_an_axis_is_compared_in_its_groups() -> None:
    answers = [answer(digests=(1, 2, inside, 9)) for inside in (3, 3, 4, 4)]
    check_same_step(answers, [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
    with pytest.raises(CommError, match="rank 1 is at step 3 and rank 3 at step 3"):
        check_same_step(answers, [[[0], [1, 3], [2]], [[0, 1, 2, 3]]])
