"""Expectations of a search: first estimates of all kinds of plans, from which their order follows.

[Note: plans that are left out] Kinds of plans that split layers are looked at where their first estimate is faster than
the fastest plan found, or where no plan has been found to fit. Of many kinds, those with the fastest estimates come
first, and those that are expected to be clearly slower than the fastest found are left out; so is one that differs from
a plan found to fit in its number of stages alone, and is slower by its estimate. Where two or more were found, and
all are slower than their estimates, so are the others, by the least of these factors. Faster settings, such as other
schedules, are tried for the fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.estimate import Estimator
from zeroshard.planner.predict.result import Prediction
from zeroshard.planning.offers import Offer

FEW_SHAPES = 5  # most kinds of plans without split layers that are all looked at
BEHIND = 1.1  # times the seconds of the fastest plan: slower estimates are left out among many
SLOWER = 1.3  # times the seconds of first estimates: plans found may be, so that further kinds are looked at
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

    @property
    def lean(self) -> "Shape":
        """The shape of `leaner`."""
        order = self.offer.lean_order or self.offer.order
        return replace(self, plan=self.leaner, offer=replace(self.offer, order=order))


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


def is_hopeless(estimator: object, plan: Plan, rows: int) -> bool:
    """Whether a plan is far too large by an `Estimator`, if it is one; not for settings that this leaves out."""
    if not isinstance(estimator, Estimator) or plan.loss_chunk != estimator.one.plan.loss_chunk:
        return False
    return not any(choice.resort for choice in choices_of(plan)) and _far(estimator.prediction(plan, rows))


def _far(one: Prediction) -> bool:
    return one.peak_bytes > FAR * one.capacity_bytes


def _near(offer: Offer, estimated: Sequence[Prediction]) -> Sequence[Prediction]:
    """The estimates, by microbatches, near the plan to be found; none if none fits."""
    fitting = [one for one in estimated if one.fits]
    usual = [one for one in fitting if one.plan.microbatches <= offer.usual]
    return offer.order.near(usual) if usual else fitting[:1]


def are_many(shapes: Sequence[Shape]) -> bool:
    """Whether there are too many kinds of plans to look at all."""
    return len(_with_least(shapes)) > FEW_SHAPES


class Turns:
    """The shapes that a search attempts one after another, but those that are left out.

    Attributes:
        ahead: those to attempt next, in order.
        many: whether there are too many to look at all.
        best: the fastest of those attempted ([Note: plans that are left out]).
    """

    def __init__(self, shapes: Sequence[Shape], expected: Mapping[Plan, Expectation]) -> None:
        self._expected, self.many, whole = expected, are_many(shapes), _with_least(shapes)
        self._split = [shape for shape in shapes if shape not in whole and shape.plan in expected]
        split = sorted(self._split, key=self._rank)
        self.ahead = sorted(whole + self._split, key=self._rank) if self.many else whole + split
        self.best: Shape | None = None
        self._fastest = math.inf
        self._factors: list[float] = []  # seconds of the plans found, relative to their estimates
        self._limits: dict[Plan | None, float] = {}  # by kind

    def took(self, seconds: float) -> list[Shape]:
        """Count the attempt at the next shape, infinite seconds where it does not fit; returns those left out."""
        shape = self.ahead.pop(0)
        estimate = self._rank(shape)[1]
        if seconds < math.inf and 0 < estimate < math.inf:
            self._factors.append(seconds / estimate)
        if seconds < self._fastest:
            self._fastest, self.best = seconds, shape
        if self.best is None:
            return []
        if self.many and seconds < math.inf and (kind := _kind(shape)) is not None:
            self._limits.setdefault(kind, estimate)
        too_fast = max(1.0, min(self._factors)) if len(self._factors) > 1 else 1.0
        limit = self._fastest * (BEHIND / too_fast if self.many else 1.0)
        may = [one for one in self.ahead if self.many or one in self._split]
        behind = [one for one in may if self._rank(one)[1] >= self._limits.get(_kind(one), limit)]
        self.ahead = [one for one in self.ahead if one not in behind]
        return behind

    def likely(self, slower: float = 1.0) -> list[Shape]:
        """Those ahead that will probably be attempted, by their estimates.

        Args:
            slower: seconds of the plans found relative to their estimates, before any was found.
        """
        then, found = copy(self), []
        then._factors, then._limits = [*self._factors], dict(self._limits)
        factor = sum(self._factors) / len(self._factors) if self._factors else slower
        while then.ahead:
            then.ahead = [*then.ahead]
            found.append(then.ahead[0])
            known = self._expected.get(found[-1].plan)
            then.took(math.inf if known is None or not known.near else factor * known.seconds)
        return found

    def _rank(self, shape: Shape) -> tuple[bool, float]:
        return self._expected[shape.plan].rank if shape.plan in self._expected else (True, 0.0)


def in_turn(
    shapes: Sequence[Shape],
    expected: Mapping[Plan, Expectation],
    attempt: Callable[[Shape], float],
    drop: Callable[[Plan], None] = lambda plan: None,
    doubt: Callable[[Sequence[Plan]], None] = lambda plans: None,
) -> Shape | None:
    """Attempt shapes but those that are left out ([Note: plans that are left out]); returns the fastest.

    Args:
        attempt: returns the seconds of a shape; infinity where it does not fit.
        drop: called with each shape that is left out.
        doubt: called before each attempt with those that are likely to be left out later.
    """
    turns = Turns(shapes, expected)
    while turns.ahead:
        likely = turns.likely(SLOWER)
        doubt([shape.plan for shape in turns.ahead if shape not in likely])
        for slow in turns.took(attempt(turns.ahead[0])):
            drop(slow.plan)
    return turns.best


def _with_least(shapes: Sequence[Shape]) -> list[Shape]:
    """Those without split layers, or with the least split that is asked for."""
    least = min((shape.together for shape in shapes), default=1)
    return [shape for shape in shapes if shape.together == least]


def _kind(shape: Shape) -> Plan | None:
    """The plan of a shape but for its number of stages; None without stages."""
    level = choices_of(shape.plan).stages.level
    return shape.plan.with_settings(level) if level else None


def unsplit(plan: Plan) -> Plan:
    """A plan without the cut that a rehearsal chose."""
    return plan.with_settings({"pipeline_parallel.split": ()})
