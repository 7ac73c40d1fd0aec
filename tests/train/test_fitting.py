"""A budget that is too small is answered with options that work."""

import shlex
from pathlib import Path

import pytest
from selection import by_default

from zeroshard.comm.mesh import Mesh
from zeroshard.errors import BudgetExceeded
from zeroshard.train.config import TrainConfig
from zeroshard.train.options import parse
from zeroshard.train.run import run

SHORT = ["--sequence", "32", "--batch-per-rank", "2", "--steps", "2", "--validation-rows", "2", "--sample-tokens", "0"]


def train(folder: Path, *words: str) -> None:
    config = parse(
        TrainConfig, ["--data", str(folder / "text"), "--out", str(folder / "runs"), *SHORT, *words], "train"
    )
    assert run(config, Mesh()) is not None


CASES = [("8MiB", "It fits with: ", " (a rehearsal"), ("100KiB", "the smallest budget that works is: ", "\n")]


@pytest.mark.parametrize("case", by_default(CASES, CASES[0]), ids=lambda case: case[0])
def test_the_options_that_the_error_names_work(case: tuple[str, str, str], tmp_path: Path) -> None:
    budget, start, leads = case
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(400)))
    with pytest.raises(BudgetExceeded) as refused:
        train(tmp_path, "--device-memory", budget)
    message = str(refused.value)
    assert "smaller units" not in message
    options = shlex.split(message.partition(start)[2].partition(leads)[0])
    assert "--offload" in options
    if "--device-memory" not in options:
        options += ["--device-memory", budget]
    train(tmp_path, *options)
