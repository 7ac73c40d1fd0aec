"""The options of `zeroshard run`, and what it refuses before anything is started."""

import logging
from pathlib import Path
from typing import Any

import pytest

from zeroshard import supervisor as supervise
from zeroshard.cli import main as cli
from zeroshard.cli.run import check_command, run_ranks


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that would have been supervised."""
    started: list[Any] = []
    monkeypatch.setattr(supervise, "supervise", lambda job: started.append(job) or 7)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return started


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(["run", *words])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_a_job(jobs: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    options = ["--nproc-per-node", "2", "--timeout", "5", "--max-restarts", "0", "--reports", "r"]
    assert run(*options, "--", "mine.py", "--steps", "3", "--", "x") == 7
    (job,) = jobs
    assert job.command == ("mine.py", "--steps", "3", "--", "x")
    assert (job.place.processes, job.limits.timeout, job.max_restarts, job.reports) == (2, 5.0, 0, Path("r"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--nproc-per-node", "2"], "There is nothing to run; write"),
        (["--"], "There is nothing to run; write"),
        (["--", "plan"], "'plan' cannot be supervised; write"),
        (["--", "nowhere.py"], "There is no script nowhere.py; write"),
        (["--timeout", "1", "--", "train"], "timeout is 1.0; it must be 2 seconds or more"),
        (["--nproc-per-node", "0", "--", "train"], "--nproc-per-node is 0; it must be 1 or more"),
        (["--max-restarts", "-1", "--", "train"], "--max-restarts is -1; it must be 0 or more"),
        (["--nproc-per-node", "1", "--nnodes", "2", "--", "train"], "the number of this one is not known"),
    ],
)
def test_what_cannot_be_run(
    jobs: list[Any], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(*words) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said and not jobs


def test_many_more_processes_than_cores_are_a_warning(jobs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nproc-per-node", "5000", "--", "train") == 7 and len(jobs) == 1
    warning = capsys.readouterr().err
    assert warning.startswith("zeroshard: warning: 5000 processes share ") and "; --nproc-per-node " in warning
    with pytest.raises(SystemExit):
        cli.main(["train", "--ranks", "4000"])
    warning = capsys.readouterr().err
    assert "4000 processes share " in warning and "; --ranks " in warning
    assert run("--nproc-per-node", "1", "--", "train") == 7
    assert not capsys.readouterr().err


def test_help(jobs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "--max-restarts" in capsys.readouterr().out


def test_a_script_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    check_command([str(tmp_path / "a.py"), "--x"])


def test_the_supervisor_logs_and_the_command_shows_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def supervise(job: object) -> int:
        logging.getLogger("zeroshard.supervisor.leader").warning("rank 1 was killed")
        return 7

    monkeypatch.setattr("zeroshard.supervisor.supervise", supervise)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as end:
        run_ranks(1, [])
    assert end.value.code == 7 and capsys.readouterr().err == "zeroshard: rank 1 was killed\n"
    assert caplog.messages == ["rank 1 was killed"] and not logging.getLogger("zeroshard.supervisor").handlers
