"""Progress of a search: how many plans were looked at, of how many, and about how long the others take."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroshard.plan import Plan
from zeroshard.planner.predict.ways import way_of


@dataclass
class SearchProgress:
    """What is left of a search that tries one group of plans after another.

    Attributes:
        expected: looks at plans that each group is expected to take, by its first plan.
        now: the clock.
    """

    expected: Mapping[Plan, int]
    now: Callable[[], float] = time.perf_counter
    _left: dict[Plan, float] = field(init=False)
    _current: float = 0.0
    _looks: int = 0
    _work: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = {plan: looks * _work_of(plan) for plan, looks in self.expected.items()}
        self._began = self.now()

    def begin(self, plan: Plan) -> None:
        """The group of this plan begins; what was expected of the one before is over."""
        self._current = self._left.pop(plan, 0.0)

    def look(self, plan: Plan) -> str:
        """What to say before a plan is looked at: "12/31 plans, about 40 s left"; empty while nothing is expected."""
        if not self.expected:
            return ""
        self._current = max(self._current, _work_of(plan))
        left = self._current + sum(self._left.values())
        ahead = 1 + sum(self.expected[plan] for plan in self._left)
        text = f"{self._looks}/{max(sum(self.expected.values()), self._looks + ahead)} plans"
        if self._work:
            text += f", about {(self.now() - self._began) / self._work * left:.0f} s left"
        self._looks += 1
        self._work += _work_of(plan)
        self._current -= _work_of(plan)
        return f"{text}: "


def _work_of(plan: Plan) -> float:
    return way_of(plan).work
