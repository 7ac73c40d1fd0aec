"""The supervisor's loop: start the ranks, watch them, end them, decide, and restart them."""

import contextlib
import logging
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from zeroshard.supervisor.crash import write_report
from zeroshard.supervisor.decision import (
    FAILED,
    STOPPED,
    Limits,
    decide,
    diagnose,
    finished,
    pass_on,
    stop_code,
    stopped_alone,
)
from zeroshard.supervisor.node import Node, environments
from zeroshard.supervisor.node_coordination import Connection, NodeCoordination, keep_store
from zeroshard.supervisor.processes import GRACE, Processes
from zeroshard.supervisor.records import Culprit, FailureVerdict, RankState
from zeroshard.supervisor.scratch import scratch_folder

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOG = logging.getLogger(__name__)
TICK = 0.2  # seconds between two polls
STACKS_WITHIN = {True: 0.6, False: 0.2}  # seconds for ranks to write their stacks, by whether they hang
REPEATED = 1.0  # seconds in which a second SIGINT is the same Ctrl-C: a shell may send it twice
HUNG_GRACE = 0.5  # seconds from SIGTERM to SIGKILL after a hang: hung ranks cannot save
NODES_WITHIN = 10.0  # seconds that another node may take to end its workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command, the node that runs its share, and the limits.

    Attributes:
        command: `train ARGS` or `script.py ARGS`.
        max_restarts: restarts without a newer checkpoint.
        grace: seconds from the request to stop to SIGKILL.
        reports: folder of the crash reports; None writes none, and prints no line for a rank that wrote a failure.
    """

    command: tuple[str, ...]
    place: Node
    limits: Limits = Limits()
    max_restarts: int = 3
    grace: float = 30.0
    reports: Path | None = Path("runs/crashes")


def supervise(job: Job) -> int:
    """Run `job` to its end on this node; returns the exit code.

    0 done; 1 failed, and no restart would help; 2 wrong input; 75 stopped on request; 130 stopped by Ctrl-C; 143
    stopped on request by ranks that cannot save; 128 + n under torchrun for a rank that signal n killed.
    """
    with scratch_folder() as folder:
        processes = Processes(job.command, folder)
        try:
            with _requests() as requests:
                if job.place.node == 0:
                    return _Leader(job, processes, requests).run()
                return _follow(job, processes, requests)
        finally:
            processes.end()


class _Leader:
    """The supervisor of node 0, which decides for all nodes."""

    def __init__(self, job: Job, processes: Processes, requests: list[int]) -> None:
        self._job, self._processes, self._requests = job, processes, requests
        self._coordination: NodeCoordination | None = None
        self._sizes = [job.place.processes]
        self._store: Store | None = None
        self._started = 0.0
        self._committed = -1

    def run(self) -> int:
        job, culprits, newest = self._job, list[Culprit](), list[int]()
        try:
            self._gather()
            for attempt in range(job.place.attempt, sys.maxsize):
                self._start(attempt)
                end = self._watch()
                if isinstance(end, int):
                    return self._leave(end)
                states = self._close(end)
                end = self._missing_node(states) or end
                culprits.append(end)
                newest.append(self._committed)
                verdict = self._verdict(culprits, newest)
                if job.reports is None:
                    line = "" if end.failure is not None else f"{end}"
                else:
                    path = write_report(job.reports, job.command, attempt, end, verdict, states)
                    line = _line(end, verdict, path)
                if not verdict.restart:
                    return self._leave(verdict.code, line)
                LOG.warning(line)
        except OSError as error:
            return self._leave(FAILED, f"the supervisor cannot go on: {error}")
        raise AssertionError

    def _gather(self) -> None:
        """Wait for the other nodes."""
        place, patience = self._job.place, self._job.limits.start
        if place.nodes == 1:
            return
        self._coordination = NodeCoordination(
            keep_store(place.address, place.port, patience, loopback=False), place.nodes
        )
        deadline = time.monotonic() + patience
        while None in (sizes := [place.processes, *self._coordination.sizes()]):
            if time.monotonic() > deadline or self._requests:
                missing = ", ".join(str(node) for node, size in enumerate(sizes) if size is None)
                raise OSError(f"node {missing} of {place.nodes} did not come; start one supervisor on every node")
            time.sleep(TICK)
        self._sizes = [size for size in sizes if size is not None]

    def _start(self, attempt: int) -> None:
        place = self._job.place
        port = place.port
        if not place.nested:  # a new store for each attempt, so that a script's own rendezvous finds no old keys
            self._store = keep_store(place.address, 0, self._job.limits.start, loopback=place.nodes == 1)
            port = self._store.port  # type: ignore[attr-defined]
        if self._coordination is not None:
            self._coordination.order("start", attempt=attempt, sizes=self._sizes, port=port)
        self._processes.start(attempt, environments(place, self._sizes, port))
        self._started = time.monotonic()

    def _watch(self) -> int | Culprit:
        """Poll until the attempt ends well (its exit code) or fails (the culprit)."""
        while True:
            if self._requests or (self._coordination is not None and self._coordination.asked()):
                return self._stop()
            states = self._states()
            code = finished(states)
            if code is not None:
                if code == STOPPED and (line := stopped_alone(states)):
                    LOG.warning(line)
                return code
            culprit = diagnose(states, self._job.limits)
            if culprit is not None:
                return culprit
            self._processes.wait(TICK)

    def _stop(self) -> int:
        """Stop on request: the ranks save and exit; a second Ctrl-C ends them at once."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self._job.grace
        while any(state.exit is None for state in self._states()) and time.monotonic() < deadline:
            if self._requests.count(signal.SIGINT) > 1:
                break
            self._processes.wait(TICK)
        killed = any(state.exit is None for state in self._states())
        self._end(0.0 if self._requests.count(signal.SIGINT) > 1 else GRACE)
        states = self._states()
        if any(state.exit is not None and state.exit < 0 for state in states):
            LOG.warning(
                "stopped on request before all ranks had saved; go on from the last checkpoint, if there is one"
            )
        return stop_code(states, killed, signal.SIGINT in self._requests)

    def _close(self, culprit: Culprit) -> list[RankState]:
        """End the attempt; returns the states just before it, with stacks of running ranks, and all exit codes."""
        self._signal(signal.SIGUSR2)
        time.sleep(STACKS_WITHIN[culprit.exit is None])
        before = self._states()
        self._end(HUNG_GRACE if culprit.exit is None else GRACE)
        exits = {state.rank: state.exit for state in self._states()}
        return [replace(state, exit=exits[state.rank]) for state in before]

    def _states(self) -> list[RankState]:
        """The states of all ranks of all nodes."""
        states = self._processes.states()
        if self._coordination is not None:
            reported, waited = self._coordination.states(), time.monotonic() - self._started
            for node, size in list(enumerate(self._sizes))[1:]:
                first = sum(self._sizes[:node])
                unknown = [RankState(rank=first + i, silent=waited, idle=waited) for i in range(size)]
                states += reported.get(node) or unknown
        self._committed = max(self._committed, *(state.committed for state in states))
        return states

    def _signal(self, number: int) -> None:
        if self._coordination is not None:
            self._coordination.order("signal", number=number)
        self._processes.signal(number)

    def _end(self, grace: float = GRACE) -> None:
        if self._coordination is not None:
            self._coordination.order("end", grace=grace)
        self._processes.end(grace)
        deadline = time.monotonic() + NODES_WITHIN
        while any(state.exit is None for state in self._states()) and time.monotonic() < deadline:
            time.sleep(TICK)

    def _missing_node(self, states: Sequence[RankState]) -> Culprit | None:
        """The culprit, if a node has not reported the end of its ranks."""
        missing = [state for state in states if state.exit is None]
        if not missing:
            return None
        ranks = tuple(state.rank for state in missing)
        lost = {bisect_right(list(accumulate(self._sizes)), rank) for rank in ranks}
        reason = f"was lost with the supervisor of node {', '.join(map(str, sorted(lost)))}, which does not answer"
        return Culprit(ranks=ranks, kind="node", reason=reason)

    def _verdict(self, culprits: Sequence[Culprit], newest: Sequence[int]) -> FailureVerdict:
        if self._requests:
            return FailureVerdict(False, STOPPED, "a stop was asked for")
        if self._job.place.nested:
            return pass_on(culprits[-1])
        return decide(culprits, newest, self._job.max_restarts)

    def _leave(self, code: int, line: str = "") -> int:
        """Order the other nodes to exit with the same code, then print the last line."""
        if self._coordination is not None:
            with contextlib.suppress(OSError):  # other nodes exit when the store is gone
                self._coordination.order("leave", code=code)
                self._coordination.wait_for_goodbyes(NODES_WITHIN)
        if line:
            LOG.warning(line)
        return code


