"""Expectations: which kinds of plans a search leaves out."""

import math
from collections.abc import Sequence

import pytest
from predictions import prediction

import zeroshard as zs
from zeroshard.planner.search.expectations import FEW_SHAPES, Expectation, Shape, in_turn
from zeroshard.planning.offers import Offer

ESTIMATES = (1.0, 1.05, 1.3, 1.6, 2.0, 4.0)  # seconds of a step


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ((1.0, 1.05), 2),  # the third is expected 30 % behind
        ((1.4, 1.47), 2),  # as it is where both are 40 % slower than expected
        ((1.4, math.inf, 1.3), 3),  # not where one alone is, and the other does not fit
        ((0.9,), 1),
    ],
)
def test_kinds_that_are_expected_to_be_behind_are_left_out(found: tuple[float, ...], taken: int) -> None:
    assert len(ESTIMATES) > FEW_SHAPES
    shapes = [Shape(zs.Plan(zero=0, seed=number), 1, Offer({}, 1, [1])) for number in range(len(ESTIMATES))]
    near = [prediction()]
    expected = {one.plan: Expectation(near, estimate, {}) for one, estimate in zip(shapes, ESTIMATES, strict=True)}
    tried, dropped, doubted = list[Shape](), list[zs.Plan](), list[Sequence[zs.Plan]]()

    def attempt(shape: Shape) -> float:
        tried.append(shape)
        return found[len(tried) - 1]

    best = in_turn(shapes, expected, attempt, dropped.append, doubted.append)
    assert len(doubted) == taken and doubted[0] == [one.plan for one in shapes[2:]]
    assert best is shapes[found.index(min(found))]
    assert tried == shapes[:taken] and {*dropped} == {one.plan for one in shapes[taken:]}
