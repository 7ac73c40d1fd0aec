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
    """Begins checkpoints one after the other, and warns of those that fail.

    Attributes:
        last: the checkpoint that was begun last, until its end is noticed.
    """

    def __init__(self) -> None:
        self.last: Saving | None = None
        atexit.register(_finish, weakref.ref(self))

    def begin(self, save: Callable[[], Saving]) -> Saving:
        """Wait for the last checkpoint, then begin another; `exposed_seconds` covers both."""
        started = time.perf_counter()
        if self.last is not None:
            self.last.join()
        self.warn_of_failure()
        self.last = save()
        self.last.exposed_seconds = time.perf_counter() - started
        return self.last

    def wait(self) -> None:
        """Wait for the checkpoints of all engines of this process, which may be read next; warn if the last failed."""
        finish_all()
        self.warn_of_failure()

    def warn_of_failure(self) -> None:
        """Warn of a failed checkpoint, unless its caller has seen the error."""
        if self.last is not None and self.last.done:
            last, self.last = self.last, None
            if last.problem is not None and not last.seen:
                warnings.warn(str(last.problem), CheckpointWarning, stacklevel=4)


def finish_all(seconds: float | None = None) -> None:
    """Wait for the checkpoints that any engine of this process still writes, at most so long for each."""
    for saving in list(Saving.under_way):
        saving.join(seconds)


def _finish(savings: "weakref.ref[Savings]") -> None:
    """At the end of the process, wait for all checkpoints; after an uncaught exception, `GRACE` at most."""
    finish_all(GRACE if getattr(sys, "last_value", None) is not None else None)
    if (alive := savings()) is not None:
        alive.warn_of_failure()
