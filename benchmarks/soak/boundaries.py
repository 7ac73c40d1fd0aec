"""Faults from outside: ranks that differ, links that come back, two runs in a folder, data loaders: F22 to F25."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soak.job import Job, check_same, check_whole, reference_of, stop_signal, train
from soak.nodes import set_link, start, two_nodes

HERE = Path(__file__).parent
SOON = 120.0  # seconds in which a script with a data loader must have ended; it takes about five
PAUSE = 2.0  # seconds for which a link is down, less than the timeout of the supervisors
Counts = dict[str, Any]


def unlike_ranks(folder: Path, quick: bool) -> Counts:
    """F22: fields of plan, model and optimizer that differ between ranks: each is named, on both."""
    count, path = 12 if quick else 200, folder / "found"
    with Job(folder, [str(HERE / "unlike.py"), str(path), str(count)], ("--max-restarts", "0")) as job:
        assert job.wait() == 0
    found = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]
    silent = [words for each in found for words in each["silent"]]
    assert not silent, "; ".join(silent)
    return {"fields": found[0]["fields"], "differences": count, "silent": 0}


def restored_link(folder: Path, quick: bool) -> Counts:
    """F23: the link drops packets and comes back within the timeout: the run goes on, bit for bit."""
    options, cuts = ("--steps", "60"), 1 if quick else 5
    reference = reference_of(folder / "reference", *options)
    with two_nodes() as names, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(job) for job in start(folder, names, *options)]
        for number in range(cuts):
            last = 8 * (number + 1)
            jobs[0].until(lambda last=last: jobs[0].step() >= last, f"step {last}")
            set_link(names[number % 2], "down")
            time.sleep(PAUSE)
            set_link(names[number % 2], "up")
        assert [job.wait() for job in jobs] == [0, 0]
        assert not jobs[0].reports
    return {"cuts": cuts, "lines": check_same(folder, reference)}


def two_resumes(folder: Path, quick: bool) -> Counts:
    """F24: two resumes of one run at once: one goes on, bit for bit, the other names the folder's owner."""
    options, times = ("--steps", "40"), 1 if quick else 4
    reference = reference_of(folder / "reference", *options)
    for number in range(times):
        place = folder / str(number)
        with Job(place, train(place, *options)) as job:
            job.until(lambda job=job: job.step() >= 12, "step 12")
            assert stop_signal(job) == 75
        words = train(place, *options, "--resume", "auto")
        with Job(place, words, ("--max-restarts", "0")) as one, Job(place, words, ("--max-restarts", "0")) as other:
            codes = sorted([one.wait(), other.wait()])
            said = [job.screen[-1] for job in (one, other) if job.process.returncode]
        assert codes[0] == 0 and codes[1] != 0, (codes, said)
        assert "is held by process" in said[0] or "is taken by another run" in said[0], said
        check_same(place, reference)
        assert len(list((place / "runs").iterdir())) == 1
        check_whole(place)
    return {"pairs": times}


def data_loaders(folder: Path, quick: bool) -> Counts:
    """F25: scripts without a guard, whose data loaders have processes: they run as under python."""
    kinds = [(1, "default")] if quick else [(0, "default"), (1, "default"), (2, "fork"), (2, "default")]
    losses = []
    for workers, method in kinds:
        path = folder / f"{workers}-{method}"
        began = time.monotonic()
        script = [str(HERE / "loaders.py"), str(path), str(workers), method]
        with Job(folder, script, ("--max-restarts", "0", "--timeout", "60")) as job:
            assert job.process.wait(SOON) == 0, (workers, method)
        assert time.monotonic() - began < SOON
        losses += [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]
    assert all(each == losses[0] and len(each) == 8 for each in losses)
    return {"scripts": len(kinds)}


FAULTS: dict[str, Callable[[Path, bool], Counts]] = {
    "F22": unlike_ranks,
    "F23": restored_link,
    "F24": two_resumes,
    "F25": data_loaders,
}
