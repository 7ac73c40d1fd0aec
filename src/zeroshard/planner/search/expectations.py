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
from contextlib import suppress
from dataclasses import dataclass, replace

from zeroshard.errors import ZeroshardError
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.estimate import Estimator
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.exclusions import Exclusions
from zeroshard.planning.offers import Offer

FEW_SHAPES = 5  # most kinds of plans without split layers that are all looked at
BEHIND = 1.1  # times the seconds of the fastest plan: slower estimates are left out among many
TRIED = 2  # variants of a plan that fits that are looked at, the last one slower than the one before
LIKELY = 0.9  # of a device, for the states of plans that are likely to fit
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


def looks_of(shape: Shape, variants: Sequence[Plan], found: Expectation, many: bool, possible: bool) -> int:
    """The expected number of plans to look at for a shape with its variants.

    Args:
        variants: those whose states have room.
        many: whether faster settings are tried later, for the fastest shape alone.
        possible: whether the shape's own states have room.
    """
    offer = shape.offer
    likely, lean = (found.likely.get(plan, []) for plan in (shape.plan, shape.leaner))
    order = offer.order if likely else offer.lean_order or offer.order
    looks = order.looks(offer.counts, likely or lean) if likely or lean else 0
    looks += possible and not (likely or found.far)  # the finest, which does not fit
    if looks and possible and found.near:
        return looks + (0 if many else offer.most_faster) + min(TRIED, len(variants))
    return max(1, looks) * possible + sum(len(found.likely.get(plan, [])) or 2 for plan in variants)


def looks_at_resorts(plans: Sequence[Plan], excluding: Exclusions, missing: int) -> dict[Plan | None, int]:
    """The expected number of plans to look at of last resorts, until as many as are missing are likely to fit."""
    looks: dict[Plan | None, int] = {}
    room = LIKELY * excluding.machines.device.capacity_bytes
    for plan in plans:
        with suppress(ZeroshardError):
            if missing and excluding.why(plan) is None:
                looks[plan] = 2  # with its leaner settings
                missing -= excluding.least_bytes(plan) <= room
    return looks


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


def in_turn(
    shapes: Sequence[Shape],
    expected: Mapping[Plan, Expectation],
    attempt: Callable[[Shape], float],
    drop: Callable[[Plan], None] = lambda plan: None,
) -> Shape | None:
    """Attempt shapes but those that are left out ([Note: plans that are left out]); returns the fastest.

    Args:
        attempt: returns the seconds of a shape; infinity where it does not fit.
        drop: called with each shape that is left out.
    """
    many, whole = are_many(shapes), _with_least(shapes)
    split = [shape for shape in shapes if shape not in whole and shape.plan in expected]

    def rank(shape: Shape) -> tuple[bool, float]:
        return expected[shape.plan].rank if shape.plan in expected else (True, 0.0)

    ordered = sorted(whole + split, key=rank) if many else whole + sorted(split, key=rank)
    fastest, best = math.inf, None
    factors: list[float] = []  # seconds of the plans found, relative to their estimates
    limits: dict[Plan | None, float] = {}  # by kind
    while ordered:
        shape, *ordered = ordered
        found = attempt(shape)
        if found < math.inf and 0 < rank(shape)[1] < math.inf:
            factors.append(found / rank(shape)[1])
        if found < fastest:
            fastest, best = found, shape
        if best is None:
            continue
        if many and found < math.inf and (kind := _kind(shape)) is not None:
            limits.setdefault(kind, rank(shape)[1])
        too_fast = max(1.0, min(factors)) if len(factors) > 1 else 1.0
        limit = fastest * (BEHIND / too_fast if many else 1.0)
        behind = [s for s in ordered if (many or s in split) and rank(s)[1] >= limits.get(_kind(s), limit)]
        for slow in behind:
            drop(slow.plan)
        ordered = [s for s in ordered if s not in behind]
    return best


def _with_least(shapes: Sequence[Shape]) -> list[Shape]:
    """Those without split layers, or with the least split that is asked for."""
    least = min((shape.together for shape in shapes), default=1)
    return [shape for shape in shapes if shape.together == least]


def _kind(shape: Shape) -> Plan | None:
    """The plan of a shape but for its number of stages; None without stages."""
    level = choices_of(shape.plan).stages.level
    return shape.plan.with_settings(level) if level else None


def unsplit(plan: Plan) -> Plan:
    """The plan of a shape, with one microbatch and without the cut that a rehearsal chose."""
    return plan.with_settings({"microbatches": 1, "pipeline_parallel.split": ()})
