"""`zeroshard evaluate` and `zeroshard generate` as typed, with wrong input too."""

import json
from pathlib import Path

import pytest

from zeroshard.cli.main import main
from zeroshard.comm.mesh import Mesh
from zeroshard.train.config import TrainConfig
from zeroshard.train.options import parse
from zeroshard.train.run import run as run_job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.txt").write_text("".join(f"line {n}\n" for n in range(200)))
    words = ["--data", str(folder / "a.txt"), "--sequence", "16", "--batch-per-rank", "2", "--validation-rows", "2"]
    words += ["--sample-tokens", "0", "--steps", "2", "--out", str(folder / "runs")]
    done = run_job(parse(TrainConfig, words, "train"), Mesh())
    assert done is not None
    return done[1]


def test_numbers_are_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", str(run), "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "nats per token" in shown and "perplexity" in shown and "bits per byte" in shown
    main(["evaluate", str(run), "--data", str(run.parents[1] / "a.txt"), "--json", "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 1689 and found["step"] == 2 and f"{found['loss']:.4f}" not in shown


def test_text_is_printed_behind_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(run), "--prompt", "line", "--tokens", "5", "--device", "cpu"])
    first = capsys.readouterr().out
    assert first.startswith("line") and len(first) > 5
    main(["generate", str(run), "--prompt", "line", "--tokens", "5", "--device", "cpu"])
    assert capsys.readouterr().out == first


WRONG = [
    (["generate"], "--prompt must be given"),
    (["generate", "--prompt", ""], "prompt is empty"),
    (["generate", "--prompt", "x", "--tokens", "0"], "tokens is 0; it must be 1 or more"),
    (["generate", "--prompt", "x", "--top-k", "0"], "top-k is 0; it must be 1 or more"),
    (["generate", "--prompt", "x", "--tokenizer", "none.json"], "none.json, which does not exist"),
    (["evaluate", "--data", "none.jsonl"], "none.jsonl, which does not exist"),
    (["evaluate", "--columns", "text"], "have no effect without data"),
    (["evaluate", "--columns", "text", "--data", __file__], "columns has no effect on text"),
    (["evaluate", "--data", "https://example.org/a.jsonl"], "an address; download it"),
    (["evaluate", "--rows", "0"], "rows is 0; it must be 1 or more"),
]


@pytest.mark.parametrize("words, message", WRONG, ids=lambda value: "-".join(value) if isinstance(value, list) else "")
def test_wrong_input_gives_one_sentence(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([words[0], str(run), *words[1:]])
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["generate", "--prompt", "x"], ["evaluate"]):
        with pytest.raises(SystemExit, match="2"):
            main([*words, str(tmp_path)])
        assert "is no run folder" in capsys.readouterr().err


def test_rows_held_out_of_other_data_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run.parents[1] / "a.txt"
    kept = text.read_text()
    text.write_text(kept + "one more\n")
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(run), "--device", "cpu"])
    text.write_text(kept)
    assert "so rows that are held out now were trained on; set --data to other files" in capsys.readouterr().err
