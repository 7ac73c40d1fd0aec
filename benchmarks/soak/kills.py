"""Ranks and supervisors that are killed: F1, F13, F15, F17 and F20."""

import contextlib
import json
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from resilience import plans_job

from soak.job import Job, check_same, check_whole, losses, metrics, newest_run, reference_of, train
from zeroshard.checkpoint import committed

KILLS, IN_A_ROW = 3, 3  # under each plan; and in the main job without a newer checkpoint
PLANS_JOB = Path(plans_job.__file__)
MOST_GROWTH = 1.01
Counts = dict[str, Any]


def killed_ranks(folder: Path, quick: bool, kills: int | None = None) -> Counts:
    """F1: SIGKILL of any rank at any time, under all plans and in the main job: every line bit for bit the same."""
    if kills is not None:  # so many at least, first under the plans of the cover, without the main job
        places = -(-kills // KILLS)
        rounds = max(1, -(-places // (len(plans_job.PLANS) + len(plans_job.cover()))))
        names = [*plans_job.cover(), *plans_job.PLANS][: -(-places // rounds)]
        return {"plans": len(names), **_plans(folder / "plans", names, rounds)}
    names = ["zero3", "2bw"] if quick else [*plans_job.PLANS, *plans_job.cover()]
    counts = _plans(folder / "plans", names, 1 if quick else 5)
    pipeline = ("--pipeline-parallel", "2", "--microbatches", "2", "--pipeline-parallel.balance", "parameters")
    for number, options in enumerate([()] if quick else [(), ("--zero", "3"), pipeline]):
        found = _main_job(folder / f"main-{number}", options, 3 if quick else 12, number)
        counts = {name: counts[name] + found[name] for name in counts}
    assert quick or counts["kills"] >= 200, counts
    return counts


def _plans(folder: Path, names: list[str], rounds: int) -> Counts:
    """The script that goes through the plans, killed three times under each, with other moments in every round."""
    counts: Counter[str] = Counter(kills=0, lines=0, checkpoints=0)
    whole = folder / "whole"
    with Job(whole, [str(PLANS_JOB), str(whole), "0", "0", *names]) as job:
        assert job.wait() == 0
    for seed in range(1, rounds + 1):
        place = folder / str(seed)
        budget = ("--max-restarts", str(KILLS * len(names)))  # steps of each plan start at 0 again
        with Job(place, [str(PLANS_JOB), str(place), str(KILLS), str(seed), *names], budget) as job:
            assert job.wait() == 0
            blamed = {report["attempt"]: tuple(report["culprit"]["ranks"]) for report in job.reports}
        notes = [json.loads(path.read_text()) for path in (place / "kills").iterdir()]
        killed: dict[int, set[tuple[int]]] = defaultdict(set)  # both, where one has come to the next plan already
        for note in notes:
            killed[note["attempt"]].add((note["rank"],))
        assert blamed.keys() == killed.keys(), "every attempt that was killed is reported, and no other"
        assert all(blamed[n] in killed[n] for n in killed), "the rank that was killed is named every time"
        for path in (whole / "losses").iterdir():
            once = {json.loads(line)["step"]: {line} for line in path.read_text().splitlines()}
            found: dict[int, set[str]] = defaultdict(set)
            for line in (place / "losses" / path.name).read_text().splitlines():
                found[json.loads(line)["step"]].add(line)
                counts["lines"] += 1
            assert found == once, f"{path.stem} with seed {seed} logged other losses"
        counts["kills"] += len(notes)
        counts["checkpoints"] += check_whole(place)
    return dict(counts)


def _main_job(folder: Path, options: tuple[str, ...], kills: int, seed: int) -> Counts:
    """The main job, killed from outside: up to three times in a row without waiting for progress."""
    drawn, options = random.Random(seed), ("--steps", str(20 * kills), *options)
    reference = reference_of(folder / "reference", *options)
    done, checkpoints = 0, 0
    with Job(folder, train(folder, *options), ("--max-restarts", str(IN_A_ROW))) as job:
        while done < kills:
            if done % IN_A_ROW == 0:
                before = _committed(folder)
                job.until(lambda before=before: _committed(folder) > before, "a newer checkpoint")
            else:
                job.until(lambda done=done: len(job.reports) >= done and len(job.ranks) == 2, "the next attempt")
            time.sleep(drawn.random() * drawn.choice((0.1, 3.0)))
            assert job.process.poll() is None, "the job ended before it was killed often enough"
            done += job.send(drawn.randrange(2), signal.SIGKILL)
            job.until(lambda done=done: len(job.reports) >= done, "the report")  # then no rank writes any more
            checkpoints += check_whole(folder)
        assert job.wait() == 0
        assert len(job.reports) == kills and all(r["culprit"]["kind"] == "signal" for r in job.reports)
    lines = check_same(folder, reference)
    return {"kills": kills, "lines": lines, "checkpoints": checkpoints + check_whole(folder)}


def _committed(folder: Path) -> int:
    """The newest committed step of a folder's runs; -1 for none."""
    places = (folder / "runs").glob("*/checkpoints")
    return max((step for place in places for step, _ in committed(place)), default=-1)


def killed_supervisor(folder: Path, quick: bool) -> Counts:
    """F13: SIGKILL of the supervisor: after 5 s nothing is left, and the next start goes on, bit for bit."""
    options, times, slowest = ("--steps", "60"), 1 if quick else 5, 0.0
    reference = reference_of(folder / "reference", *options)
    for number in range(times):
        with Job(folder, train(folder, *options, *(("--resume", "auto") if number else ()))) as job:
            last = 7 * (number + 1)
            job.until(lambda last=last, job=job: job.step() >= last, f"step {last}")
            family = job.family
            assert len(family) >= 3
            began = time.monotonic()
            job.process.kill()
            job.process.wait()
            _, alive = psutil.wait_procs(family, timeout=5)
            alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
            assert not alive, f"after 5 s there are {alive}"
            slowest = max(slowest, time.monotonic() - began)
    with Job(folder, train(folder, *options, "--resume", "auto")) as job:
        assert job.wait() == 0
    lines = check_same(folder, reference)
    assert len(list((folder / "runs").iterdir())) == 1, "the same run went on"
    return {"kills": times, "lines": lines, "checkpoints": check_whole(folder), "slowest_s": slowest}


def killed_while_loading(folder: Path, quick: bool) -> Counts:
    """F15: a rank is killed while it reads a checkpoint, other numbers of ranks included: nothing is lost."""
    kills, lines = 2 if quick else 3, 0
    for number, ranks in enumerate((1,) if quick else (1, 2, 4)):
        place, options = folder / str(number), ("--steps", "60")
        reference = reference_of(place / "reference", *options)
        with Job(place, train(place, *options)) as job:
            job.until(lambda place=place: _committed(place) >= 10, "step 10")
            job.process.kill()
        words = train(place, *options, "--resume", "auto", fault=("load", "0", str(kills)))
        with Job(place, words, ("--max-restarts", str(kills)), ranks) as job:
            assert job.wait() == 0
            assert [report["culprit"]["ranks"] for report in job.reports] == [[0]] * kills
        check_whole(place)
        if ranks == 2:
            lines += check_same(place, reference)
        else:
            assert losses(place).keys() == reference.keys()
    return {"kills": kills * (number + 1), "lines": lines}


def samples_taken(folder: Path, quick: bool) -> Counts:
    """F17: over kills and other numbers of ranks every sample is taken once, none twice, none missing."""
    steps, worlds = (30, (2, 1)) if quick else (90, (2, 1, 3, 4, 2))
    kills = 0
    for number, ranks in enumerate(worlds):
        resume = ("--resume", "auto") if number else ()
        words = train(folder, "--steps", str(steps), *resume, fault=("samples", "-1", "0"))
        with Job(folder, words, (), ranks) as job:
            if number + 1 < len(worlds):
                last = (number + 1) * steps // len(worlds)
                job.until(lambda last=last, job=job: job.step() >= last - 5, f"step {last - 5}")
                job.send(0, signal.SIGKILL)
                job.until(lambda last=last, job=job: job.step() >= last, f"step {last}")
                job.process.kill()
                kills += 2
            else:
                assert job.wait() == 0
    taken: dict[int, dict[str, list[int]]] = defaultdict(dict)  # by step, then by start; the last start counts
    for line in map(json.loads, (newest_run(folder) / "samples.jsonl").read_text().splitlines()):
        taken[line["step"]].setdefault(line["start"], []).extend(line["samples"])
    counts = Counter(sample for starts in taken.values() for sample in list(starts.values())[-1])
    assert sorted(taken) == list(range(1, steps + 1))
    assert counts == Counter(range(len(counts))), "some sample is missing, or was taken twice"
    return {"samples": len(counts), "kills": kills, "worlds": str(worlds)}


def everything(folder: Path, quick: bool) -> Counts:
    """F20: a long main job, with one fault after the other: it completes, bit for bit, without leaks."""
    steps, faults = (160, 3) if quick else (2000, 40)
    options, drawn = ("--steps", str(steps), "--checkpoint-every", "10"), random.Random(20)
    reference = reference_of(folder / "reference", *options)
    kinds: Counter[str] = Counter()
    early: list[tuple[float, int]] = []
    late: list[tuple[float, int]] = []
    with Job(folder, train(folder, *options), ("--timeout", "6", "--start-timeout", "60")) as job:
        for number in range(faults):
            before = _committed(folder)
            job.until(lambda before=before, job=job: _committed(folder) > before, "a newer checkpoint")
            (early if number < max(1, faults // 10) else late).extend(_sizes(job))
            time.sleep(drawn.random())
            kind = drawn.choice(("kill", "kill", "stop", "abort", "pause"))
            kinds[kind] += _disturb(job, kind, drawn.randrange(2))
        late.extend(_sizes(job))
        last = max(losses(folder))
        assert job.wait() == 0
    lines = check_same(folder, reference)
    rss = [line["rss_bytes"] for line in metrics(folder) if "loss" in line and line["step"] > last]
    rss = rss[len(rss) // 4 :]
    growth = {"rank_rss": statistics.median(rss[-10:]) / statistics.median(rss[:10])}
    for place, name in enumerate(("supervisor_rss", "supervisor_fds")):
        growth[name] = statistics.median(s[place] for s in late) / max(1, statistics.median(s[place] for s in early))
    counts = {**kinds, "lines": lines, "checkpoints": check_whole(folder)}
    counts |= {name: round(value, 4) for name, value in growth.items()}
    assert quick or sum(kinds.values()) == faults
    assert max(growth.values()) <= MOST_GROWTH, counts
    return counts


def _disturb(job: Job, kind: str, rank: int) -> bool:
    """Make one fault; for a fault that ends the attempt, wait until it is noticed."""
    before = len(job.reports)
    match kind:
        case "kill":
            sent = job.send(rank, signal.SIGKILL)
        case "stop":
            sent = job.send(rank, signal.SIGSTOP)
        case "abort":
            sent = job.send(rank, signal.SIGABRT)
        case _:  # shorter than the timeout: nothing is to happen
            sent = job.send(rank, signal.SIGSTOP)
            time.sleep(1.0)
            job.send(rank, signal.SIGCONT)
            return sent
    if sent:
        job.until(lambda: len(job.reports) > before, "the report")
    return sent


def _sizes(job: Job) -> list[tuple[float, int]]:
    """Resident bytes and open files of the supervisor and of the process that forks ranks, added up."""
    parts = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(job.process.pid)
        for process in (top, *top.children()):
            parts.append((float(process.memory_info().rss), process.num_fds()))
    return [(sum(rss for rss, _ in parts), sum(fds for _, fds in parts))] if parts else []


FAULTS: dict[str, Callable[[Path, bool], Counts]] = {
    "F1": killed_ranks,
    "F13": killed_supervisor,
    "F15": killed_while_loading,
    "F17": samples_taken,
    "F20": everything,
}
