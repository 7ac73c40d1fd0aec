"""Expectations of a search: first estimates of all kinds of plans, from which it knows where to begin."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.plan import Plan
from zeroshard.planner.predict.estimate import Estimator
from zeroshard.planner.predict.result import Prediction
from zeroshard.planning.offers import Offer

FAR = 1.2  # times a device's memory: plans expected above it are left out among many, where leaner ones are likely


@dataclass(frozen=True)
class Shape:
    """A plan without its microbatches.

    Attributes:
        rows: of one data rank.
        together: tensor ranks.
    """

    plan: Plan
    rows: int
    offer: Offer
    together: int = 1

    @property
    def leaner(self) -> Plan:
        """The plan with the leaner settings of its offer."""
        return self.plan.with_settings(self.offer.leaner)


@dataclass(frozen=True)
class Expectation:
    """First estimates of a shape.

    Attributes:
        near: estimates of the plans near the fastest that is likely to fit; empty where none is.
        seconds: of a step.
        likely: by plan (the shape's, its variants and the leaner one) the numbers of microbatches that are likely.
        far: whether the plan is far too large without leaner settings, and likely to fit with them.
    """

    near: Sequence[Prediction]
    seconds: float
    likely: Mapping[Plan, list[int]]
    far: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key of shapes: those that are likely to fit first, the fastest of them first."""
        return not self.near, self.seconds


def expectation_of(shape: Shape, variants: Sequence[Plan], estimator: Estimator) -> Expectation:
    """The expectation of a shape with some microbatches."""
    offer = shape.offer

    def estimated(plan: Plan) -> list[Prediction]:
        return [estimator.prediction(replace(plan, microbatches=m), shape.rows) for m in offer.counts]

    plans = [shape.plan, *variants]
    each = {plan: estimated(plan) for plan in plans}
    nears = {plan: _near(offer, found) for plan, found in each.items()}
    near = next(filter(None, nears.values()), [])
    lean, leaner = estimated(shape.leaner), shape.leaner
    if not near and leaner != shape.plan and estimator.layers is not None:
        near = nears[leaner] = _near(replace(offer, order=offer.lean_order or offer.order), lean)
    far = leaner in nears and bool(near) and all(_far(one) for one in each[shape.plan])
    seconds = min(
        (one.seconds for one in near or (lean if leaner != shape.plan else each[shape.plan])), default=math.inf
    )
    likely = {plan: [one.plan.microbatches for one in found] for plan, found in nears.items()}
    return Expectation(near, seconds, likely, far)


def _far(one: Prediction) -> bool:
    return one.peak_bytes > FAR * one.capacity_bytes


def _near(offer: Offer, estimated: Sequence[Prediction]) -> Sequence[Prediction]:
    """The estimates, by microbatches, near the plan to be found; none if none fits."""
    fitting = [one for one in estimated if one.fits]
    usual = [one for one in fitting if one.plan.microbatches <= offer.usual]
    return offer.order.near(usual) if usual else fitting[:1]
