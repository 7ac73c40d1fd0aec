"""The progress of a search: plans looked at, plans ahead, and the time that these take."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import way_of

FEW_BLOCKS = 15  # that are rehearsed whole as fast as a plan without stages, with 4 and 5 of them
OTHERS = 6.0  # work of schedules with stages, of which one has two chunks for each


@dataclass
class SearchProgress:
    """The progress of a search that tries one group of plans after another.

    The number of all plans is that expected at the start, and grows only where more are looked at.

    Attributes:
        expected: expected number of plans to look at in each group, by its first plan; None is a group of others.
        seconds: of a plan without stages, before any was looked at; 0 if not known.
        blocks: of the best plan, which is rehearsed whole in the end; 0 where it is not.
        now: the clock.
    """

    expected: Mapping[Plan | None, int]
    seconds: float = 0.0
    blocks: int = 0
    now: Callable[[], float] = time.perf_counter
    _left: dict[Plan | None, float] = field(init=False)
    _current: float = 0.0
    _looks: int = 0
    _work: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = {plan: looks * _work_of(plan) for plan, looks in self.expected.items()}
        self._began = self.now()

    def begin(self, plan: Plan | None) -> None:
        """Begin the group of this plan; plans that the group before did not need are dropped."""
        self._current = self._left.pop(plan, 0.0)

    def drop(self, plan: Plan) -> None:
        """Skip the group of this plan."""
        self._left.pop(plan, None)

    def then(self, expected: Mapping[Plan | None, int], blocks: int) -> "SearchProgress":
        """The progress of a further search; before any plan, one takes as long as getting here."""
        return SearchProgress(expected, self._rate or self.now() - self._began, blocks, self.now)

    def look(self, plan: Plan) -> str:
        """The prefix of the line about a plan: "12/31 plans, about 40 s left"; empty without expected numbers."""
        if not self.expected:
            return ""
        self._current = max(self._current, _work_of(plan))
        left = self._current + sum(self._left.values()) + self.blocks / FEW_BLOCKS
        text = f"{self._looks}/{max(sum(self.expected.values()), self._looks + 1)} plans"
        if self._rate:
            text += f", about {self._rate * left:.0f} s left"
        self._looks += 1
        self._work += _work_of(plan)
        self._current -= _work_of(plan)
        return f"{text}: "

    @property
    def _rate(self) -> float:
        """Seconds of a plan without stages."""
        return (self.now() - self._began) / self._work if self._work else self.seconds


def _work_of(plan: Plan | None) -> float:
    """The work of a rehearsal, as a multiple of a plan without stages; None stands for schedules with stages."""
    return OTHERS if plan is None else way_of(plan).work
