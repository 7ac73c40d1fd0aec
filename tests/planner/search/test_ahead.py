"""The plans that a search expects to look at, by group."""

from dataclasses import replace

import zeroshard as zs
from zeroshard.doctor.hardware import Machines
from zeroshard.planner.predict.states import Sizes
from zeroshard.planner.search.ahead import enough, of_resorts, of_shape
from zeroshard.planner.search.exclusions import Exclusions
from zeroshard.planner.search.expectations import Expectation, Shape
from zeroshard.planner.search.progress import Looks
from zeroshard.planning.offers import Coarsest, Fastest, Fewest, Offer

PLAN, LEAN = zs.Plan(zero=1), {"recompute": "blocks"}
OFFER = Offer({}, 1, [1, 2, 4], leaner=LEAN)
VARIANTS = [zs.Plan(zero=1, expert_parallel=ranks) for ranks in (2, 4)]


def of(plan: zs.Plan, *counts: int) -> list[zs.Plan]:
    return [replace(plan, microbatches=count) for count in counts]


def expectation(**likely: list[int]) -> Expectation:
    plans = {"plain": PLAN, "lean": PLAN.with_settings(LEAN), "variant": VARIANTS[1]}
    return Expectation((), 1.0, {plans[name]: counts for name, counts in likely.items()})


def test_orders_expect_the_likely_numbers_of_microbatches_and_those_beside_them() -> None:
    counts = [1, 2, 4]
    assert [Fewest().ahead(counts, likely) for likely in ([4], [1], [])] == [[4, 2], [1], [4, 1]]
    assert [Fastest().ahead(counts, likely) for likely in ([2, 4], [])] == [[2, 4], [4]]
    assert Coarsest().ahead(counts, [4]) == [1] and Fewest().ahead([], []) == []


def test_variants_are_expected_as_the_plan_that_is_likely_to_fit() -> None:
    shape = Shape(PLAN, 4, OFFER)
    found = of_shape(shape, VARIANTS, expectation(plain=[2]), possible=True)
    assert found == Looks([*of(PLAN, 2, 1), *(replace(one, microbatches=2) for one in VARIANTS)], 4, 2)
    found = of_shape(shape, VARIANTS, expectation(lean=[1]), possible=True)
    lean = [replace(shape, plan=one).leaner for one in VARIANTS]
    assert found == Looks([*of(PLAN, 4), *of(shape.leaner, 1), *lean], 4, 2)


def test_leaner_plans_are_expected_where_none_is_likely() -> None:
    shape = Shape(PLAN, 4, OFFER)
    assert of_shape(shape, [], expectation(), possible=True).plans == [*of(PLAN, 4), *of(shape.leaner, 4, 1)]
    lean = replace(shape, plan=VARIANTS[0]).leaner
    found = of_shape(shape, VARIANTS, expectation(variant=[1]), possible=False)
    assert found.plans == [*of(VARIANTS[0], 4), *of(lean, 4, 1), VARIANTS[1]]


def test_last_resorts_are_expected_until_enough_are_likely_to_fit() -> None:
    """A share of the states is expected after all of them, which tell whether it may fit; each plan once."""
    machines = Machines.of("A100-80", 1)
    excluding = Exclusions(Sizes(6 * 10**9, 0, (10**8,), 8), machines, zs.Plan())  # a quarter leaves 91 % of a device
    whole = zs.Plan(zero=2, offload="optimizer")
    share, less = (whole.with_settings({"offload.fraction": fraction}) for fraction in (0.75, 0.25))
    shapes = [Shape(plan, 1, Offer({}, 1, [1], Coarsest(), leaner=LEAN)) for plan in (less, share, whole)]
    every = of_resorts(shapes, excluding, deep=False)
    assert [every[plan].number for plan in (share, whole)] == [2, 2]
    assert enough(every, excluding, 1)[-1] == share and enough(every, excluding, 2)[-1] == whole
    deep = of_resorts(shapes[1:], excluding, deep=True)
    leaner = [plan.with_settings(LEAN) for plan in (share, whole)]
    assert deep == {share: Looks([whole, leaner[1], leaner[0]], 3, 3), whole: Looks([], 0, 0)}
