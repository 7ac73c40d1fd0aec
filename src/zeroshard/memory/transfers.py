"""Transfers between tiers: copies and host jobs as tasks, which run beside the main thread.

The caller that needs the result of a task waits for it, and only then; the runner chooses when the task runs. So a
missing wait is a wrong number under a runner of tests that is late, on any machine, and not a rare error on a GPU.

[Note: a copy in flight] From `copy` until its `wait` returns, the source may be neither changed nor freed, and the
destination not read; a change of the source spoils the copy, and matters only if that is read. Tasks hold both.

[Note: exposed seconds] Seconds for which the main thread waited for a task. Where it waited for a chain (an
update that waited for its gradients), each task of the chain gets the part in which it ran.

[Note: GeePS] GPU memory as a cache of host memory, filled and emptied off the critical path (Cui et al., EuroSys 2016):
copies by this runner, parameters and states in `offload.tiers`, data of layers in `saved.offload`, and the
workers that do not wait for each other in `parameter_server`.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from zeroshard.errors import OffloadError
from zeroshard.platform import accelerator, ranges
from zeroshard.traffic import COMPUTE, QUEUES, Count, Purpose

AT_EXIT = 30.0  # seconds that tasks under way may take when the process ends


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """The time of a task, or of the main thread's computation (cause `COMPUTE`), in seconds of the transfers' clock."""

    label: str
    cause: str
    start: float
    end: float


class Task:
    """A copy between tiers, or a job of the host.

    Attributes:
        cause: a `Purpose`, `UPDATE`, or `DISK` (an update of states on the disk).
        nbytes: bytes copied, or processed by the job.
        after: tasks that must run before it.
        done: whether it has run (on a GPU: was issued to its stream).
        start: of its run, in seconds of the transfers' clock.
        end: likewise.
    """

    __slots__ = ("after", "cause", "copies", "done", "end", "error", "event", "label", "link", "nbytes", "ready",
                 "signal", "start", "work")  # fmt: skip

    def __init__(
        self, link: "Transfers", work: Callable[[], None], cause: str, label: str, nbytes: int, after: Sequence["Task"]
    ) -> None:
        self.link, self.cause, self.label, self.nbytes = link, cause, label, nbytes
        self.work: Callable[[], None] | None = work
        self.done, self.copies = False, False
        self.after = [task for task in after if task.matters]
        self.error: BaseException | None = None
        self.signal: threading.Event | None = None
        self.event: torch.Event | None = None
        self.ready: torch.Event | None = None
        self.start = self.end = 0.0

    def __str__(self) -> str:
        return f"{self.cause} of {self.label}"

    @property
    def matters(self) -> bool:
        """Whether later tasks must still wait for it: it has not run, or failed, or ends later by the clock."""
        return not self.done or self.event is not None or self.error is not None or self.end > self.link.now()

    @property
    def ended(self) -> bool:
        """Whether it has run, on a GPU too."""
        return self.done and (self.event is None or self.event.query())

    @property
    def behind(self) -> bool:
        """Whether earlier tasks delayed it: a thread has not ended it, or it ends later by the clock."""
        return (self.signal is not None and not self.done) or self.end > self.link.now()

    @property
    def queue(self) -> str:
        """The queue whose tasks run one after the other."""
        return QUEUES[self.cause]

    def wait(self) -> None:
        """Return when the caller may use the result and overwrite the source.

        Raises:
            OffloadError: the task failed, or does not end.
        """
        self.link.wait(self)

    def wait_on_host(self) -> None:
        """As `wait`, for results that the host itself reads or overwrites."""
        self.link.wait(self)
        if self.event is not None:
            self.event.synchronize()

    def run(self) -> None:
        """Run the work now; an error is kept for the wait."""
        assert self.work is not None
        self.start = self.link.now()
        try:
            for task in self.after:
                if task.error is not None:
                    raise task.error
            if ranges.profiler._is_profiler_enabled:
                with ranges.named("offload", self):
                    self.work()
            else:
                self.work()
        except BaseException as error:
            self.error = error
        self.end = self.link.now()
        self.work, self.done = None, True
        for spans in self.link.spans:  # read once: another thread may begin or end a trace
            spans.append(TaskSpan(self.label, self.cause, self.start, self.end))


class TaskRunner(Protocol):
    """Runs tasks, and chooses their times."""

    def begin(self, task: Task) -> None:
        """Accept a task; it may run from now on."""

    def finish(self, task: Task) -> None:
        """Return when the task has run."""


class Eager:
    """Runs tasks at once."""

    def begin(self, task: Task) -> None:
        """Run the task."""
        task.run()

    def finish(self, task: Task) -> None:
        """Do nothing: the task has run."""


class ThreadRunner:
    """Runs jobs on host threads, one per queue, in order; copies at once, unless a task before them is still open.

    On a GPU a copy is issued to the stream of its queue, and `wait` makes the current stream wait for it.

    Args:
        device: the upper tier.
        timeout: seconds that a wait may take.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._device, self._timeout = device, timeout
        # Made once, because torch's allocator keeps a pool for each stream.
        self._streams = {queue: accelerator.new_stream(device) for queue in ("down", "up")}
        self._queues: dict[str, SimpleQueue[Task | None]] = {}
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, weakref.ref(self), self._queues, self._threads)

    def begin(self, task: Task) -> None:
        """Run a task in this thread, issue it to its stream, or queue it for its queue's thread."""
        if task.copies and self._streams["up"] is not None:
            task.ready = accelerator.record(self._device)
        if task.copies and all(before.done for before in task.after):
            _carry_out(task, self._streams)
            return
        queue = self._queues.get(task.queue)
        if queue is None:
            queue = self._queues[task.queue] = SimpleQueue()
            name = f"zeroshard {task.queue}"
            thread = threading.Thread(target=_serve, args=(queue, self._streams), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        task.signal = threading.Event()
        queue.put(task)

    def finish(self, task: Task) -> None:
        """Wait for the thread; on a GPU make the current stream wait."""
        if task.signal is not None and not task.signal.wait(self._timeout):
            raise OffloadError(
                f"{task.cause} of {task.label} has not ended for {self._timeout:g} s. If the host or its disk is only "
                f"slow, raise timeout."
            )
        if task.event is not None:
            before = accelerator.record(self._device, timed=True)
            accelerator.wait_in_stream(self._device, task.event)
            after = accelerator.record(self._device, timed=True)
            assert before is not None and after is not None
            task.link.stalls.append((task.cause, before, after))


def _carry_out(task: Task, streams: Mapping[str, torch.Stream | None]) -> None:
    stream = streams.get(task.queue) if task.copies else None
    for before in task.after:
        if before.signal is not None:
            before.signal.wait()
        if before.event is not None and stream is None:
            before.event.synchronize()
    if stream is None:
        task.run()
        return
    with accelerator.inside(stream):
        assert task.ready is not None
        stream.wait_event(task.ready)
        for before in task.after:
            if before.event is not None:
                stream.wait_event(before.event)
        task.run()
        task.event = stream.record_event()


def _serve(queue: "SimpleQueue[Task | None]", streams: Mapping[str, torch.Stream | None]) -> None:
    while (task := queue.get()) is not None:
        _carry_out(task, streams)
        assert task.signal is not None
        task.signal.set()
        del task  # or it would be kept until the next one


def _end(
    runner: "weakref.ref[ThreadRunner]",
    queues: "Mapping[str, SimpleQueue[Task | None]]",
    threads: Sequence[threading.Thread],
) -> None:
    """End the threads; as the process ends, wait for them: one that is killed inside of C++ aborts the process."""
    for queue in queues.values():
        queue.put(None)
    for thread in threads if runner() is not None else ():
        thread.join(AT_EXIT)


class VirtualClock(Protocol):
    """A clock that advances only by calls."""

    now: float

    def spend(self, seconds: float, cause: str | None = None) -> None:
        """Advance the clock."""

    def standing(self) -> AbstractContextManager[None]:
        """Stop the clock inside."""


class Modelled:
    """Runs tasks at once, on a virtual clock: a queue is busy for a task's seconds, and a wait lasts until its end.

    Args:
        clock: advanced by operations of the main thread.
        seconds: gives the duration of a task.
    """

    def __init__(self, clock: VirtualClock, seconds: Callable[[Task], float]) -> None:
        self._clock, self._seconds = clock, seconds
        self._free: defaultdict[str, float] = defaultdict(float)

    def begin(self, task: Task) -> None:
        """Run the task, and occupy its queue for the task's duration."""
        with self._clock.standing():
            task.run()
        task.start = max([self._clock.now, self._free[task.queue], *(before.end for before in task.after)])
        task.end = self._free[task.queue] = task.start + self._seconds(task)
        for spans in task.link.spans:
            spans[-1] = TaskSpan(task.label, task.cause, task.start, task.end)

    def finish(self, task: Task) -> None:
        """Advance the clock to the end of the task, by cause."""
        for cause, seconds in _parts(task, self._clock.now, task.end):
            self._clock.spend(seconds, cause)


class Transfers:
    """All copies between tiers, and all host jobs, of one engine.

    Args:
        executor: runs them.
        now: seconds of the clock.

    Attributes:
        counts: traffic by purpose, since the last `reset`.
        exposed: seconds that the main thread waited, by cause, since the last `reset`.
        spans: lists to which spans of tasks are added, one for each running trace.
        stalls: (cause, event before, event after) of waits on a GPU that were not yet added to `exposed`.
    """

    def __init__(self, executor: TaskRunner, now: Callable[[], float] = time.perf_counter) -> None:
        self.executor, self.now = executor, now
        self.counts: dict[Purpose, Count] = {}
        self.exposed: defaultdict[str, float] = defaultdict(float)
        self.spans: tuple[list[TaskSpan], ...] = ()
        self.stalls: list[tuple[str, torch.Event, torch.Event]] = []

    def copy(
        self,
        source: torch.Tensor,
        into: torch.Tensor,
        purpose: Purpose,
        label: str,
        after: Sequence[Task] = (),
        padding: int = 0,
    ) -> Task:
        """Begin to copy `source` into `into`, of the same number of elements ([Note: a copy in flight]).

        Args:
            padding: elements that hold no data.
        """
        count = self.counts.setdefault(purpose, Count())
        count.elements += source.numel() - padding
        count.padding += padding
        count.nbytes += into.nbytes
        count.sent_nbytes += into.nbytes
        count.calls += 1

        def work() -> None:
            into.copy_(source.view(into.shape) if source.shape != into.shape else source, non_blocking=True)

        task = Task(self, work, purpose, label, into.nbytes, after)
        task.copies = True
        return self._begin(task)

    def run(
        self, work: Callable[[], None], cause: str, label: str, nbytes: int = 0, after: Sequence[Task] = ()
    ) -> Task:
        """Begin a job of the host that processes `nbytes`."""
        return self._begin(Task(self, work, cause, label, nbytes, after))

    def wait(self, task: Task) -> None:
        """As `task.wait()`."""
        with self._timed_as_exposed(task):
            if ranges.profiler._is_profiler_enabled:
                with ranges.named("wait for offload", task):
                    self.executor.finish(task)
            else:
                self.executor.finish(task)
        _forget(task)
        if task.error is not None:
            raise task.error

    @contextmanager
    def traced(self, spans: list[TaskSpan]) -> Iterator[None]:
        """Add spans of tasks that run inside, and those of `note`, to `spans`; the list is complete after the block."""
        self.spans = (*self.spans, spans)
        try:
            yield
        finally:
            self.spans = tuple(other for other in self.spans if other is not spans)

    def note(self, label: str, start: float) -> None:
        """Record the main thread's computation since `start` in every running trace."""
        for spans in self.spans:
            spans.append(TaskSpan(label, COMPUTE, start, self.now()))

    def reset(self) -> tuple[dict[Purpose, Count], dict[str, float]]:
        """Return the counts and exposed seconds, and restart from zero."""
        waiting = []
        for cause, before, after in self.stalls:  # on a GPU the last of them may not be over yet
            if after.query():
                self.exposed[cause] += before.elapsed_time(after) / 1000
            else:
                waiting.append((cause, before, after))
        self.stalls = waiting
        counts, exposed = self.counts, dict(self.exposed)
        for purpose, count in counts.items():
            count.seconds = exposed.get(purpose, 0.0)
        self.counts, self.exposed = {}, defaultdict(float)
        return counts, exposed

    def _begin(self, task: Task) -> Task:
        with self._timed_as_exposed(task):
            self.executor.begin(task)
        return task

    @contextmanager
    def _timed_as_exposed(self, task: Task) -> Iterator[None]:
        """Count the time that passes inside as exposed ([Note: exposed seconds])."""
        start = self.now()
        yield
        for cause, seconds in _parts(task, start, self.now()):
            self.exposed[cause] += seconds


def _forget(task: Task) -> None:
    """Drop the tasks before a task, or chains would grow from step to step."""
    before, task.after = task.after, []
    for each in before:
        _forget(each)


def _parts(task: Task, start: float, end: float) -> Iterator[tuple[str, float]]:
    """(cause, seconds) of a task and of those before it between `start` and `end`; the task itself gets the rest."""
    for before in task.after:
        if before.done and before.end > start:
            yield from _parts(before, start, min(before.end, end))
            start = max(start, min(before.end, end))
    if end > start:
        yield task.cause, end - start
