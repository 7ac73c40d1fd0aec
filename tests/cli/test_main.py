"""The command line as a shell meets it: Ctrl-C and what goes on after it, pipes, mistyped commands."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zeroshard.cli import main as cli
from zeroshard.cli.run import resuming
from zeroshard.comm.collectives import Comm
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ConfigError
from zeroshard.train.config import TrainConfig
from zeroshard.train.folder import RunFolder
from zeroshard.train.options import parse

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
SHORT = ["--sequence", "16", "--batch-per-rank", "2", "--validation-rows", "2"]
SHORT += ["--sample-tokens", "4", "--warmup-steps", "2"]


def started(words: list[str], folder: Path) -> "subprocess.Popen[str]":
    """A command in a group of processes of its own, as a shell starts it."""
    return subprocess.Popen(
        words,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(process: "subprocess.Popen[str]", folder: Path, steps: int) -> None:
    """Wait until so many steps are done, or the process has ended."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if any(path.read_text().count('"loss"') >= steps for path in folder.glob("runs/*/metrics.jsonl")):
            break
        time.sleep(0.05)


def interrupt(process: "subprocess.Popen[str]") -> set[psutil.Process]:
    """Press Ctrl-C; returns the processes that there were."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = set(psutil.Process(process.pid).children(recursive=True))
        os.killpg(process.pid, signal.SIGINT)
        return family
    return set()


def test_ctrl_c_saves_and_names_the_command_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a module that is called like one of Python's, on data whose name looks like markup."""
    (tmp_path / "numbers.py").write_text("raise RuntimeError('this is not the module of the standard library')\n")
    data = tmp_path / "x[" / "red]"  # a relative path with [/red] in it
    data.mkdir(parents=True)
    (data / "a.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(600)))
    options = ["--ranks", "2", "--data", "x[/red]", *SHORT, "--steps", "4000"]
    process = started([sys.executable, "-m", "zeroshard", "train", *options], tmp_path)
    wait_for_steps(process, tmp_path, steps=3)
    monkeypatch.chdir(tmp_path)
    config = parse(TrainConfig, [*options, "--resume", "auto"], "zeroshard train")
    with pytest.raises(ConfigError, match=f"is held by process {process.pid} of "):  # two would overwrite each other
        RunFolder.create(config, Comm(Mesh()))
    family = interrupt(process)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, out + err
    assert len(family) >= 3 and not psutil.wait_procs(family, timeout=PATIENCE)[1]
    (line,) = err.splitlines()
    said, _, command = line.partition("go on with: ")
    assert said.startswith("zeroshard: Stopped on request after step ") and "which is saved" in said
    assert command.startswith("OMP_NUM_THREADS=1 ") and command.endswith("--steps 4000 --resume auto")
    (run,) = (tmp_path / "runs").iterdir()
    reached = int(said.split("step ")[1].split(",")[0])
    assert (run / "checkpoints" / f"step-{reached:08d}").is_dir()
    shell = command.replace("--steps 4000", f"--steps {reached + 2}")
    done = subprocess.run(
        ["sh", "-c", shell], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on from step {reached} of {Path('runs') / run.name}" in done.stdout
    assert "tiny on x[/red]:" in done.stdout and (run / "report.html").is_file()


def test_the_command_that_goes_on() -> None:
    start = ["zeroshard", "train"]
    assert resuming(start, ["--data", "a b"]) == "zeroshard train --data 'a b' --resume auto"
    assert resuming(start, ["--resume", "runs/1", "--steps", "9"]) == "zeroshard train --steps 9 --resume auto"
    assert resuming(start, ["--resume=runs/1"], "2") == "OMP_NUM_THREADS=2 zeroshard train --resume auto"


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["train", "--help-all"]])
def test_nobody_reads_the_help_to_its_end(words: list[str], tmp_path: Path) -> None:
    process = started([sys.executable, "-m", "zeroshard", *words], tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == ""
    assert process.wait(PATIENCE) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("typed, meant", [("tain", "train"), ("reprot", "report"), ("zzz", None)])
def test_a_mistyped_command(typed: str, meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([typed])
    said = capsys.readouterr().err
    assert left.value.code == 2 and f"There is no command {typed!r}" in said
    assert (f"did you mean {meant}?" in said) == (meant is not None)


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
@pytest.mark.parametrize("command", ["", "simulate", "simulate --all", "plan --params 7e9 --ranks 8", "launch --help"])
def test_output_fits_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with contextlib.suppress(SystemExit):
        cli.main(command.split())
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line.rstrip() for line in said.splitlines()]
    assert len(lines) > 4 and not [line for line in lines if len(line) > columns or "\N{HORIZONTAL ELLIPSIS}" in line]


def test_the_process_that_starts_ranks_loads_no_torch() -> None:
    program = """
import sys
from zeroshard.cli import run
from zeroshard.cli.main import main

run.run_ranks = lambda ranks, argv: sys.exit("torch" in sys.modules or ranks != 2)
main(["train", "--ranks", "2", "--zero", "3", "--steps", "3"])
"""
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE)


def test_words_in_another_encoding_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--out", os.fsdecode(b"r\xfcns")])
    assert left.value.code == 2
    assert "has bytes that are not utf-8, the encoding of this locale; set PYTHONUTF8=1" in capsys.readouterr().err
