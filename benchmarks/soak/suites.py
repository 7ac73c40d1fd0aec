"""Faults that the test suite has already, run at their full counts: F2 to F7, F14 and F18."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from soak.job import ROOT

SUITES: dict[str, tuple[str, str, str]] = {  # file, a selection of its tests, their description
    "F2": ("checkpoint/test_commit.py", "kill or disk_that_fails or happens_to_one_rank", "a kill at every operation"),
    "F3": ("checkpoint/test_commit.py", "loss_of_power", "a loss of power at every operation"),
    "F4": ("checkpoint/test_damage.py", "bit_that_flips or engine_loads_nothing", "one-bit flips"),
    "F5": ("checkpoint/test_damage.py", "what_is_wrong or folder_that_goes", "cut, missing, extra, foreign files"),
    "F6": ("checkpoint/test_damage.py", "full", "a full disk"),
    "F7": ("checkpoint/test_damage.py", "read_only or vanishes or slow_disk", "a disk that is gone or slow"),
    "F14": ("checkpoint/test_reshard.py", "", "other numbers of ranks, stages, precisions"),
    "F18": ("checkpoint/test_poison.py", "", "poisoned input"),
}
KNOBS = {"ZEROSHARD_FUZZ": "5000", "ZEROSHARD_ALL_PAIRS": "1"}  # read by these files; their other counts are full
PATIENCE = 3600.0
Counts = dict[str, Any]


def suite(name: str, folder: Path, quick: bool) -> Counts:
    """Run a fault's tests; at least one must be found, and all must pass."""
    file, which, _ = SUITES[name]
    path = ROOT / "tests" / file
    assert path.exists(), f"there is no {file}"
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(folder / "pytest"),
        str(path),
        *(["-k", which] if which else []),
        *([] if quick else ["--whole"]),
    ]
    knobs = {} if quick else KNOBS
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **knobs},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    last = done.stdout.strip().splitlines()[-1]
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    assert done.returncode == 0 and counts.get("passed"), "\n".join(done.stdout.splitlines()[-30:])
    return {"tests": counts["passed"], **({"skipped": counts["skipped"]} if "skipped" in counts else {})}


FAULTS: dict[str, Callable[[Path, bool], Counts]] = {name: partial(suite, name) for name in SUITES}
