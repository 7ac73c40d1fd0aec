"""The order of plans that fit: the first is rehearsed whole, and so are those that seem faster only until then."""

from dataclasses import replace

from predictions import prediction

import zeroshard as zs
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.order import MOST_WHOLE, answered, rank, with_whole_first
from zeroshard.planner.search.text import why_first


def plans(*seconds: float) -> list[Prediction]:
    """Plans with different numbers of microbatches and these seconds of a step."""
    return [
        prediction(zs.Plan(zero=3, precision="bf16", microbatches=at + 1), causes={"compute": each})
        for at, each in enumerate(seconds)
    ]


class Rehearsal:
    """Whole steps that take longer than few blocks told, by these seconds for each number of microbatches."""

    def __init__(self, *more: float) -> None:
        self.more = more
        self.asked: list[int] = []

    def __call__(self, one: Prediction) -> Prediction:
        self.asked.append(one.plan.microbatches)
        return replace(one, causes={"compute": one.seconds, "host link": self.more[one.plan.microbatches - 1]})


def test_equally_fast_plans_are_ordered_by_their_peak() -> None:
    seconds = 0.1 + 0.2  # a sum in another order than that of the literal
    larger, smaller = plans(0.3, seconds)
    smaller = replace(smaller, memory={name: nbytes // 2 for name, nbytes in larger.memory.items()})
    assert seconds > 0.3 and sorted([larger, smaller], key=rank) == [smaller, larger]


def test_a_first_plan_that_stays_the_fastest_is_alone_rehearsed_whole() -> None:
    for more in (0.0, 0.05):
        whole = Rehearsal(more, 9.0)
        first, second = with_whole_first(plans(1.0, 1.1), whole)
        assert whole.asked == [1] and (first.seconds, second.seconds) == (1.0 + more, 1.1)
    assert with_whole_first([], whole) == []


def test_a_second_plan_that_seems_faster_than_the_whole_first_is_rehearsed_whole_too() -> None:
    whole = Rehearsal(0.2, 0.2)
    best = with_whole_first(plans(1.0, 1.1, 2.0), whole)
    assert whole.asked == [1, 2] and [one.plan.microbatches for one in best] == [1, 2, 3]
    assert [round(one.seconds, 6) for one in best] == [1.2, 1.3, 2.0]
    assert "more than plan 2" in why_first(best)
    assert "as many as plan 2" in why_first([best[0], plans(1.0, 1.1)[1]])  # as it was with one whole plan


def test_a_plan_that_is_faster_when_both_are_whole_comes_first() -> None:
    best = with_whole_first(plans(1.0, 1.1), Rehearsal(0.2, 0.0))
    assert [one.plan.microbatches for one in best] == [2, 1] and best == sorted(best, key=rank)


def test_few_plans_are_rehearsed_whole_and_none_that_changes_results_overtakes_one_that_does_not() -> None:
    whole = Rehearsal(*[1.0] * 9)
    assert len(with_whole_first(plans(*[1.0] * 9), whole)) == 9 and len(whole.asked) == MOST_WHOLE
    exact, faster = plans(1.0, 0.5)
    whole = Rehearsal(1.0, 0.0)
    best = with_whole_first([exact, replace(faster, optimizer="adamw8bit")], whole)
    assert whole.asked == [1] and best[0].plan == exact.plan


def test_a_plan_that_does_not_fit_when_it_is_whole_is_left_out() -> None:
    first, second, third = plans(1.0, 1.1, 1.2)

    def whole(one: Prediction) -> Prediction:
        return replace(one, memory={"activations": 2**50}) if one.plan == first.plan else one

    assert [one.plan for one in with_whole_first([first, second, third], whole)] == [second.plan, third.plan]
    assert with_whole_first([first], whole) == []


def test_plans_that_wait_for_a_disk_for_most_of_the_step_are_no_answer() -> None:
    (one,) = plans(1.0)
    slow, part = (replace(one, causes={"compute": 1.0, "disk": seconds}) for seconds in (9.0, 0.5))
    assert not answered([]) and not answered([slow, slow])
    assert answered([slow, part]) and answered([one])
