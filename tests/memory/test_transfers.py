"""Tasks beside the main thread: when each executor runs them, what they count, and what of them is exposed."""

import gc
import random
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from task_runners import Latest, Shuffled

from zeroshard.errors import OffloadError
from zeroshard.memory.transfers import Eager, Modelled, Task, TaskRunner, TaskSpan, ThreadRunner, Transfers
from zeroshard.platform.rehearsed import Clock
from zeroshard.traffic import COMPUTE, DISK, QUEUES, UPDATE, Purpose

CPU = torch.device("cpu")
DOWN, UP = Purpose.GRADIENTS_DOWN, Purpose.PARAMETERS_UP
PATIENCE = 30.0  # seconds after which a test gives up; nothing here takes any


EXECUTORS: dict[str, Callable[[], TaskRunner]] = {
    "eager": Eager,
    "latest": Latest,
    "shuffled": lambda: Shuffled(5),
    "worker": lambda: ThreadRunner(CPU, PATIENCE),
    "modelled": lambda: Modelled(Clock(), lambda task: 1.0),
}
every_executor = pytest.mark.parametrize("executor", EXECUTORS)


def nothing() -> None:
    pass


def graph(link: Transfers, ran: list[int], count: int = 40) -> list[tuple[Task, list[int]]]:
    """Jobs of all lanes, each after up to three earlier ones; each enters its number when it runs."""
    draw, made = random.Random(7), list[tuple[Task, list[int]]]()
    for number in range(count):
        after = draw.sample(range(number), min(number, draw.randint(0, 3)))

        def work(number: int = number) -> None:
            ran.append(number)

        task = link.run(work, draw.choice(list(QUEUES)), f"job {number}", after=[made[n][0] for n in after])
        made.append((task, after))
    return made


@every_executor
def test_each_task_runs_once_and_after_what_it_waits_for(executor: str) -> None:
    link, ran = Transfers(EXECUTORS[executor]()), list[int]()
    tasks = graph(link, ran)
    for task, _ in random.Random(3).sample(tasks, len(tasks)):
        task.wait()
        assert task.done
    assert sorted(ran) == list(range(len(tasks)))
    for number, (_, after) in enumerate(tasks):
        assert all(ran.index(before) < ran.index(number) for before in after)
    for task, _ in tasks:
        task.wait()  # as often as one likes
    assert len(ran) == len(tasks)


@every_executor
def test_after_its_wait_a_copy_is_there(executor: str) -> None:
    link = Transfers(EXECUTORS[executor]())
    source, into = torch.arange(6.0), torch.zeros(2, 3, dtype=torch.bfloat16)
    link.copy(source, into, DOWN, "a").wait()
    assert into.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_latest_copy_happens_inside_of_its_wait() -> None:
    link = Transfers(Latest())
    source, into = torch.ones(3), torch.zeros(3)
    first = link.copy(source, into, DOWN, "a")
    second = link.run(nothing, UPDATE, "b")
    second.wait()
    assert into.tolist() == [0, 0, 0]
    source.fill_(2)
    first.wait()
    assert into.tolist() == [2, 2, 2]


def test_the_latest_task_brings_what_it_waits_for_and_nothing_else() -> None:
    link, ran = Transfers(Latest()), list[str]()
    first, other, last = (link.run(lambda n=name: ran.append(n), UPDATE, name) for name in ("first", "other", "last"))
    link.run(lambda: ran.append("end"), UPDATE, "end", after=[last, first]).wait()
    assert ran == ["last", "first", "end"]
    assert not other.done


def order(seed: int) -> list[int]:
    link, ran = Transfers(Shuffled(seed)), list[int]()
    for task, _ in graph(link, ran):
        task.wait()
    return ran


def test_a_seed_has_its_order() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) == 8


@every_executor
def test_an_error_reaches_whoever_waits_for_it_or_for_what_comes_after(executor: str) -> None:
    link, ran, gate = Transfers(EXECUTORS[executor]()), list[str](), threading.Event()

    def fail() -> None:
        assert executor != "worker" or gate.wait(PATIENCE)  # so that `early` is there before it fails
        raise OSError("no space")

    bad = link.run(fail, UPDATE, "bad")
    early = link.run(lambda: ran.append("early"), DISK, "early", after=[bad])
    gate.set()
    for task in (early, bad, bad):
        with pytest.raises(OSError, match="no space"):
            task.wait()
    late = link.copy(torch.ones(1), torch.zeros(1), UP, "late", [bad])
    with pytest.raises(OSError, match="no space"):
        link.run(lambda: ran.append("last"), UPDATE, "last", after=[late]).wait()
    link.run(lambda: ran.append("fine"), UPDATE, "fine").wait()
    assert ran == ["fine"]


