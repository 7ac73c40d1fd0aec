"""Ranks that stop, hang, differ, are slow or go wrong: F8 to F12 and F19."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from soak.job import (
    Job,
    check_same,
    check_whole,
    losses,
    metrics,
    newest_run,
    reference_of,
    stop_signal,
    train,
)

ALL_STOP, TIMEOUT, AFTER = 15.0, 6.0, 2.0  # seconds: after any fault; of the supervisor; and how much longer for a hang
CULPRIT = Path(__file__).with_name("culprit.py")
Counts = dict[str, Any]


def stopped_rank(folder: Path, quick: bool) -> Counts:
    """F8: SIGSTOP: noticed within the timeout and 2 s, rank and phase named, started again, bit for bit."""
    times, options = 1 if quick else 6, ("--steps", "60" if quick else "120")
    reference, seconds = reference_of(folder / "reference", *options), []
    limits = ("--timeout", str(TIMEOUT), "--start-timeout", "60")
    with Job(folder, train(folder, *options), limits) as job:
        for number in range(times):
            last = 10 * (number + 1)
            job.until(lambda last=last: len(job.ranks) == 2 and job.step() >= last, f"step {last}")
            rank = number % 2
            pids, began = [reading.pid for reading in job.ranks.values()], time.monotonic()
            assert job.send(rank, signal.SIGSTOP)
            seconds.append(job.seconds_to_stop(began, pids))
            job.until(lambda number=number: len(job.reports) == number + 1, "the report")
            culprit = job.reports[-1]["culprit"]
            assert culprit["ranks"] == [rank] and "the process is stopped" in culprit["reason"], culprit
        assert job.wait() == 0
    assert max(seconds) <= TIMEOUT + AFTER, f"all had stopped after {max(seconds):.1f} s, with --timeout {TIMEOUT:g}"
    return {"lines": check_same(folder, reference), "stops": times, "slowest_s": max(seconds)}


EXPECTED: dict[str, tuple[str, ...]] = {  # text of the last line on the screen, by fault
    "raise": ("rank 1 raised ValueError: bad luck",),
    "exit": ("rank 1 ended with exit code 3",),
    "leave": ("rank 1 ended with exit code 0",),
    "nan": ("NonFiniteError",),
    "shape": ("rank 1", "shape"),
    "loop": ("rank 1 made no progress",),
    "lock": ("rank 1 made no progress",),
    "mismatch": ("The ranks disagree", "rank 0", "rank 1"),
}
STACKS = {"loop": "spin_for_ever", "lock": "wait_for_a_lock"}


def culprit(folder: Path, fault: str, counts: Counts) -> None:
    """Run the script with a fault; returns the culprit, the last line, and the seconds until all ranks have ended."""
    place = folder / fault
    limits = ("--timeout", str(TIMEOUT), "--max-restarts", "0")
    with Job(place, [str(CULPRIT), str(place), fault], limits) as job:
        job.until(lambda: (place / "fault").exists() and (place / "fault").read_text(), "the fault")
        pids = [reading.pid for reading in job.ranks.values()]
        began = float((place / "fault").read_text())
        seconds = job.seconds_to_stop(began, pids)
        assert job.wait() == 1
        last, (report,) = job.screen[-1], job.reports
    limit = TIMEOUT + AFTER if fault in STACKS else ALL_STOP
    assert all(words in last for words in EXPECTED[fault]), f"{fault}: the last line is {last!r}"
    assert seconds <= limit, f"{fault}: all had stopped after {seconds:.1f} s, with a limit of {limit:g} s"
    stacks = [rank["stack"] for rank in report["ranks"]]
    if fault in STACKS:
        assert STACKS[fault] in stacks[1] and "File" in stacks[0], f"{fault}: the report lacks a stack"
    counts[f"{fault}_s"] = seconds


def hanging_rank(folder: Path, quick: bool) -> Counts:
    """F9: an endless loop, a lock that is never free, unlike collectives: culprit named, stacks of all kept."""
    return _all_of(folder, ("loop",) if quick else ("loop", "lock", "mismatch"), 1 if quick else 3)


def failing_rank(folder: Path, quick: bool) -> Counts:
    """F9b: raising, leaving, another shape, NaN: all stop within 15 s, and the first error is the last line."""
    return _all_of(
        folder, ("raise", "leave") if quick else ("raise", "exit", "leave", "shape", "nan"), 1 if quick else 3
    )


def _all_of(folder: Path, faults: tuple[str, ...], rounds: int) -> Counts:
    """Make all faults, even after one of them has failed."""
    counts, problems = Counts(), []
    for number in range(rounds):
        for fault in faults:
            try:
                culprit(folder / str(number), fault, counts)
            except AssertionError as error:
                problems.append(str(error))
    assert not problems, "; ".join(problems)
    return {"faults": rounds * len(faults), **counts}


def slow_rank(folder: Path, quick: bool) -> Counts:
    """F10: a rank that sleeps is reported within 20 steps, and no rank in many clean steps."""
    clean, steps = (60, 30) if quick else (500, 60)
    place = folder / "clean"
    with Job(place, train(place, "--steps", str(clean)), ("--max-restarts", "0")) as job:
        assert job.wait() == 0
    false = [line["event"] for line in metrics(place) if "event" in line]
    busy = sorted(line["seconds"] for line in metrics(place) if "loss" in line)
    step = (busy[-1] - busy[0]) / (len(busy) - 1)
    place = folder / "slow"
    words = train(place, "--steps", str(steps), fault=("slow", "1", str(max(3 * step, 0.05))))
    with Job(place, words, ("--max-restarts", "0")) as job:
        assert job.wait() == 0
    told = [line for line in metrics(place) if "event" in line]
    assert told and told[0]["step"] <= 20 and "rank 1 is slow" in told[0]["event"], told
    assert not false, f"in {clean} clean steps: {false}"
    return {"clean_steps": clean, "reported_in_step": told[0]["step"], "step_s": step}


def bad_numbers(folder: Path, quick: bool) -> Counts:
    """F11: NaN in one rank's loss, in a gradient, again and again; one decision, the scaler's as torch's own."""
    counts: Counts = {}
    place, steps = folder / "once", ("--steps", "30")
    with Job(place, train(place, *steps, "--rollbacks", "2", fault=("nan", "1", "12"))) as job:
        assert job.wait() == 0 and not job.reports
    lines = [line for line in metrics(place) if "loss" in line]
    assert [line["step"] for line in lines] == [*range(1, 13), *range(11, 31)], "back to 10, the batch left out"
    assert all(line["loss"] == line["loss"] for line in lines[12:])
    counts["roll_backs"] = 1
    place, every = folder / "scale", 7
    options = (*steps, "--precision", "fp16", "--loss-scale.window", "5", "--loss-scale.initial", "1024")
    with Job(place, train(place, *options, fault=("infinite", "1", str(every)))) as job:
        assert job.wait() == 0 and not job.reports
    lines = [line for line in metrics(place) if "loss" in line]
    scales, skipped = [line["loss_scale"] for line in lines], [line["skipped"] for line in lines]
    assert skipped == [step % every == 0 for step in range(1, 31)], "exactly those steps are left out, on all ranks"
    assert scales == _torch_scales(30, every), f"{scales} beside torch's {_torch_scales(30, every)}"
    counts["scales"] = len(scales)
    if not quick:
        place = folder / "always"
        with Job(place, train(place, *steps, "--rollbacks", "0", fault=("nan", "1", "12"))) as job:
            assert job.wait() == 1
            assert "NonFiniteError" in job.screen[-1] and "failed twice with the same error" in job.screen[-1]
    return counts


