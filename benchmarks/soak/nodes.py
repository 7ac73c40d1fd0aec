"""Two nodes, as network namespaces with addresses of their own, and a link that is cut: F16. Needs root and `ip`."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from soak.job import Job, Unable, check_same, check_whole, losses, reference_of, train

ADDRESSES, PORT = ("10.213.7.1", "10.213.7.2"), "29541"
TIMEOUT, SUPERVISORS = 6.0, 60.0  # seconds: of the supervisors; and in which they, too, must have ended
Counts = dict[str, Any]


@contextlib.contextmanager
def two_nodes() -> Iterator[list[str]]:
    """The names of two namespaces that a pair of veth devices connects; their devices have the same names."""
    if os.getuid() or shutil.which("ip") is None:
        raise Unable("needs root and the command ip")
    names = [f"zs{os.getpid()}n{node}" for node in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise Unable(f"ip {' '.join(words)}: {done.stderr.strip()}")


def set_link(name: str, state: str) -> None:
    """Let the device of a namespace be "up" or "down"; the address stays."""
    _ip("-n", name, "link", "set", name, state)


def start(folder: Path, names: list[str], *options: str) -> list[Job]:
    """One supervisor in each namespace, with one rank."""
    jobs = []
    for node, name in enumerate(names):
        place = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", PORT)
        limits = ("--timeout", str(TIMEOUT), "--start-timeout", "90", "--max-restarts", "0")
        more, prefix = {"GLOO_SOCKET_IFNAME": name}, ("ip", "netns", "exec", name)
        jobs.append(Job(folder, train(folder, *options), (*place, *limits), 1, prefix, more))
    return jobs


def cut_network(folder: Path, quick: bool) -> Counts:
    """F16: the link is cut, or node 0's supervisor with its store is killed: all end in time, a new start goes on."""
    options, cuts = ("--steps", "60"), ("cut",) if quick else ("cut", "store", "cut")
    reference, ranks_s, all_s = reference_of(folder / "reference", *options), 0.0, 0.0
    for number, kind in enumerate(cuts):
        resume = ("--resume", "auto") if number else ()
        with two_nodes() as names, contextlib.ExitStack() as stack:
            jobs = [stack.enter_context(job) for job in start(folder, names, *options, *resume)]
            last = 10 * (number + 1)
            jobs[0].until(lambda last=last, jobs=jobs: jobs[0].step() >= last, f"step {last}")
            pids, began = [reading.pid for job in jobs for reading in job.ranks.values()], time.monotonic()
            assert len(pids) == 2
            if kind == "cut":
                set_link(names[0], "down")
            else:
                jobs[0].process.send_signal(signal.SIGKILL)
            ranks_s = max(ranks_s, jobs[0].seconds_to_stop(began, pids))
            codes = [job.wait() for job in jobs]
            all_s = max(all_s, time.monotonic() - began)
            assert codes[1] == 1 and codes[0] in (1, -signal.SIGKILL), codes
            assert "lost node 0's supervisor" in jobs[1].screen[-1], jobs[1].screen[-1]
    with two_nodes() as names, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(job) for job in start(folder, names, *options, "--resume", "auto")]
        assert [job.wait() for job in jobs] == [0, 0]
    lines = check_same(folder, reference)
    assert len(losses(folder)) == len(reference)
    counts = {"cuts": len(cuts), "lines": lines, "checkpoints": check_whole(folder), "ranks_s": ranks_s, "all_s": all_s}
    assert ranks_s <= TIMEOUT + 2, f"the ranks had stopped after {ranks_s:.1f} s, with --timeout {TIMEOUT:g}: {counts}"
    assert all_s <= SUPERVISORS, f"the supervisors had ended after {all_s:.1f} s: {counts}"
    return counts


FAULTS: dict[str, Callable[[Path, bool], Counts]] = {"F16": cut_network}
