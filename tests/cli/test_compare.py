"""`zeroshard compare`: two tables and a page, and the mistakes that one can make."""

from pathlib import Path

import pytest
from report.run_files import summary, training_line, write_run

from zeroshard.cli.compare import run_compare
from zeroshard.errors import ReportError


def _run(folder: Path, zero: int) -> str:
    return str(write_run(folder, [training_line(1, 8.0), training_line(2, 7.0)], summary(plan={"zero": zero})))


def test_tables_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    run_compare([*(_run(tmp_path / name, zero) for name, zero in (("one", 1), ("two", 2))), "--out", str(target)])
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["one", "two"] in rows and ["zero", "1", "2"] in rows and ["Tokens/s", "100", "100"] in rows
    assert said.endswith(f"Wrote {target}\n") and "2 runs compared" in target.read_text()


@pytest.mark.parametrize(
    ("runs", "said"), [([], "RUNS must be given"), (["one"], "1 run folder is named; name two or more")]
)
def test_two_runs_are_needed(runs: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_compare(runs)
    assert left.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nowhere is not there: give the folder"):
        run_compare([_run(tmp_path / "one", 1), str(tmp_path / "nowhere")])


def test_an_option_may_stand_before_and_between_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two, three = (_run(tmp_path / name, 1) for name in ("one", "two", "three"))
    run_compare([one, "--out", "a.html", two, three])
    run_compare(["--out=b.html", one, two])
    assert "3 runs compared" in Path("a.html").read_text() and "2 runs compared" in Path("b.html").read_text()
