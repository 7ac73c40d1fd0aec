"""The progress of a search: plans looked at, plans ahead, and the time that these take.

[Note: kinds of work] A plan ahead takes the mean time of those looked at with the same techniques, by the work of each
relative to a plan without stages of which few blocks are rehearsed. Before any, it takes the mean of all, by the same.
Schedules for the fastest plan take the mean time of those with stages, or before any the work of the largest.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroshard.plan import Plan
from zeroshard.planner.choices import choices_of
from zeroshard.planner.predict.predict import way_of

ALL_BLOCKS = (25, 28)  # blocks to add to all of a model, and to divide these by, for the work of a whole rehearsal
Kind = tuple[bool, ...]


@dataclass
class SearchProgress:
    """The progress of a search that tries one group of plans after another.

    The number of all plans is that expected at the start, and grows only where more are looked at. Those that turn out
    not to be needed count as done.

    Attributes:
        expected: expected number of plans to look at in each group, by its first plan; None is a group of others.
        seconds: of a plan without stages, before any was looked at; 0 if not known.
        blocks: of the best plan, which is rehearsed whole in the end; 0 where it is not.
        now: the clock.
        depth: blocks of the model, which are all rehearsed where they are not alike.
        spent: seconds, work and number of the plans looked at, by kind ([Note: kinds of work]).
        before: plans that earlier groups left out.
    """

    expected: Mapping[Plan | None, int]
    seconds: float = 0.0
    blocks: int = 0
    now: Callable[[], float] = time.perf_counter
    depth: int = 0
    spent: dict[Kind, tuple[float, float, int]] = field(default_factory=dict)
    before: int = 0
    _left: dict[Plan | None, int] = field(init=False)
    _spared: set[Plan] = field(default_factory=set)
    _current: int = 0
    _looks: int = 0
    _further: int = 0  # looks beyond those expected
    _last: tuple[Plan, float] | None = None  # the plan that is looked at, and its start

    def __post_init__(self) -> None:
        self._left = dict(self.expected)

    def begin(self, plan: Plan | None) -> None:
        """Begin the group of this plan; plans that the group before did not need are dropped."""
        self._current = self._left.pop(plan, 0)

    def drop(self, plan: Plan) -> None:
        """Skip the group of this plan."""
        self._left.pop(plan, None)

    def spare(self, needless: Callable[[Plan], bool]) -> None:
        """Expect one plan less in each group ahead whose first plan is needless."""
        for plan in [each for each in self._left if each is not None and each not in self._spared and needless(each)]:
            self._left[plan] = max(0, self._left[plan] - 1)
            self._spared.add(plan)

    def then(self, expected: Mapping[Plan | None, int], blocks: int) -> "SearchProgress":
        """The progress of a further search, with the times known by now."""
        self._end()
        return SearchProgress(expected, self._unit, blocks, self.now, self.depth, self.spent, self.left_out)

    @property
    def left_out(self) -> int:
        """Plans that were expected and, by the end, not looked at."""
        return self.before + self._every - self._looks

    def look(self, plan: Plan) -> str:
        """The prefix of the line about a plan: "12/31 plans, about 40 s left"; empty without expected numbers."""
        if not self.expected:
            return ""
        self._end()
        self._last = plan, self.now()
        if not self._current:
            self._current, self._further = 1, self._further + 1
        left = self._current * self._seconds_of(plan) + (_whole_work(self.blocks) * self._unit if self.blocks else 0.0)
        left += sum(looks * self._seconds_of(one) for one, looks in self._left.items())
        text = f"{self._every - self._current - sum(self._left.values())}/{self._every} plans"
        if self._unit:
            text += f", about {left:.0f} s left"
        self._looks += 1
        self._current -= 1
        return f"{text}: "

    @property
    def _every(self) -> int:
        return sum(self.expected.values()) + self._further

    def _end(self) -> None:
        """Count the time of the plan that was looked at."""
        if self._last is not None:
            (plan, start), self._last = self._last, None
            seconds, work, number = self.spent.get(_kind_of(plan), (0.0, 0.0, 0))
            self.spent[_kind_of(plan)] = seconds + self.now() - start, work + self._work_of(plan), number + 1

    def _seconds_of(self, plan: Plan | None) -> float:
        """The time of a plan ([Note: kinds of work])."""
        if plan is None:
            staged = [(seconds, number) for kind, (seconds, _, number) in self.spent.items() if kind[0]]
            number = sum(count for _, count in staged)
            most = max((self._work_of(one) for one in self.expected if one is not None), default=1.0)
            return sum(seconds for seconds, _ in staged) / number if number else self._unit * most
        seconds, work, _ = self.spent.get(_kind_of(plan), (0.0, 0.0, 0))
        return (seconds / work if work else self._unit) * self._work_of(plan)

    @property
    def _unit(self) -> float:
        """Seconds of a plan without stages."""
        work = sum(one for _, one, _ in self.spent.values())
        return sum(seconds for seconds, _, _ in self.spent.values()) / work if work else self.seconds

    def _work_of(self, plan: Plan) -> float:
        """The work of a rehearsal, as a multiple of a plan without stages."""
        alike = all(choice.alike for choice in choices_of(plan))
        return way_of(plan).work(plan, self.depth) * (1.0 if alike else max(1.0, _whole_work(self.depth)))


def _whole_work(blocks: int) -> float:
    """The work of a rehearsal of all blocks, as a multiple of one of few."""
    more, each = ALL_BLOCKS
    return (blocks + more) / each


def _kind_of(plan: Plan) -> Kind:
    """Which techniques are in use, and which have settings that are not as usual."""
    described = (choice.describe(None) for choice in choices_of(plan))
    return tuple(bool(part) for one in described for part in (one.name, one.settings))
