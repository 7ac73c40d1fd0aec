"""The order of threads of the host: starts, ends, events, queues, tasks, futures and pools, each with a clock."""

import concurrent.futures
import itertools
import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from paper.record import Clock

from zeroshard.memory import transfers
from zeroshard.memory.host import HostMemory
from zeroshard.memory.transfers import Task

if TYPE_CHECKING:
    from paper.device import Paper

_NUMBERS = itertools.count(1)


def here() -> str:
    """The actor of this thread."""
    thread = threading.current_thread()
    found = getattr(thread, "_paper_actor", None)
    if found is None:
        found = f"thread {thread.name}" + ("" if thread is threading.main_thread() else f" #{next(_NUMBERS)}")
        thread._paper_actor = found  # type: ignore[attr-defined]
    return str(found)


def replaced(paper: "Paper") -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of what orders threads."""
    clocks: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()

    def send(through: Any) -> None:
        if threading.get_ident() not in threading._active:  # type: ignore[attr-defined]
            return  # a thread that begins has no name yet, and asking for one would make it
        with paper.record.lock:
            clocks[through] = {**clocks.get(through, {}), **paper.record.snapshot(here())}

    def receive(through: Any) -> None:
        found = clocks.get(through)
        if found:
            paper.join_host(found)

    return [
        *_of_threads(paper, send, receive),
        *_of_events(send, receive),
        (transfers, "SimpleQueue", _queue_of(paper)),
        (Task, "done", _Done(paper, Task.done)),
        *_of_futures(send, receive),
        *_of_pools(send, receive),
    ]


def _of_threads(paper: "Paper", send: Any, receive: Any) -> list[tuple[Any, str, Any]]:
    start, join, is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive
    ends: weakref.WeakKeyDictionary[threading.Thread, Clock] = weakref.WeakKeyDictionary()

    def started(thread: threading.Thread) -> None:
        send(thread)
        paper.threads.append(thread)
        original = thread.run

        def carried_out() -> None:
            receive(thread)
            with paper.watching():
                original()
            ends[thread] = paper.record.snapshot(here())

        thread.run = carried_out  # type: ignore[method-assign]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive() and thread in ends:
            paper.join_host(ends[thread])

    def asked(thread: threading.Thread) -> bool:
        alive = is_alive(thread)
        if not alive and thread in ends:
            paper.join_host(ends[thread])
        return alive

    return [(threading.Thread, "start", started), (threading.Thread, "join", joined),
            (threading.Thread, "is_alive", asked)]  # fmt: skip


def _of_events(send: Any, receive: Any) -> list[tuple[Any, str, Any]]:
    setting, waiting, asking = threading.Event.set, threading.Event.wait, threading.Event.is_set

    def is_set(event: threading.Event) -> None:
        send(event)
        setting(event)

    def waited(event: threading.Event, timeout: float | None = None) -> bool:
        found = waiting(event, timeout)
        if found:
            receive(event)
        return found

    def asked(event: threading.Event) -> bool:
        found = asking(event)
        if found:
            receive(event)
        return found

    return [
        (threading.Event, "set", is_set),
        (threading.Event, "wait", waited),
        (threading.Event, "is_set", asked),
    ]


def _of_futures(send: Any, receive: Any) -> list[tuple[Any, str, Any]]:
    future = concurrent.futures.Future
    setting, asking = future.set_result, future.result

    def is_set(made: Any, result: Any) -> None:
        send(made)
        setting(made, result)

    def asked(made: Any, timeout: float | None = None) -> Any:
        found = asking(made, timeout)
        receive(made)
        return found

    return [(future, "set_result", is_set), (future, "result", asked)]


def _of_pools(send: Any, receive: Any) -> list[tuple[Any, str, Any]]:
    """A pool's lock lies between the thread that returns memory and the one that borrows it next."""
    borrow, give_back = HostMemory.borrow, HostMemory.give_back

    def borrowed(pool: HostMemory, *args: Any, **kw: Any) -> Any:
        found = borrow(pool, *args, **kw)
        receive(pool)
        return found

    def given_back(pool: HostMemory, tensor: Any) -> None:
        send(pool)
        give_back(pool, tensor)

    return [(HostMemory, "borrow", borrowed), (HostMemory, "give_back", given_back)]


def _queue_of(paper: "Paper") -> Any:
    """A queue whose items carry the clocks of their senders."""

    class Queue:
        def __init__(self) -> None:
            self._queue: SimpleQueue[Any] = SimpleQueue()

        def put(self, item: Any) -> None:
            self._queue.put((paper.record.snapshot(here()), item))

        def get(self) -> Any:
            clock, item = self._queue.get()
            paper.join_host(clock)
            return item

        def __class_getitem__(cls, item: object) -> Any:
            return cls

    return Queue


class _Done:
    """`Task.done`: who reads True has waited for the thread that wrote it."""

    def __init__(self, paper: "Paper", slot: Any) -> None:
        self._paper, self._slot = paper, slot

    def __get__(self, task: Any, owner: Any = None) -> Any:
        if task is None:
            return self
        found = self._slot.__get__(task)
        if isinstance(found, dict):
            self._paper.join_host(found)
            return True
        return found

    def __set__(self, task: Any, value: bool) -> None:
        self._slot.__set__(task, self._paper.record.snapshot(here()) if value else value)
