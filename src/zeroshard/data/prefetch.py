"""Prefetch: a thread that makes the batches which are expected next, in order."""

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
POLL, BRIEF = 0.1, 0.001  # seconds between looks at the request to stop, while the queue is full; and of a short wait


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread, a few items ahead: at most `depth` in the queue, and as many that wait for room.

    Items that are made within a millisecond go into the queue together, since each switch between threads costs as
    much as a small batch. An exception of the iterator is raised by `next`, in its turn. The thread ends with `stop`,
    or with this object.
    """

    def __init__(self, items: Callable[[], Iterator[Item]], depth: int) -> None:
        self._made: queue.Queue[list[Item | BaseException]] = queue.Queue(1)
        self._taken: deque[Item | BaseException] = deque()
        self._stopped = threading.Event()
        arguments = (items, depth, self._made, self._stopped)
        self._thread = threading.Thread(target=_make, args=arguments, name="zeroshard reads data", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._stopped.set)

    def next(self) -> Item:
        """The next item, waiting until it is made."""
        if not self._taken:
            self._taken.extend(self._made.get())
        item = self._taken.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._made.get_nowait()  # lets items go in that wait for room
            self._thread.join(BRIEF)


def _make(
    items: Callable[[], Iterator[Item]],
    depth: int,
    made: "queue.Queue[list[Item | BaseException]]",
    stopped: threading.Event,
) -> None:
    """Put items into the queue until the request to stop."""
    together: list[Item | BaseException] = []
    put = time.perf_counter()
    try:
        for item in items():
            together.append(item)
            if len(together) == depth or time.perf_counter() - put > BRIEF:
                if not _put(made, together, stopped):
                    return
                together, put = [], time.perf_counter()
    except BaseException as error:
        together.append(error)
    _put(made, together, stopped)


def _put(
    made: "queue.Queue[list[Item | BaseException]]", together: list[Item | BaseException], stopped: threading.Event
) -> bool:
    """Put some items; False after the request to stop."""
    while together and not stopped.is_set():
        try:
            made.put(together, timeout=POLL)
        except queue.Full:
            continue
        return True
    return not stopped.is_set()
