"""The lock of a folder: who holds it, who may take it over, and what the others are told."""

import fcntl
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zeroshard.comm.run_lock import Owner, hold, release
from zeroshard.errors import ConfigError

MINE = Owner.of(os.getpid())
LIVING = Owner.of(os.getppid())
NOBODY = replace(MINE, pid=2**22 + 1)  # more than Linux ever gives
REUSED = replace(LIVING, started=LIVING.started - 100)
ELSEWHERE = replace(MINE, host="node7", job="12", requeued=0)


def test_held_and_released(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    hold(path, MINE)
    assert json.loads(path.read_text()) == asdict(MINE)
    hold(path, MINE)  # the next attempt of the same owner
    with pytest.raises(ConfigError) as refused:
        hold(path, LIVING)
    assert str(refused.value).startswith(f"{tmp_path} is held by process {os.getpid()} of {MINE.user} on {MINE.host}")
    assert "which started at 20" in str(refused.value) and "wait for it, stop it, or start" in str(refused.value)
    release(path, LIVING)  # of somebody else: nothing happens
    assert path.read_text()
    release(path, MINE)
    hold(path, LIVING)
    assert json.loads(path.read_text())["pid"] == os.getppid()


@pytest.mark.parametrize(
    "words",
    [json.dumps(asdict(NOBODY)), json.dumps(asdict(REUSED)), "", '{"user": "a", "pi', "[1]", '{"user": 1, "pid": "x"}'],
    ids=["nobody", "reused", "empty", "cut off", "list", "other types"],
)
def test_what_nobody_holds_any_more_is_taken_over(tmp_path: Path, words: str) -> None:
    path = tmp_path / "run.lock"
    path.write_text(words)
    hold(path, MINE)
    assert json.loads(path.read_text()) == asdict(MINE)


def test_a_clock_that_was_set_frees_no_lock(tmp_path: Path) -> None:
    """The start of a process is read as a time of day, which moves with the clock."""
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(asdict(replace(LIVING, started=LIVING.started - 20))))
    with pytest.raises(ConfigError, match="is held by process"):
        hold(path, MINE)


def test_another_machines_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(asdict(ELSEWHERE)))
    with pytest.raises(ConfigError, match=rf"on node7, .* if that run is gone, remove the file with `rm {path}`"):
        hold(path, MINE)
    with pytest.raises(ConfigError, match="on node7"):
        hold(path, replace(MINE, job="12"))  # another step of the same job
    hold(path, replace(MINE, job="12", requeued=1))  # the cluster has started the job again


def test_two_in_the_same_instant(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is taken by another run at this moment"):
            hold(path, MINE)
    hold(path, MINE)