def _follow(job: Job, processes: Processes, requests: list[int]) -> int:
    """Any node but 0: carry out orders and report states; returns the exit code that node 0 decides."""
    from torch.distributed import DistError

    from zeroshard.comm.rendezvous import reach

    place, done = job.place, 0
    try:
        store = reach(place.address, place.port, False, job.limits.start)
    except DistError as error:
        LOG.warning(
            f"node {place.node} cannot reach node 0 at {place.address}:{place.port}: {str(error).splitlines()[0]}"
        )
        return FAILED
    link = Connection(store, place.node, place.processes)
    while True:
        while not link.orders.empty():
            order = link.orders.get()
            match order["what"]:
                case "start":
                    processes.start(order["attempt"], environments(place, order["sizes"], order["port"]))
                case "signal":
                    processes.signal(order["number"])
                case "end":
                    processes.end(order["grace"])
                case "leave":
                    link.join(NODES_WITHIN)
                    return int(order["code"])
            done += 1
        link.tell(processes.states(), done, bool(requests))
        if link.lost or time.monotonic() - link.heard > job.limits.timeout:
            processes.end(HUNG_GRACE)
            LOG.warning(
                f"node {place.node} lost node 0's supervisor at {place.address}:{place.port}, and ended its workers"
            )
            return FAILED
        processes.wait(TICK)


@contextlib.contextmanager
def _requests() -> Iterator[list[int]]:
    """A growing list of the signals that asked this process to stop."""
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    last = [-REPEATED]

    def receive(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or time.monotonic() - last[0] > REPEATED:
            received.append(number)
        last[0] = time.monotonic()

    before = {number: signal.signal(number, receive) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(culprit: Culprit, verdict: FailureVerdict, report: Path | None) -> str:
    where = f"Report: {report}" if report is not None else "The report could not be written"
    action = "starting again" if verdict.restart else "stopping"
    return f"{culprit}; {action}: {verdict.why}. {where}"
