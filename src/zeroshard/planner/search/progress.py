"""The progress of a search: plans looked at, plans ahead, and the time that these take.

[Note: kinds of work] A plan ahead takes the mean time of those looked at with the same techniques, by the work of each
relative to a plan without stages of which few blocks are rehearsed. Before any, it takes the mean of those with the
most techniques in common, by the same; first estimates are among these.

[Note: fixed number] The number of plans is fixed with the first line: the most that are expected, such as all variants
of a kind of plan. Those that turn out not to be needed count as done. Where more are looked at after all, each counts
as one that was expected. The time left is of the plans that are likely, by the share of those expected so far that
was looked at.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.predict import way_of

MOST_DEEP = 32  # most blocks times microbatches, or stages, of a whole rehearsal of the best plan
CHANCE = 0.6  # that another variant is looked at after one
SURE = 3  # plans that are taken to have been looked at as expected, beside those that were
FOUND_LAYERS = 1.4  # work of the first prediction of split layers, which finds them
Kind = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Looks:
    """The plans to look at in one group.

    Attributes:
        plans: in order; the last are variants, each of which is looked at if the one before was, by `CHANCE`.
        number: of those that count.
        sure: number of those before the variants.
    """

    plans: Sequence[Plan] = ()
    number: int = 0
    sure: int = 0

    def beside(self, further: Sequence[Plan], likely: bool) -> "Looks":
        """These and others, before the variants."""
        more = further if likely else ()
        plans = [*self.plans[: self.sure], *more, *self.plans[self.sure :]]
        return Looks(plans, self.number + len(further), self.sure + len(more))

    def weighed(self, start: int = 0) -> list[tuple[Plan, float]]:
        """The plans from one on, each with the chance that it is looked at."""
        first = max(self.sure, start - 1)
        return [(plan, CHANCE ** max(0, at - first)) for at, plan in enumerate(self.plans) if at >= start]


@dataclass
class SearchProgress:
    """The progress of a search that tries one group of plans after another.

    Attributes:
        expected: plans of each group, by its first plan; None is a group of others.
        depth: blocks of the model, which are all rehearsed where they are not alike.
        now: the clock.
        best: the plan that is expected to be rehearsed whole in the end, unless it is too large.
        spent: seconds and work of the plans looked at, by kind ([Note: kinds of work]).
    """

    expected: Mapping[Plan | None, Looks] = field(default_factory=dict)
    depth: int = 0
    now: Callable[[], float] = time.perf_counter
    best: Plan | None = None
    spent: dict[Kind, tuple[float, float]] = field(default_factory=dict)
    _ahead: dict[Plan | None, Looks] = field(init=False)
    _every: int = field(init=False)
    _doubtful: Collection[Plan] = ()
    _current: Looks = field(default_factory=Looks)
    _position: int = 0  # plans of the current group up to the one looked at
    _looked: int = 0  # plans looked at in it
    _before: tuple[float, int] = (0.0, 0)  # plans of the groups before: likely ones, and those looked at
    _looks: int = 0
    _done: int = 0
    _last: tuple[Plan, float] | None = None  # the plan that is looked at, and its start

    def __post_init__(self) -> None:
        self._ahead = dict(self.expected)
        self._every = sum(looks.number for looks in self._ahead.values())

    def begin(self, plan: Plan | None) -> None:
        """Begin the group of this plan; plans that the group before did not need are dropped."""
        if self._looked and self._current.plans:
            likely, looked = self._before
            self._before = likely + sum(chance for _, chance in self._current.weighed()), looked + self._looked
        self._current, self._position, self._looked = self._ahead.pop(plan, Looks()), 0, 0

    def drop(self, plan: Plan | None) -> None:
        """Skip the group of this plan."""
        self._ahead.pop(plan, None)

    def doubt(self, plans: Collection[Plan]) -> None:
        """Take the groups of these plans, and of no others, to be dropped later."""
        self._doubtful = plans

    def spare(self, needless: Callable[[Plan], bool]) -> None:
        """Leave out the first plan of each group ahead where it is needless."""
        for plan, looks in self._ahead.items():
            if plan is not None and plan in looks.plans and needless(plan):
                plans = [one for one in looks.plans if one != plan]
                self._ahead[plan] = Looks(plans, looks.number - 1, looks.sure - 1)

    def also(self, further: Mapping[Plan, Looks]) -> None:
        """Expect further groups, which count as the others did, or, before the first line, besides."""
        new = {plan: looks for plan, looks in further.items() if plan not in self.expected}
        counts = not self._every and self._last is None
        self._every += counts * sum(looks.number for looks in new.values())
        self._ahead |= {plan: replace(looks, number=counts * looks.number) for plan, looks in new.items()}

    def took(self, plan: Plan, seconds: float, first: bool) -> None:
        """Count the time of first estimates: the first are from two predictions, others from one of split layers."""
        self._count(plan, seconds, (2.0 if first else FOUND_LAYERS) * self._work_of(plan))

    @property
    def left_out(self) -> int:
        """Plans that were expected and, by the end, not looked at."""
        return max(0, self._every - self._looks)

    def look(self, plan: Plan) -> str:
        """The prefix of the line about a plan: "12/31 plans, about 40 s left"; empty without expected numbers."""
        if self._last is not None:
            before, start = self._last
            self._count(before, self.now() - start, self._work_of(before))
        self._last = plan, self.now()
        self._looked, self._looks = self._looked + 1, self._looks + 1
        plans, uncut = self._current.plans[self._position :], plan.with_settings({"pipeline_parallel.split": ()})
        self._position += 1 + (plans.index(uncut) if uncut in plans else 0)  # those before were not needed
        if not self._every:
            return ""
        text = f"{self._counted()}/{self._every} plans"
        if self.spent:
            text += f", about {self._seconds_left(plan):.0f} s left"
        return f"{text}: "

    def _counted(self) -> int:
        """The plans that are done ([Note: fixed number])."""
        ahead = max(1, self._current.number + 1 - self._looked) + sum(looks.number for looks in self._ahead.values())
        self._done = min(self._every - 1, max(self._done, self._every - ahead))
        return self._done

    def _seconds_left(self, plan: Plan) -> float:
        """The time of a plan, of the others that are likely, and of the best one, rehearsed whole."""
        every = [looks.weighed() for key, looks in self._ahead.items() if key not in self._doubtful]
        plans = [*chain.from_iterable(every), *self._current.weighed(self._position)]
        likely, looked = self._before
        share = (SURE + looked) / (SURE + likely)
        further = sum(chance * self._seconds_of(one) for one, chance in plans)
        return self._seconds_of(plan) + share * further + self._seconds_whole(plan)

    def _seconds_whole(self, plan: Plan) -> float:
        best = self.best or plan
        way = way_of(best)
        again = way.whole(best, self.depth) <= MOST_DEEP
        return self._rate(best) * way.work(best, self.depth, deep=True) if again else 0.0

    def _count(self, plan: Plan, seconds: float, work: float) -> None:
        before, done = self.spent.get(_kind_of(plan), (0.0, 0.0))
        self.spent[_kind_of(plan)] = before + seconds, done + work

    def _seconds_of(self, plan: Plan) -> float:
        return self._rate(plan) * self._work_of(plan)

    def _rate(self, plan: Plan) -> float:
        """Seconds of a unit of work for a plan ([Note: kinds of work])."""
        kind = _kind_of(plan)
        apart = {one: sum(a != b for a, b in zip(one, kind, strict=True)) for one in self.spent}
        near = [self.spent[one] for one, steps in apart.items() if steps == min(apart.values())]
        return sum(seconds for seconds, _ in near) / sum(work for _, work in near)

    def _work_of(self, plan: Plan) -> float:
        """The work of a prediction, as a multiple of one of few blocks and one microbatch without stages."""
        return way_of(plan).work(plan, self.depth)


def _kind_of(plan: Plan) -> Kind:
    """Which techniques are in use, and which have settings that are not as usual."""
    described = (choice.describe(None) for choice in choices_of(plan))
    return tuple(bool(part) for one in described for part in (one.name, one.settings))
