"""What an offloaded run of the main job shows and keeps of the time that it stood still."""

import json
from pathlib import Path
from typing import Any

import pytest

from zeroshard.comm.mesh import Mesh
from zeroshard.report import write_report
from zeroshard.traffic import QUEUES
from zeroshard.train.config import TrainConfig
from zeroshard.train.options import parse
from zeroshard.train.progress import exposed_text
from zeroshard.train.run import run as run_job

SHORT = ["--sequence", "32", "--batch-per-rank", "2", "--validation-rows", "4"]
SHORT += ["--sample-tokens", "0", "--no-checkpoint"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text("".join(f"line {n} of file {number}: {n * n}\n" for n in range(400)))
    return folder


def job(text: Path, out: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """Summary, lines of the steps, and folder of a job on one rank."""
    words = ("--data", str(text), *SHORT, "--out", str(out), "--steps", "4", *words)
    done = run_job(parse(TrainConfig, words, "train"), Mesh())
    assert done is not None
    lines = [json.loads(line) for line in (done[1] / "metrics.jsonl").read_text().splitlines()]
    return done[0], [line for line in lines if "loss" in line], done[1]


def test_every_step_says_what_it_stood_still_for(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, lines, folder = job(text, tmp_path, "--offload", "optimizer,parameters", "--zero", "3")
    for line in lines:
        assert {"gradients down", "parameters up"} <= line["exposed_seconds"].keys() <= set(map(str, QUEUES))
        assert line["guesses_taken"] >= 0 and line["guesses_undone"] >= 0
    for cause, seconds in summary["exposed_seconds"].items():
        assert seconds == pytest.approx(sum(line["exposed_seconds"].get(cause, 0.0) for line in lines))
    for name in ("guesses_taken", "guesses_undone"):
        assert summary[name] == sum(line[name] for line in lines)
    rows = {(row["category"], row["tier"]): row for row in summary["memory"]}
    assert rows["parameters", "host"]["planned_bytes"] == 4 * summary["parameters"]
    assert rows["parameters", "device"]["measured_bytes"] == 0
    output = capsys.readouterr().out
    assert "zeroshard: exposed " in output and " in 4 steps" in output
    assert "Waiting for offload" in write_report(folder).read_text()


def test_a_run_without_offload_says_nothing_of_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, lines, _ = job(text, tmp_path)
    assert "exposed_seconds" not in summary and not any("exposed_seconds" in line for line in lines)
    assert {row["tier"] for row in summary["memory"]} == {"device"}
    assert "exposed" not in capsys.readouterr().out


def test_times_in_words() -> None:
    seconds = {"update": 1.5, "disk": 0.001, "parameters up": 0.25}
    assert exposed_text(seconds) == "1.8 s (update 1.5 s, parameters up 250 ms)"
    assert exposed_text({"update": 0.0125, "gradients down": 0.0025}, 1) == "15 ms (update 12.5 ms)"
    assert exposed_text({}) == "0 ms"
