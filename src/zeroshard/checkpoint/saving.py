"""The background save of an engine: one at a time, waited for at the end of the process."""

import atexit
import sys
import time
import warnings
import weakref
from collections.abc import Callable

from zeroshard.checkpoint import Saving
from zeroshard.errors import CheckpointWarning

GRACE = 5.0  # seconds for the last checkpoint of a process that failed


class Savings:
    """Begins checkpoints one after the other, and warns of those that fail."""

    def __init__(self) -> None:
        self._last: Saving | None = None
        atexit.register(_finish, weakref.ref(self))

    def begin(self, save: Callable[[], Saving]) -> Saving:
        """Wait for the last checkpoint, then begin another; `exposed_seconds` covers both."""
        started = time.perf_counter()
        self.wait()
        self._last = save()
        self._last.exposed_seconds = time.perf_counter() - started
        return self._last

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the last checkpoint, at most so long; warn if it failed and its caller has not seen the error."""
        if self._last is not None:
            self._last.join(seconds)
        self.warn_of_failure()

    def warn_of_failure(self) -> None:
        """Warn of a failed checkpoint, unless its caller has seen the error."""
        if self._last is not None and self._last.done:
            last, self._last = self._last, None
            if last.problem is not None and not last.seen:
                warnings.warn(str(last.problem), CheckpointWarning, stacklevel=4)


def _finish(savings: "weakref.ref[Savings]") -> None:
    """At the end of the process, wait for the last checkpoint; after an uncaught exception, `GRACE` at most."""
    alive = savings()
    if alive is not None:
        alive.wait(GRACE if getattr(sys, "last_value", None) is not None else None)
