"""The supervisor's temporary folder goes with it, or with the next one."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from zeroshard.comm.run_lock import Owner, hold
from zeroshard.supervisor.scratch import LIVES, PREFIX, YOUNG, scratch_folder


def left_behind(place: Path, name: str, age: float = 10 * YOUNG) -> Path:
    """A folder as of a supervisor that made it so many seconds ago."""
    folder = place / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / LIVES).touch()
    then = os.stat(folder / LIVES).st_mtime - age
    os.utime(folder / LIVES, (then, then))
    return folder


def test_folders_of_killed_supervisors_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living, fresh = (left_behind(tmp_path, *how) for how in (("a",), ("b",), ("c", 0.0)))
    other = tmp_path / f"{PREFIX}data"  # of a person
    other.mkdir()
    with open(living / LIVES) as lives:
        fcntl.flock(lives, fcntl.LOCK_EX)
        with scratch_folder() as folder:
            assert folder.is_dir() and not dead.exists()
            assert living.is_dir() and fresh.is_dir() and other.is_dir()
    assert not folder.exists()


def test_run_folders_are_free_when_the_supervisor_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = tmp_path / "run.lock"
    with scratch_folder() as folder:
        hold(lock, Owner.of(os.getpid()))
        (folder / "attempt-0").mkdir()
        (folder / "attempt-0" / "rank-00000.lock").symlink_to(lock)
    assert lock.read_text() == ""