def test_what_never_ends_is_an_error_after_the_timeout() -> None:
    link, gate = Transfers(ThreadRunner(CPU, timeout=0.05)), threading.Event()
    task = link.run(lambda: gate.wait(PATIENCE), UPDATE, "h.3")  # type: ignore[arg-type,return-value]
    with pytest.raises(OffloadError, match=r"^update of h\.3 has not ended for 0\.05 s\..* raise timeout\.$"):
        task.wait()
    gate.set()


def test_lanes_run_beside_each_other_and_the_tasks_of_one_in_their_order() -> None:
    link, ran = Transfers(ThreadRunner(CPU, PATIENCE)), defaultdict[str, list[int]](list)
    meeting = threading.Barrier(3, timeout=PATIENCE)  # which breaks if one has to wait for another to end
    both = [link.run(lambda: [meeting.wait(), None][1], cause, "meets") for cause in (UPDATE, DISK)]
    tasks = [
        link.run(lambda n=number, c=cause: ran[threading.current_thread().name].append(n), cause, "counts")
        for number in range(8)
        for cause in (UPDATE, DISK)
    ]
    meeting.wait()
    for task in (*both, *tasks):
        task.wait()
    assert ran == {"zeroshard host": list(range(8)), "zeroshard disk": list(range(8))}


def test_a_copy_is_made_by_the_caller_if_nothing_is_before_it() -> None:
    link, gate = Transfers(ThreadRunner(CPU, PATIENCE)), threading.Event()
    source, into, later = torch.ones(2), torch.zeros(2), torch.zeros(2)
    assert link.copy(source, into, UP, "at once").done
    update = link.run(lambda: [gate.wait(PATIENCE), source.fill_(3), None][2], UPDATE, "update")
    task = link.copy(source, later, UP, "after it", [update])
    assert not task.done
    gate.set()
    task.wait()
    assert (into.tolist(), later.tolist()) == ([1, 1], [3, 3])


def test_threads_end_with_their_executor() -> None:
    link, threads = Transfers(ThreadRunner(CPU, PATIENCE)), list[threading.Thread]()
    for cause in (UPDATE, DISK):
        link.run(lambda: threads.append(threading.current_thread()), cause, "who").wait()
    assert [thread.is_alive() for thread in threads] == [True, True]
    del link
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE)
    assert [thread.is_alive() for thread in threads] == [False, False]


