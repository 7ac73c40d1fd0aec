"""The checkpoint that an engine has on its way: one at a time, looked after until it is on the disk."""

import atexit
import sys
import time
import warnings
import weakref
from collections.abc import Callable

from zeroshard.checkpoint import Saving
from zeroshard.errors import CheckpointWarning

GRACE = 5.0  # seconds that a process which failed gives its last checkpoint


class Savings:
    """Begins checkpoints one after the other, and tells of those that fail."""

    def __init__(self) -> None:
        self._last: Saving | None = None
        atexit.register(_finish, weakref.ref(self))

    def begin(self, save: Callable[[], Saving]) -> Saving:
        """Wait for the last checkpoint, then begin another; counts what both took."""
        started = time.perf_counter()
        self.wait()
        self._last = save()
        self._last.exposed_seconds = time.perf_counter() - started
        return self._last

    def wait(self, seconds: float | None = None) -> None:
        """Let the last checkpoint come to its end; one that failed is a warning, unless somebody knows already."""
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
    """At the end of the process, let the last checkpoint come to its end; with little patience after a failure."""
    found = savings()
    if found is not None:
        found.wait(GRACE if getattr(sys, "last_value", None) is not None else None)
