"""Fault F1: a job that is killed again and again, on any rank, logs what an undisturbed one logs, bit for bit."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pool import Pool
from resilience.plans_job import EVERY, LEAST, PLANS, STEPS, STRIDE, allowed, cover, go, options_of, pairs_of

from zeroshard.checkpoint import Reader, committed
from zeroshard.comm.mesh import Mesh
from zeroshard.plan import Plan

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("plans_job.py")
KILLS, JOBS, SEED = 3, 4, 0
PATIENCE = 600.0  # seconds that the supervised job may take on a machine that is busy with other things


def undisturbed(mesh: Mesh, folder: str, names: list[str]) -> None:
    """The job without kills and without a supervisor."""
    go(mesh, Path(folder), 0, SEED, names)


def lines(folder: Path, name: str) -> dict[int, set[str]]:
    """Every line that was ever logged under a plan, by step."""
    found: dict[int, set[str]] = defaultdict(set)
    for line in (folder / "losses" / f"{name}.jsonl").read_text().splitlines():
        found[json.loads(line)["step"]].add(line)
    return found


def test_the_cover_has_every_pair_that_a_plan_may_have() -> None:
    every, plans = allowed(), cover().values()
    chosen = [values for values in every if options_of(values) in plans]
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, every))
    assert LEAST <= len(plans) < len(every) / 3 and len(set(map(str, plans))) == len(plans)
    assert {Plan.from_dict(options).precision for options in plans} == {"fp32", "bf16", "fp16"}


def supervised(folder: Path, names: list[str]) -> subprocess.Popen[str]:
    """A supervised job that goes through the plans; crash reports go into `folder`/crashes."""
    words = ["run", "--nproc-per-node", "2", "--max-restarts", str(2 * KILLS + 2), "--reports", str(folder / "crashes")]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-m", "zeroshard", *words, "--", str(JOB), str(folder), str(KILLS), str(SEED), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )


SHOWN = ("bf16", "pipedream")


def test_killed_three_times_under_every_plan(pool: Pool, tmp_path: Path, whole: bool) -> None:
    """In several jobs, because a job waits for most of its time: for other causes of a failure, and for stacks."""
    every = list(PLANS if whole else SHOWN)
    jobs_at_once = min(JOBS, len(every))
    alone, parts = tmp_path / "alone", {tmp_path / f"killed-{n}": every[n::jobs_at_once] for n in range(jobs_at_once)}
    jobs = [supervised(folder, names) for folder, names in parts.items()]
    try:
        for name in every:  # one call each, because a call of the pool has a time limit
            pool.run(undisturbed, 2, str(alone), [name])
        said = [job.communicate(timeout=PATIENCE)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * jobs_at_once, said
    notes = [note for folder, names in parts.items() for note in survived(folder, alone, names)]
    assert {note["rank"] for note in notes} == {0, 1}
    assert {note["kind"] for note in notes} == {"start", "step", "save"}


def survived(killed: Path, whole: Path, names: list[str]) -> list[dict[str, Any]]:
    """The notes of the kills of a job, which has logged and saved under its plans what the undisturbed one has."""
    for name in names:
        found, wanted = lines(killed, name), lines(whole, name)
        assert found == wanted and {len(same) for same in wanted.values()} == {1}, name
        assert sorted(wanted) == list(range(1, STEPS + 1))
        losses = [json.loads(line)["loss"] for step in sorted(wanted) for line in wanted[step]]
        assert len(set(losses)) >= STEPS - 2, "the steps must be different"  # a pipeline that fills has no loss yet
        there = committed(killed / "checkpoints" / name)
        assert [step % STRIDE for step, _ in there] == [STEPS - EVERY, STEPS]
        assert not [problem for _, path in there for problem in Reader(path).problems()]
        assert len(list((killed / "checkpoints" / name).iterdir())) == 2, "nothing was put aside or left over"
    paths = sorted((killed / "kills").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    notes = [json.loads(path.read_text()) for path in paths]
    assert len(notes) == KILLS * len(names)
    reports = [json.loads(path.read_text()) for path in sorted((killed / "crashes").iterdir())]
    blamed = [(report["culprit"]["kind"], report["culprit"]["ranks"]) for report in reports]
    assert blamed == [("signal", [note["rank"]]) for note in notes]  # so often, because each plan made progress
    return notes
