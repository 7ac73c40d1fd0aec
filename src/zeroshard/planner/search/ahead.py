"""Looks ahead: the plans that a search will look at in each of its groups, for its progress."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from zeroshard.errors import ZeroshardError
from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.result import Prediction
from zeroshard.planner.search.exclusions import Exclusions
from zeroshard.planner.search.expectations import SLOWER, Expectation, Shape, Turns
from zeroshard.planner.search.progress import Looks
from zeroshard.planning.offers import Site

LIKELY = 0.9  # of a device, for the states of plans that are likely to fit
SPARE = 1  # last resorts to expect beside those that are likely to fit


def of_shape(shape: Shape, variants: Sequence[Plan], found: Expectation, possible: bool) -> Looks:
    """The plans to look at for a shape with its variants.

    Args:
        variants: those whose states have room.
        possible: whether the shape's own states have room.
    """
    offer, plain, leaner = shape.offer, found.likely.get(shape.plan), found.likely.get(shape.leaner)
    likely, plan = (plain, shape.plan) if plain else (leaner or [], shape.leaner)
    order = offer.order if plain else offer.lean_order or offer.order
    own = _with(plan, order.ahead(offer.counts, likely)) if likely else _of_unlikely(shape)
    if likely and not (plain or found.far):  # the finest, which does not fit
        own = [*_with(shape.plan, offer.counts[-1:]), *own]
    if possible:  # variants are looked at as the plan that fits
        like = [one if plain else replace(shape, plan=one).leaner for one in variants]
        varied = [one for variant in like for one in _with(variant, (likely or offer.counts[-1:])[:1])]
        return Looks(own + varied, len(own) + len(varied), len(own))
    each = [one for plan in variants for one in _of_variant(replace(shape, plan=plan), found.likely.get(plan))]
    return Looks(each, len(each), len(each))


def _of_variant(shape: Shape, likely: Sequence[int] | None) -> list[Plan]:
    """The plans to look at for a variant of a plan whose states have no room."""
    counts = shape.offer.counts
    return _with(shape.plan, shape.offer.order.ahead(counts, likely)) if likely else _of_unlikely(shape)


def _of_unlikely(shape: Shape) -> list[Plan]:
    """The plans to look at where none is likely: the finest, and leaner ones."""
    offer, lean = shape.offer, shape.lean
    return [*_with(shape.plan, offer.counts[-1:]), *_with(lean.plan, lean.offer.order.ahead(offer.counts, []))]


def of_all(
    shapes: Sequence[Shape], expected: Mapping[Plan, Expectation], looks: Mapping[Plan | None, Looks], site: Site
) -> tuple[dict[Plan | None, Looks], Plan | None]:
    """The plans to look at of all shapes that may be attempted, by group, and the plan that is likely to be the best.

    Args:
        looks: those of each shape with estimates.
    """
    turns = Turns(shapes, expected)
    every = {one.plan: one for slower in (1.0, SLOWER) for one in turns.likely(slower)} if looks else {}
    planned: dict[Plan | None, Looks] = {plan: looks.get(plan, Looks()) for plan in every}
    near = {plan: expected[plan].near[0] for plan in every if plan in expected and expected[plan].near}
    best = min(near.values(), key=lambda one: one.seconds, default=None)
    for plan, one in near.items():
        settings = every[plan].offer.faster(one.plan.microbatches, site) if one is best or not turns.many else ()
        faster = [one.plan.with_settings(other) for other in settings]
        if faster and best is not None:
            group = None if turns.many else plan
            planned[group] = planned.get(group, Looks()).beside(faster, one is best or busy(one) < best.seconds)
    return planned, None if best is None else best.plan


def busy(prediction: Prediction) -> float:
    """Seconds of a step without waits for other stages, which schedules for faster plans save."""
    return prediction.seconds - prediction.causes.get("bubble", 0.0)


def likely_resorts(
    shapes: Sequence[Shape], excluding: Exclusions, missing: int, deep: bool
) -> dict[Plan | None, Looks]:
    """The plans to look at of the first of the last resorts, until as many as are missing are likely to fit."""
    every = of_resorts(shapes, excluding, deep)
    return {plan: every[plan] for plan in enough(every, excluding, missing + SPARE)}


def of_resorts(shapes: Sequence[Shape], excluding: Exclusions, deep: bool) -> dict[Plan, Looks]:
    """The plans to look at of each last resort that its states do not exclude: it, and with its leaner settings.

    Args:
        deep: whether shares are looked at after the whole, and only where they are likely to fit.
    """
    found: dict[Plan, Looks] = {}
    before = set[Plan]()
    for shape in shapes:
        with suppress(ZeroshardError):
            if excluding.why(shape.plan) is None:
                first = {name: value for one in choices_of(shape.plan) for name, value in one.leaner_first.items()}
                plans = [shape.plan, shape.leaner]
                if deep and first:
                    whole = [plan.with_settings(first) for plan in plans]
                    plans = [*whole, *(plans[1:] if is_likely(shape.plan, excluding) else [])]
                plans = [plan for plan in plans if plan not in before]
                before.update(plans)
                found[shape.plan] = Looks(plans, len(plans), len(plans))
    return found


def is_likely(plan: Plan, excluding: Exclusions) -> bool:
    """Whether a plan is likely to fit, by its states alone."""
    with suppress(ZeroshardError):
        return excluding.least_bytes(plan) <= LIKELY * excluding.machines.device.capacity_bytes
    return False


def enough(resorts: Mapping[Plan, Looks], excluding: Exclusions, missing: int) -> list[Plan]:
    """The first of the last resorts, until as many as are missing are likely to fit."""
    found: list[Plan] = []
    for plan in resorts:
        if missing <= 0:
            break
        found.append(plan)
        missing -= is_likely(plan, excluding)
    return found


def _with(plan: Plan, counts: Sequence[int]) -> list[Plan]:
    return [replace(plan, microbatches=count) for count in counts]
