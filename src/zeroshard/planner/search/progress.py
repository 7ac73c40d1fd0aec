"""The progress of a search: plans looked at, plans ahead, and the time that these take."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import way_of


@dataclass
class SearchProgress:
    """The progress of a search that tries one group of plans after another.

    Attributes:
        expected: expected number of plans to look at in each group, by its first plan.
        now: the clock.
    """

    expected: Mapping[Plan, int]
    now: Callable[[], float] = time.perf_counter
    _dropped: int = 0
    _left: dict[Plan, float] = field(init=False)
    _current: float = 0.0
    _looks: int = 0
    _work: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = {plan: looks * _work_of(plan) for plan, looks in self.expected.items()}
        self._began = self.now()

    def begin(self, plan: Plan) -> None:
        """Begin the group of this plan; plans that the group before did not need are dropped."""
        self._current = self._left.pop(plan, 0.0)

    def drop(self, plan: Plan) -> None:
        """Skip the group of this plan."""
        if self._left.pop(plan, None) is not None:
            self._dropped += self.expected[plan]

    def look(self, plan: Plan) -> str:
        """The prefix of the line about a plan: "12/31 plans, about 40 s left"; empty without expected numbers."""
        if not self.expected:
            return ""
        self._current = max(self._current, _work_of(plan))
        left = self._current + sum(self._left.values())
        ahead = 1 + sum(self.expected[plan] for plan in self._left)
        everything = sum(self.expected.values()) - self._dropped
        text = f"{self._looks}/{max(everything, self._looks + ahead)} plans"
        if self._work:
            text += f", about {(self.now() - self._began) / self._work * left:.0f} s left"
        self._looks += 1
        self._work += _work_of(plan)
        self._current -= _work_of(plan)
        return f"{text}: "


def _work_of(plan: Plan) -> float:
    return way_of(plan).work