class Chain:
    """Gradient down, update, parameter up, which take 1, 2 and 4 s of a clock that only they let go on."""

    def __init__(self, executor: TaskRunner) -> None:
        self.time = 0.0
        self.link = Transfers(executor, lambda: self.time)
        self.down = self.link.run(self.taking(1), DOWN, "h.0")
        self.update = self.link.run(self.taking(2), UPDATE, "h.0", after=[self.down])
        self.up = self.link.run(self.taking(4), UP, "h.0", after=[self.update])

    def taking(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.time += seconds

        return work


def test_each_part_of_a_chain_gets_the_time_in_which_it_ran() -> None:
    for executor in (Latest(), Eager()):
        chain = Chain(executor)
        chain.up.wait()
        assert chain.link.exposed == {DOWN: 1, UPDATE: 2, UP: 4}


def test_what_was_waited_for_before_is_exposed_once() -> None:
    chain = Chain(Latest())
    chain.update.wait()
    chain.time += 8  # the main thread computes
    assert chain.link.exposed == {DOWN: 1, UPDATE: 2}
    chain.up.wait()
    chain.up.wait()
    assert chain.link.exposed == {DOWN: 1, UPDATE: 2, UP: 4}


class Lanes:
    """A link whose lanes move so many bytes per second of a virtual clock; slices of 64 bytes."""

    def __init__(self, **seconds: float) -> None:
        """Args: seconds that a slice takes, by lane."""
        bandwidths = {queue: 64 / each for queue, each in seconds.items()}
        self.clock = Clock()
        self.link = Transfers(
            Modelled(self.clock, lambda task: task.nbytes / bandwidths[task.queue]), lambda: self.clock.now
        )
        self.here, self.there = torch.zeros(16), torch.zeros(16)

    def update(self, label: str) -> tuple[Task, Task]:
        """A slice's gradient on its way down and the update; after them its weights on their way up."""
        down = self.link.copy(self.here, self.there, DOWN, label)
        update = self.link.run(nothing, UPDATE, label, 64, [down])
        return update, self.link.copy(self.there, self.here, UP, label, [update])


@pytest.mark.parametrize("seconds, exposed", [(1, 0), (4, 0), (7, 3)])
def test_an_update_hides_behind_the_compute_that_follows(seconds: float, exposed: float) -> None:
    """Where 4 s of compute follow on each update, exposed is max(0, update - 4 s), four times."""
    lanes = Lanes(host=seconds)
    for unit in range(4):
        update = lanes.link.run(nothing, UPDATE, f"h.{unit}", 64)
        lanes.clock.spend(4)
        update.wait()
    assert sum(lanes.link.exposed.values()) == 4 * exposed
    assert lanes.clock.now == 4 * (4 + exposed)


@pytest.mark.parametrize(
    "down, host, up, exposed",
    [
        (1, 2, 1, {DOWN: 1, UPDATE: 2, UP: 1}),  # all lanes keep up: the last slice's own way
        (1, 6, 1, {UPDATE: 11, UP: 3}),  # updates end at 11, 17, 23, 29, and compute at 16
        (1, 2, 6, {UP: 15}),  # weights are up at 13, 19, 25, 31
        (6, 1, 1, {DOWN: 8, UPDATE: 3, UP: 3}),  # gradients are down at 10, 16, 22, 28
    ],
)
def test_lanes_run_beside_compute(down: float, host: float, up: float, exposed: dict[str, float]) -> None:
    """Four units of 4 s, the slice of each on its way as soon as it is computed, all waited for at the end."""
    lanes, rising = Lanes(down=down, host=host, up=up), []
    for unit in range(4):
        lanes.clock.spend(4)
        rising.append(lanes.update(f"h.{unit}")[1])
    for task in rising:
        task.wait()
    assert dict(lanes.link.exposed) == exposed
    slowest = max(down, host, up)  # which begins its last slice three later, or one just computed
    assert lanes.clock.now == 16 + sum(exposed.values()) == max(16, 4 + 3 * slowest) + down + host + up
    assert lanes.clock.spent == {"compute": 16, **exposed}


def test_counts_are_by_purpose_and_without_padding() -> None:
    link = Transfers(Eager())
    for padding in (0, 3):
        link.copy(torch.zeros(10), torch.zeros(10, dtype=torch.bfloat16), DOWN, "a", padding=padding)
    link.copy(torch.zeros(4), torch.zeros(4), UP, "a")
    link.run(nothing, UPDATE, "a", 1000)  # moves nothing
    assert link.counts.keys() == {DOWN, UP}
    count = link.counts[DOWN]
    assert (count.elements, count.padding, count.nbytes, count.sent_nbytes, count.calls) == (17, 3, 40, 40, 2)
    assert (link.counts[UP].elements, link.counts[UP].nbytes, link.counts[UP].calls) == (4, 16, 1)


def test_a_reset_hands_out_counts_and_exposed_seconds() -> None:
    lanes = Lanes(down=1, host=2, up=4)
    lanes.update("a")[1].wait()
    counts, exposed = lanes.link.reset()
    assert exposed == {DOWN: 1, UPDATE: 2, UP: 4}
    assert {purpose: count.seconds for purpose, count in counts.items()} == {DOWN: 1, UP: 4}
    assert lanes.link.reset() == ({}, {})


def test_a_trace_keeps_what_runs_inside() -> None:
    lanes = Lanes(down=1, host=2, up=4)
    lanes.link.note("before", 0)
    lanes.update("before")[1].wait()
    spans: list[TaskSpan] = []
    with lanes.link.traced(spans):
        begin = lanes.clock.now
        lanes.clock.spend(3)
        lanes.link.note("forward", begin)
        lanes.update("a")[1].wait()
    lanes.update("after")[1].wait()
    found = [(span.label, span.cause, span.start - begin, span.end - begin) for span in spans]
    assert found == [("forward", COMPUTE, 0, 3), ("a", DOWN, 3, 4), ("a", UPDATE, 4, 6), ("a", UP, 6, 10)]


def test_a_trace_has_times_of_the_clock_of_the_link() -> None:
    chain = Chain(Latest())
    spans: list[TaskSpan] = []
    with chain.link.traced(spans):
        chain.up.wait()
    assert [(span.cause, span.start, span.end) for span in spans] == [(DOWN, 0, 1), (UPDATE, 1, 3), (UP, 3, 7)]
