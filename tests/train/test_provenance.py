"""The origin of a run: its command line, and the git state of a folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.plan import Plan
from zeroshard.train.config import TrainConfig
from zeroshard.train.provenance import command_line, git_state, start_of


def _git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_the_git_state_is_commit_branch_and_changed_files(tmp_path: Path) -> None:
    _git(tmp_path, "init")
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and (clean["branch"], clean["changed"]) == ("main", 0)
    (tmp_path / "a").write_text("2")
    (tmp_path / "new").write_text("not tracked")
    changed = git_state(tmp_path)
    assert changed == {**clean, "changed": 1}
    _git(tmp_path, "checkout", "--detach")
    detached = git_state(tmp_path)
    assert detached is not None and detached["branch"] == ""


def test_a_folder_without_a_repository_has_no_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "missing") is None


def test_a_repository_without_a_commit_has_no_git_state(tmp_path: Path) -> None:
    _git(tmp_path, "init")
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("program", ["/usr/bin/zeroshard", "/site-packages/zeroshard/__main__.py"])
def test_the_command_line_can_be_pasted(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "train", "--prompt", "def f"])
    assert command_line() == "zeroshard train --prompt 'def f'"


def test_the_command_line_of_a_script_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--x"])
    assert command_line() == "mine.py --x"
    monkeypatch.setattr(sys, "argv", [""])  # as at a prompt
    assert command_line() == ""


def test_a_start_is_that_of_the_rank_that_writes_the_folder(tmp_path: Path) -> None:
    config = TrainConfig(plan=Plan(seed=7))
    start = start_of(config, Comm(Mesh()), tmp_path, "again", reports=True)
    assert (start["seed"], start["ranks"], start["resume"], start["device"]) == (7, 1, "again", "cpu")
    assert start_of(config, Comm(Mesh()), tmp_path, "again", reports=False) == {}
