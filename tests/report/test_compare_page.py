"""Several runs on one page: curves, results, differing settings."""

import json
import re
from pathlib import Path

import pytest

from zeroshard.errors import ReportError
from zeroshard.report.compare_page import curves, named_runs, results_table, settings_table, write_comparison

from .run_files import memory, summary, training_line, validation_line, write_run
from .test_page import Page, without_library


def _run(folder: Path, rate: float, steps: int = 30, **fields: object) -> Path:
    lines = [training_line(n, 8 / n + rate, learning_rate=rate, tokens_per_s=100 + n) for n in range(1, steps + 1)]
    events = [(0.0, "start", (1024, 0, 0)), (0.001, "save", (1024, 1024, int(1024 * rate)))]
    run = write_run(folder, [*lines, validation_line(steps, rate + 1)], summary(**fields), memory(events))
    (run / "config.toml").write_text(f'learning_rate = {rate}\nout = "{folder.name}"\nmodel = "tiny"\n')
    return run


def test_runs_are_named_by_the_shortest_ends_that_differ(tmp_path: Path) -> None:
    one, two = _run(tmp_path / "a" / "run", 1.0), _run(tmp_path / "b" / "run", 2.0)
    assert [run.name for run in named_runs([one, two])] == ["a/run", "b/run"]
    other = _run(tmp_path / "b" / "other", 2.0)
    assert [run.name for run in named_runs([one, other])] == ["run", "other"]
    with pytest.raises(ReportError, match="given twice"):
        named_runs([one, tmp_path / "a" / ".." / "a" / "run"])


def test_curves_lie_over_one_another_in_colours_of_the_runs(tmp_path: Path) -> None:
    runs = named_runs([_run(tmp_path / "a", 1.0), _run(tmp_path / "b", 2.0, steps=10)])
    found = dict(curves(runs))
    titles = ["Loss over steps", "Loss over time", "Learning rate", "Gradient norm", "Speed", "Memory over one step"]
    assert list(found) == titles
    for title in titles[2:]:
        traces = found[title].traces
        assert [(t["name"], t["line"]["color"]) for t in traces] == [("a", "var(--hue0)"), ("b", "var(--hue1)")]
    assert [t["y"][0] for t in found["Learning rate"].traces] == [1, 2]
    assert found["Loss over time"].traces[0]["x"][-1] == 15
    assert [max(t["y"]) for t in found["Memory over one step"].traces] == [3, 4]  # KiB
    validation = [t for t in found["Loss over steps"].traces if t["mode"] == "markers"]
    assert [(t["x"], t["y"], t["legendgroup"]) for t in validation] == [([30], [2], "a"), ([10], [3], "b")]


def test_results_have_a_row_for_each_run(tmp_path: Path) -> None:
    done = _run(tmp_path / "a", 1.0)
    died = write_run(tmp_path / "b", [training_line(1, 8.0), training_line(2, 6.0)])
    table = results_table(named_runs([done, died]))
    first, second = ([cell.text for cell in row.cells] for row in table.rows)
    assert first == ["30", "2.5000", "2.0000", "2.0000", "116", "–", "3.00 KiB", "1 min 15 s", "2"]
    assert second == ["2", "7.0000", "–", "–", "100", "–", "–", "1.0 s", "–"]
    assert [row.style for row in table.rows] == ["hue0", "hue1"]


def test_only_differing_settings_are_listed(tmp_path: Path) -> None:
    one = _run(tmp_path / "a", 1.0, plan={"zero": 1, "precision": "bf16"})
    two = _run(tmp_path / "b", 2.0, plan={"zero": 2, "precision": "bf16"})
    table = settings_table(named_runs([one, two]))
    assert table is not None and table.heads == ("Setting", "a", "b")
    rows = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    assert rows == {"learning_rate": ["1.0", "2.0"], "zero": ["1", "2"]}
    same = settings_table(named_runs([one, _run(tmp_path / "c", 1.0, plan={"zero": 1, "precision": "bf16"})]))
    assert same is None


def test_hosts_and_git_states_are_settings_too(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, 1.0) for name in ("a", "b")]
    for run, host in zip(runs, ("x", "y"), strict=True):
        start = {"hosts": [host], "git": {"commit": host * 40, "branch": "main", "changed": 0}}
        (run / "starts.json").write_text(json.dumps({"starts": [start]}))
    table = settings_table(named_runs(runs))
    assert table is not None
    assert {row.name: [cell.text for cell in row.cells] for row in table.rows} == {
        "host": ["x", "y"], "git": [f"git {host * 10} on main" for host in "xy"],
    }  # fmt: skip


def test_the_page_is_balanced_and_escaped(tmp_path: Path) -> None:
    evil = "<b>&"
    target = tmp_path / "compare.html"
    write_comparison(target, named_runs([_run(tmp_path / evil, 1.0), _run(tmp_path / "b", 2.0)]))
    html = without_library(target.read_text())
    page = Page(html)
    assert page.open == [] and evil not in html and page.texts["h1"] == ["2 runs compared"]
    assert not re.findall(r"https?://|@import|url\(", html)
    assert target.stat().st_size < 1_500_000
    with pytest.raises(ReportError, match="--out"):
        write_comparison(tmp_path / "none" / "compare.html", named_runs([tmp_path / "b", tmp_path / evil]))
