"""The hang detector: a thread that watches a wait which has no timeout of its own."""

import threading
import time
import weakref
from typing import Any, Protocol

from zeroshard.comm.mesh import Mesh
from zeroshard.errors import CommError

PATIENCE = 2.0  # seconds of waiting before a rank publishes its wait


class WatchedWait(Protocol):
    """The methods of `Comm` that the detector calls."""

    mesh: Mesh

    def explain(self, place: Any, expired: bool) -> None:
        """Publish this rank's wait; raises if it can never end."""

    def withdraw(self) -> None:
        """Withdraw the published wait."""

    def break_messages(self, place: Any) -> None:
        """Make the wait fail."""


class HangDetector(threading.Thread):
    """Watches a wait for a message.

    Attributes:
        place: the awaited message; None between waits.
        since: begin of the wait (monotonic seconds).
        found: the error of a wait that can never end.
    """

    def __init__(self, comm: WatchedWait) -> None:
        super().__init__(name="zeroshard hang detector", daemon=True)
        self._comm = weakref.ref(comm)
        self.place: Any = None
        self.since = 0.0
        self.found: CommError | None = None
        self.start()

    def run(self) -> None:
        """Check twice a second for as long as there is a wait to watch."""
        published = False
        while True:
            time.sleep(PATIENCE / 4)
            comm, place = self._comm(), self.place
            if comm is None or self.found is not None:
                return
            waited = time.monotonic() - self.since
            try:
                if place is not None and waited > PATIENCE:
                    published = True
                    comm.explain(place, expired=waited > comm.mesh.timeout)
                elif published:
                    published = False
                    comm.withdraw()
            except CommError as error:
                self.found = error
                comm.break_messages(place)
            del comm
