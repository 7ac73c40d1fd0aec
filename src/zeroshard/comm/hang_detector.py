"""The hang detector: a thread that watches waits which have no timeout of their own."""

import threading
import time
import weakref
from typing import Any, Protocol

import torch

from zeroshard.comm.heartbeat import write_failure
from zeroshard.comm.mesh import Mesh, announce_failure
from zeroshard.comm.process_groups import abort_all
from zeroshard.errors import CommError
from zeroshard.platform import accelerator

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
            comm = self._comm()
            if comm is None or self.found is not None:
                return
            place = self._awaited(comm)
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
                self._end(comm, place)
            del comm

    def _awaited(self, comm: WatchedWait) -> Any:
        """The operation that has not ended; None without one."""
        return self.place

    def _end(self, comm: WatchedWait, place: Any) -> None:
        """Make the wait fail."""
        comm.break_messages(place)


class DeviceDetector(HangDetector):
    """Watches the waits of an accelerator's streams, which do not block the host.

    [Note: waits of streams] A wait for NCCL's work returns at once, and only the stream waits. In a hang the host goes
    on, until it waits for the device in another place, where no timeout ends it. So an event is recorded after a wait,
    one at a time; while it has not passed, its operation has not ended, or one before it. If that lasts, the rank
    publishes it and compares it with the other ranks', as in a wait of the host. A hang is written down, for the other
    ranks and the supervisor; then all groups are aborted, which ends their operations on the device, so that the host
    goes on to its next operation, where the error is raised. NCCL's own watchdog would end the process without a name,
    half a minute later.
    """

    def __init__(self, comm: WatchedWait) -> None:
        self._device, self._stream = comm.mesh.device, accelerator.current_stream(comm.mesh.device)
        self._event: torch.Event | None = None
        self._latest: Any = None
        super().__init__(comm)

    def follow(self, place: Any) -> None:
        """Watch an operation for which the current stream waits from now on.

        Raises:
            CommError: that of an earlier operation which can never end.
        """
        if self.found is not None:
            raise self.found
        self._latest = place
        if self._event is None:
            self._stream = accelerator.current_stream(self._device)
            self._record(place)

    def _record(self, place: Any) -> None:
        self.since, self.place = time.monotonic(), place
        self._event = accelerator.record(self._device, on=self._stream)

    def _awaited(self, comm: WatchedWait) -> Any:
        while self._event is not None and self._event.query():
            if self._latest is self.place:
                self._event = None
            if self._latest is not self.place:  # waits since then, also during the line above
                self._record(self._latest)
        return self.place if self._event is not None else None

    def _end(self, comm: WatchedWait, place: Any) -> None:
        assert self.found is not None
        first, heartbeat = announce_failure(comm.mesh, self.found), comm.mesh.heartbeat
        if heartbeat is not None:
            write_failure(heartbeat.path, self.found, first)
        abort_all()
