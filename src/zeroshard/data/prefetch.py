"""Prefetch: a thread that makes the batches which are expected next, in order."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
POLL, BRIEF = 0.1, 0.001  # seconds between looks at the request to stop, while the queue is full; and at its end


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread, at most `depth` items ahead.

    An exception of the iterator is raised by `next`, in its turn. The thread ends with `stop`, or with this object.
    """

    def __init__(self, items: Callable[[], Iterator[Item]], depth: int) -> None:
        self._made: queue.Queue[Item | BaseException] = queue.Queue(depth)
        self._stopped = threading.Event()
        arguments = (items, self._made, self._stopped)
        self._thread = threading.Thread(target=_make, args=arguments, name="zeroshard reads data", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._stopped.set)

    def next(self) -> Item:
        """The next item, waiting until it is made."""
        item = self._made.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._made.get_nowait()  # lets an item go in that waits for room
            self._thread.join(BRIEF)


def _make(
    items: Callable[[], Iterator[Item]], made: "queue.Queue[Item | BaseException]", stopped: threading.Event
) -> None:
    """Put items into the queue until the request to stop."""
    try:
        for item in items():
            if not _put(made, item, stopped):
                return
    except BaseException as error:
        _put(made, error, stopped)


def _put(made: "queue.Queue[Item | BaseException]", item: Item | BaseException, stopped: threading.Event) -> bool:
    """Put one item; False after the request to stop."""
    while not stopped.is_set():
        try:
            made.put(item, timeout=POLL)
        except queue.Full:
            continue
        return True
    return False
