"""The workers of one node: started, observed, signalled and ended."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from zeroshard.comm.heartbeat import read_failure, read_heartbeat
from zeroshard.supervisor import fork_server
from zeroshard.supervisor.records import RankState
from zeroshard.supervisor.worker import STACKS, work

GRACE = 2.0  # seconds from SIGTERM to SIGKILL
SUSPICION = 1.5  # seconds without a heartbeat before the kernel is asked for the process's status
SAFE_PATH = "PYTHONSAFEPATH"  # as in Python's documentation
STACK_BYTES = 32768  # most bytes of one rank's stacks


@dataclass(slots=True)
class Worker:
    """One worker process.

    Attributes:
        started: monotonic seconds.
        ended: monotonic seconds when its end was seen; None while it runs.
    """

    rank: int
    process: ForkServerProcess
    heartbeat: Path
    started: float
    ended: float | None = None


class Processes:
    """The workers of this node, one attempt after another.

    Args:
        command: run by each worker.
        folder: for heartbeats, failures and stacks.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = list(command), folder
        self._host = socket.gethostname()
        self._workers: list[Worker] = []
        self._context = multiprocessing.get_context("forkserver")
        os.environ[fork_server.VARIABLE] = str(os.getpid())
        self._context.set_forkserver_preload([fork_server.__name__])
        with _without_current_folder():
            forkserver.ensure_running()

    def start(self, attempt: int, environments: Sequence[dict[str, str]]) -> None:
        """Start one worker for each environment."""
        folder = self._folder / f"attempt-{attempt}"
        folder.mkdir()
        self._workers = []
        for environment in environments:
            rank = int(environment["RANK"])
            heartbeat = folder / f"rank-{rank:05d}.heartbeat"
            own = {"ZEROSHARD_JOB": environment.get("TORCHELASTIC_RUN_ID", self._folder.name), **environment}
            own |= {"ZEROSHARD_ATTEMPT": str(attempt), "ZEROSHARD_HEARTBEAT": str(heartbeat)}
            own["ZEROSHARD_SUPERVISOR"] = str(os.getpid())
            process = self._context.Process(target=work, args=(own, self._command), name=f"rank {rank}")
            process.start()
            self._workers.append(Worker(rank, process, heartbeat, time.monotonic()))

    def states(self) -> list[RankState]:
        """The present state of each rank."""
        return [self._state(worker) for worker in self._workers]

    def signal(self, number: int) -> None:
        """Send a signal to each running worker."""
        for worker in self._living():
            _send(worker, number, group=False)

    def end(self, grace: float = GRACE) -> None:
        """End all workers and their children: SIGTERM, and SIGKILL after `grace` seconds."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._living() and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
        for worker in self._living():
            _send(worker, signal.SIGKILL, group=True)
        for worker in self._workers:
            worker.process.join()

    def wait(self, seconds: float) -> None:
        """Wait until a worker ends, at most `seconds`."""
        living = [worker.process.sentinel for worker in self._living()]
        if living:
            connection.wait(living, seconds)
        else:
            time.sleep(seconds)

    def _living(self) -> list[Worker]:
        return [worker for worker in self._workers if _exit(worker) is None]

    def _state(self, worker: Worker) -> RankState:
        exit_code = _exit(worker)  # read before the heartbeat, so that an ended worker has written its last one
        heartbeat = read_heartbeat(worker.heartbeat)
        failure, now = read_failure(worker.heartbeat), time.monotonic()
        silent = now - max(worker.started, heartbeat.alive if heartbeat else 0.0)
        return RankState(
            rank=worker.rank,
            host=self._host,
            running=now - worker.started,
            exit=exit_code,
            exited=now - worker.ended if worker.ended else 0.0,
            silent=silent,
            idle=now - max(worker.started, heartbeat.since if heartbeat else 0.0),
            suspended=exit_code is None and silent > SUSPICION and _is_stopped(worker.process.pid),
            heartbeat=heartbeat,
            failure=None if failure is None else replace(failure, when=now - failure.when),
            stack=_stack(worker.heartbeat.with_suffix(STACKS)),
        )


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Keep interpreters started inside from importing from the current folder, which `python -c` searches first."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _exit(worker: Worker) -> int | None:
    """The exit code of a worker, None while it runs; records when its end is first seen."""
    code = worker.process.exitcode
    if code is not None and worker.ended is None:
        worker.ended = time.monotonic()
        if code != 0:  # its children, such as data loaders, must not outlive it
            _send(worker, signal.SIGKILL, group=True)
    return code


def _send(worker: Worker, number: int, group: bool) -> None:
    pid = worker.process.pid
    assert pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group does not exist yet, or any more
        if group:
            os.killpg(pid, number)
    with contextlib.suppress(ProcessLookupError):
        if worker.ended is None:
            os.kill(pid, number)


def _is_stopped(pid: int | None) -> bool:
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
    except psutil.Error:
        return False


def _stack(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""
