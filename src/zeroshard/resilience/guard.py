"""Bad steps: detected by one number per step, equal on all ranks, tolerated for a while, then rolled back.

PaLM (2204.02311, section 5.1) goes back to a checkpoint from before a spike and leaves out the batches around it; the
same batches, met later with other weights, did no harm. A guard only decides, from these numbers and its own state. So
all ranks decide equally without communication, and a resumed run decides as the uninterrupted one would.

[Note: which checkpoint is good] The loss of step b comes from the weights after b - 1 steps, and if it is bad those
weights may be the reason. So a checkpoint is proven good by a good loss of the step after it. The newest proven one is
taken; without one, the newest from before the first bad step; a later one never.
"""

import logging
import math
import statistics
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from zeroshard.errors import ConfigError, NonFiniteError

LOG = logging.getLogger(__name__)
LEAST = 10  # good values before a spike can be detected
REMEMBERED = 8  # bad values shown in an error
SHOWN = 5  # good values shown in an error


class GuardVerdict(StrEnum):
    """The verdict on a step."""

    GOOD = "good"
    BAD = "bad"  # tolerated
    ROLL_BACK = "roll back"  # and skip the batches of the bad steps


class Origin(NamedTuple):
    """The first of a row of bad steps: its number (from 1) and the data position before it, in samples."""

    step: int
    position: int


class Guard:
    """Checks one number per step, such as the loss or the norm of the gradient.

    A value is bad if it is not finite, or more than `spike` times the median of the last good values.

    Args:
        what: the name of the number, for people.
        spike: the factor, for positive numbers; None only checks that the number is finite.
        window: number of good values in the median.
        patience: bad steps in a row that cause a roll back; fewer are tolerated.
        rollbacks: number of roll backs before giving up; counted afresh once the run is `window` steps past its last
            bad step.

    Attributes:
        origin: the beginning of the present row of bad steps; None after a good step.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        what: str = "loss",
        *,
        spike: float | None = None,
        window: int = 50,
        patience: int = 1,
        rollbacks: int = 3,
    ) -> None:
        if spike is not None and not 1 < spike < math.inf:
            raise ConfigError(f"spike is {spike}; it must be more than 1 and finite, or None.")
        for name, value, low in (("window", window, 1), ("patience", patience, 1), ("rollbacks", rollbacks, 0)):
            if value < low:
                raise ConfigError(f"{name} is {value}; it must be {low} or more.")
        self._what, self._spike, self._window = what, spike, window
        self._patience, self._rollbacks = patience, rollbacks
        self._values: list[float] = []  # the last good ones
        self._row = 0  # bad steps in a row so far
        self._used = 0  # roll backs
        self._last_bad = 0  # the highest step that was bad
        self._bad_steps: list[str] = []  # bad steps, for people
        self.origin: Origin | None = None

    def decide(self, step: int, value: float, position: int) -> GuardVerdict:
        """The verdict on a step.

        Args:
            step: its number, from 1.
            value: the number, the same on all ranks.
            position: of the data before the step, in samples.

        Raises:
            NonFiniteError: a roll back is due, and `rollbacks` of them were used.
        """
        median = self._median
        if math.isfinite(value) and (median is None or value <= median * (self._spike or math.inf)):
            self._values = [*self._values, value][-self._window :]
            self._row, self.origin = 0, None
            if step >= self._last_bad + self._window:
                self._used = 0
            return GuardVerdict.GOOD
        self._row += 1
        self._last_bad = max(self._last_bad, step)
        self.origin = self.origin or Origin(step, position)
        compared = "" if median is None else f" compared with a median of {median:.4g}"
        self._bad_steps = [*self._bad_steps, f"{value:.4g} in step {step}{compared}"][-REMEMBERED:]
        LOG.warning("the %s is %s", self._what, self._bad_steps[-1])
        if self._row < self._patience:
            return GuardVerdict.BAD
        if self._used >= self._rollbacks:
            raise self.give_up(f"the run has gone back {self._used} times, of {self._rollbacks} allowed")
        self._used += 1
        return GuardVerdict.ROLL_BACK

    def choose(self, checkpoints: Iterable[int]) -> int | None:
        """The checkpoint to go back to, named by its step; None if all were saved after the first bad step."""
        assert self.origin is not None
        before = [number for number in checkpoints if number < self.origin.step]
        proven = [number for number in before if number + 1 < self.origin.step]
        return max(proven or before, default=None)

    def give_up(self, why: str) -> NonFiniteError:
        """The error that ends the run, with the last bad and good values and the way out."""
        good = ", ".join(f"{value:.4g}" for value in self._values[-SHOWN:]) or "none"
        where = f" from sample {self.origin.position} on" if self.origin else ""
        return NonFiniteError(
            f"The {self._what} went wrong ({'; '.join(self._bad_steps)}; the last good values: {good}), and {why}. "
            f"Lower the learning rate, set clip_norm, or look at the data{where}."
        )

    def state(self) -> dict[str, Any]:
        """The state on which later verdicts depend, in plain JSON values."""
        return {
            "values": list(self._values),
            "row": self._row,
            "origin": list(self.origin) if self.origin else None,
            "used": self._used,
            "last_bad": self._last_bad,
            "told": list(self._bad_steps),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`, in a run that resumes."""
        self.rewind(state)
        self._used, self._last_bad, self._bad_steps = int(state["used"]), int(state["last_bad"]), list(state["told"])

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Go back to an earlier `state`, in a run that rolls back; its roll backs and bad steps stay counted."""
        self._values = [float(value) for value in state["values"]][-self._window :]
        self._row = int(state["row"])
        self.origin = Origin(*map(int, state["origin"])) if state["origin"] else None

    @property
    def _median(self) -> float | None:
        """The median of the last good values; None with too few of them, or without a factor."""
        if self._spike is None or len(self._values) < min(LEAST, self._window):
            return None
        median = statistics.median(self._values)
        return median if median > 0 else None
