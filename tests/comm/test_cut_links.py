"""Links that drop every packet and reset nothing: each rank is out in time, and says why.

Two networks joined by a cable, in namespaces of their own, which an unprivileged user may have on most machines.
"""

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
from pool import copies
from torch import nn

import zeroshard as zs

TIMEOUT = 10.0  # seconds that a collective may wait
WITHIN = TIMEOUT + 5.0  # seconds from the cut to the end of the last rank, as docs/survive.md promises
PATIENCE = 150.0  # seconds in which the ranks have begun to train
HOLD = ["unshare", "-rn", "sh", "-c", "unshare -n sh -c 'echo $$; exec sleep 600' & exec sleep 600"]
PORT = "29511"  # nobody else is in these networks


class Networks:
    """Two networks, each kept by a process."""

    def __init__(self, holder: subprocess.Popen[str]) -> None:
        assert holder.stdout is not None
        self.keepers = (holder.pid, int(holder.stdout.readline()))

    def ip(self, which: int, words: str) -> None:
        """Run the command `ip` in one of them."""
        inside = ["nsenter", "--preserve-credentials", "-t", str(self.keepers[which]), "-U", "-n", "ip", *words.split()]
        done = subprocess.run(inside, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this machine has no networks of one's own (ip {words}: {done.stderr.strip()})")

    def join(self) -> None:
        """Draw the cable."""
        self.ip(0, f"link add v0 type veth peer name v1 netns {self.keepers[1]}")
        for which in (0, 1):
            self.ip(which, "link set lo up")
            self.ip(which, f"address add 10.77.0.{which + 1}/24 dev v{which}")
            self.ip(which, f"link set v{which} up")


@contextlib.contextmanager
def joined() -> Iterator[Networks]:
    """Two joined networks."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("this machine has no unshare, nsenter or ip")
    with subprocess.Popen(HOLD, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as holder:
        try:
            found = Networks(holder)
        except ValueError:
            pytest.skip("this machine gives a user no network of its own (unshare -rn)")
        try:
            found.join()
            yield found
        finally:
            os.kill(found.keepers[1], signal.SIGKILL)
            holder.kill()


def train(place: dict[str, str], keeper: int, pipe: Any) -> None:
    """A rank in the network of `keeper`, that trains until an error ends it as an uncaught one ends a script."""
    for kind in ("user", "net"):
        with open(f"/proc/{keeper}/ns/{kind}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    os.environ |= place
    torch.set_num_threads(1)
    try:
        plan = zs.Plan(zero=2, transport="network", timeout=TIMEOUT)
        engine = zs.Engine(nn.Linear(4, 4), lambda ps: torch.optim.SGD(ps, lr=0.1), plan)
        for step in range(10**9):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            if step == 2:
                pipe.send("trains")
            time.sleep(0.005)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        sys.last_value = error
        atexit._run_exitfuncs()


class Job:
    """Two ranks that train, on both sides of a cable or, `alone`, on one machine whose loopback device goes."""

    def __init__(self, networks: Networks, alone: bool) -> None:
        context = copies()
        self._networks, self._alone = networks, alone
        self.processes: list[Any] = []
        self.pipes = [context.Pipe() for _ in range(2)]
        for rank in (0, 1):
            which = 0 if alone else rank
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank if alone else 0), "MASTER_PORT": PORT}
            place |= {"LOCAL_WORLD_SIZE": "2" if alone else "1", "MASTER_ADDR": "127.0.0.1" if alone else "10.77.0.1"}
            place |= {} if alone else {"GLOO_SOCKET_IFNAME": f"v{rank}"}
            task = (place, networks.keepers[which], self.pipes[rank][1])
            self.processes.append(context.Process(target=train, args=task, daemon=True))

    def trains(self) -> None:
        """Wait until both ranks train."""
        for pipe, _ in self.pipes:
            assert pipe.poll(PATIENCE)
            assert pipe.recv() == "trains"

    def cut(self) -> float:
        """Cut the link; when that was."""
        start = time.monotonic()
        self._networks.ip(0 if self._alone else 1, "link set lo down" if self._alone else "link set v1 down")
        return start

    def end(self, start: float) -> None:
        """Both ranks are out in time, and say why."""
        living = {process.sentinel for process in self.processes}
        while living and (left := WITHIN - (time.monotonic() - start)) > 0:
            living -= set(wait(list(living), left))
        assert not living
        said = [pipe.recv() for pipe, _ in self.pipes]
        assert all(words.startswith("CommError: Rank") for words in said), said
        assert "the job's store does not answer" in said[1] and "cable" in said[1]


def test_both_ranks_are_out_in_time() -> None:
    """The cable between two machines, and the loopback device of one: two jobs at once, which wait."""
    with joined() as one, joined() as other:
        jobs = [Job(one, alone=False), Job(other, alone=True)]
        try:
            for process in (process for job in jobs for process in job.processes):
                process.start()
            for job in jobs:
                job.trains()
            starts = [job.cut() for job in jobs]
            for job, start in zip(jobs, starts, strict=True):
                job.end(start)
        finally:
            for process in (process for job in jobs for process in job.processes):
                process.kill()
                process.join()
