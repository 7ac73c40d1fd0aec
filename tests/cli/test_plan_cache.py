"""Answers that `zeroshard plan` keeps: printed again, files too, until anything in the question changes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeroshard.cli.plan_cache import answered
from zeroshard.cli.plan_options import PlanOptions, described_machines
from zeroshard.doctor.hardware import Machines

OPTIONS = PlanOptions(gpu="A100-80", gpus=2, out=Path("best.toml"))


class Answers:
    """Prints the number of the question, and writes the file that it asks for; `code` ends it."""

    def __init__(self, code: int = 0) -> None:
        self.asked, self.code = 0, code

    def __call__(self, options: PlanOptions, machines: Machines | None) -> None:
        self.asked += 1
        print(f"answer {self.asked}")
        if options.out is not None:
            options.out.write_text(f"number = {self.asked}")
        if self.code:
            sys.exit(self.code)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ask(answers: Answers, options: PlanOptions = OPTIONS, folder: Path = Path("plans")) -> None:
    answered(options, described_machines(options, Path("none")), folder, answers)


def test_the_same_question_is_answered_once_with_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers()
    ask(answers)
    Path("best.toml").unlink()
    ask(answers)
    assert answers.asked == 1 and Path("best.toml").read_text() == "number = 1"
    printed = capsys.readouterr()
    assert printed.out == "answer 1\nanswer 1\n" and "--fresh" in printed.err
    ask(answers, replace(OPTIONS, fresh=True))
    ask(answers)
    assert answers.asked == 2 and capsys.readouterr().out == "answer 2\nanswer 2\n"


def test_other_options_machines_and_models_are_other_questions(tmp_path: Path) -> None:
    answers, config = Answers(), tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    others = [
        OPTIONS,
        replace(OPTIONS, gpus=4),
        replace(OPTIONS, host_memory="1GiB"),
        replace(OPTIONS, model=str(config)),
    ]
    for options in [*others, *others]:
        ask(answers, options)
    assert answers.asked == 4
    config.write_text('{"model_type": "mistral"}')
    ask(answers, others[-1])
    assert answers.asked == 5


def test_no_plan_ends_the_command_again() -> None:
    answers = Answers(code=1)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            ask(answers)
        assert ended.value.code == 1
    assert answers.asked == 1


def test_pictures_and_folders_that_cannot_be_written_keep_nothing() -> None:
    answers = Answers()
    for _ in range(2):
        ask(answers, replace(OPTIONS, explain=1))
    Path("file").write_text("")
    ask(answers, folder=Path("file/plans"))
    assert answers.asked == 3