def _torch_scales(steps: int, every: int) -> list[float]:
    """The scale in each step by torch's own rule, where the gradients of some steps are infinite."""
    scale, tracker, found = torch.tensor([1024.0]), torch.zeros(1, dtype=torch.int32), []
    for step in range(1, steps + 1):
        found.append(float(scale))
        bad = torch.tensor([float(step % every == 0)])
        torch._amp_update_scale_(scale, tracker, bad, 2.0, 0.5, 5)
    return found


def asked_to_stop(folder: Path, quick: bool) -> Counts:
    """F12: SIGTERM and SIGUSR1: saved, exit code 75 within the grace, and the resumed run is bit for bit the same."""
    options, slowest = ("--steps", "60"), 0.0
    reference = reference_of(folder / "reference", *options)
    numbers = (signal.SIGTERM, signal.SIGUSR1) if quick else (signal.SIGTERM, signal.SIGUSR1) * 3
    for count, number in enumerate(numbers):
        resume = ("--resume", "auto") if count else ()
        with Job(folder, train(folder, *options, *resume)) as job:
            last = 8 * (count + 1)
            job.until(lambda last=last, job=job: job.step() >= last, f"step {last}")
            began = time.monotonic()
            assert stop_signal(job, number) == 75 and not job.reports
            slowest = max(slowest, time.monotonic() - began)
            said = job.screen[-1]
            assert "which is saved; go on with: " in said and said.rstrip().endswith("--resume auto"), said
        newest = max(newest_run(folder).joinpath("checkpoints").iterdir()).name
        assert int(newest[5:]) == max(losses(folder)), "the step that it stopped after is saved"
    with Job(folder, train(folder, *options, "--resume", "auto")) as job:
        assert job.wait() == 0
    lines = check_same(folder, reference)
    assert all(len(same) == 1 for same in losses(folder).values())
    assert len(list((folder / "runs").iterdir())) == 1
    check_whole(folder)
    return {"requests": len(numbers), "lines": lines, "slowest_s": slowest}


def flipped_bit(folder: Path, quick: bool) -> Counts:
    """F19: one bit of one weight on one rank: told within the steps between two comparisons, with name and rank."""
    late = []
    for number, step in enumerate((12,) if quick else (11, 12, 13, 14)):
        place = folder / str(number)
        options = ("--steps", "30", "--zero", "0", "--transport", "network", "--check-replicas", "5")
        words = train(place, *options, fault=("flip", "1", str(step)))
        with Job(place, words, ("--max-restarts", "0")) as job:
            assert job.wait() == 1
            last = job.screen[-1]
        assert "DivergenceError" in last and "rank 1" in last and ".weight" in last, last
        reached = max(losses(place))
        assert step <= reached <= step + 5, (step, reached)
        late.append(reached - step)
    return {"flips": len(late), "steps_until_told": max(late)}


FAULTS: dict[str, Callable[[Path, bool], Counts]] = {
    "F8": stopped_rank,
    "F9": hanging_rank,
    "F9b": failing_rank,
    "F10": slow_rank,
    "F11": bad_numbers,
    "F12": asked_to_stop,
    "F19": flipped_bit,
}
