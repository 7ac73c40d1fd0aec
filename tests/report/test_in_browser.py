"""Every kind of report in a headless Chromium, narrow and wide, light and dark: whole, legible, quiet, and alive."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import SCREENS, Browser, started
from predictions import AT_PEAK, GIB, piped, prediction

from zeroshard.planner.predict.result import Found
from zeroshard.report import write_report
from zeroshard.report.compare_page import named_runs, write_comparison
from zeroshard.report.plan_page import write_plan
from zeroshard.report.plans_page import ListedPlan, write_plans

from .run_files import memory, memory_row, summary, timelines, training_line, validation_line, write_run
from .test_page import EVENTS, START

LAYERS = [("forward", f"blocks.{n}") for n in range(4)] + [("backward", f"blocks.{n}") for n in reversed(range(4))]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    with started() as found:
        yield found


def _run(folder: Path, rate: float, steps: int = 40) -> Path:
    """A run with every section that a report may have."""
    loads = [
        {"load": [4, 3, 2, 1], "dropped": 0.1, "entropy": 1.0},
        {"load": [1, 1, 0, 6], "dropped": 0, "entropy": 1.0},
    ]
    more = {
        "learning_rate": rate, "mfu": 0.4, "tokens_per_s": 1000.0, "experts": dict(zip("ab", loads, strict=True)),
        "exposed_seconds": {"update": 0.001, "parameters up": 0.002, "disk": 0.003},
        "ranks": {"busy_seconds": [0.1, 0.2], "rss_bytes": [2**30, 2**29], "memory_bytes": [5, 6]},
    }  # fmt: skip
    lines = [training_line(n, 8 / n + rate, **more) for n in range(1, steps + 1)]
    rank = {"host": "a-node-with-a-long-name.cluster.example", "peak_bytes": 2**20, "rss_bytes": 2**30}
    plan = {"zero": 3, "offload": {"parts": "optimizer"}, "device_memory": "6KiB", "clip_norm": 1.0}
    done = summary(
        plan=plan, ranks=[{**rank, "rank": n, "exposed_seconds": 0.5 * n} for n in range(2)], capacity_bytes=8192,
        memory=[memory_row("parameters", 2048, 0, 2048), memory_row("gradients", 1000.5, 23.5, 1024, "host")],
    )  # fmt: skip
    held = memory(EVENTS)
    for event, (phase, layer) in zip(held["events"], [place for place in LAYERS for _ in range(6)], strict=False):
        event |= {"phase": phase, "layer": layer}
    run = write_run(folder, [*lines, validation_line(steps, rate + 1)], done, held, timelines())
    (run / "memory-rank1.json").write_text(json.dumps({**memory(EVENTS), "rank": 1}))
    (run / "starts.json").write_text(json.dumps({"starts": [START, START]}))
    return run


def _prediction_pages(folder: Path) -> list[Path]:
    one, two = prediction(), piped()
    large = prediction(memory={"activations": 30 * GIB}, events=(), phases={"forward": AT_PEAK, "backward": AT_PEAK})
    listed = [
        ListedPlan(one, "zeroshard train --zero 3 --precision bf16 --microbatches 2", "zs.Plan(zero=3)", 0.34),
        ListedPlan(two, "", "zs.Plan(pipeline_parallel=zs.Pipeline(2))"),
        ListedPlan(large, "zeroshard train", "zs.Plan(zero=0)", 0.4, "It needs 30 GiB."),
    ]
    write_plans(folder / "plans.html", listed, Found((one, two), (), 42, 3.2, (), ()), "gpt2, on 8 x A100-80")
    return [folder / "plans.html", write_plan(two, folder / "plan", "gpt2, on 8 x A100-80")[0]]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [_run(folder / f"20261129-10000{n}", rate) for n, rate in enumerate((1.0, 2.0))]
    write_comparison(folder / "compare.html", named_runs(runs))
    plans, plan = _prediction_pages(folder)
    return {"run": write_report(runs[0]), "compare": folder / "compare.html", "plans": plans, "plan": plan}


@pytest.mark.parametrize("kind", ["run", "compare", "plans", "plan"])
def test_a_page_is_whole_and_legible_on_every_screen(kind: str, pages: dict[str, Path], browser: Browser) -> None:
    """No request, no error, no cut text, no overlap, contrast of text 4.5 : 1 and of lines 3 : 1."""
    browser.show(*SCREENS[0])
    assert browser.open(pages[kind]) == []
    for width, dark in SCREENS:
        browser.show(width, dark)
        browser.settle()
        assert browser.evaluate(
            "[...document.querySelectorAll('figure.chart')].every(f => !f.checkVisibility() || f.dataset.drawn)"
        )
        assert (browser.findings(), width, dark) == ([], width, dark)
    assert browser.complaints(pages[kind]) == []


def test_a_chart_zooms_turns_logarithmic_and_hides_a_series(pages: dict[str, Path], browser: Browser) -> None:
    browser.show(1280, False)
    browser.open(pages["run"])
    axis = "document.querySelector('.plot')._fullLayout.yaxis"
    assert browser.evaluate(f"{axis}.type") == "linear"
    browser.evaluate("document.querySelector('button.scale').click()")
    assert browser.evaluate(f"{axis}.type") == "log"
    browser.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [3, 9]}).then(() => 0)")
    browser.show(1280, True)  # another colour scheme keeps scale and zoom
    browser.settle()
    assert browser.evaluate(f"[{axis}.type, ...document.querySelector('.plot')._fullLayout.xaxis.range]") == [
        "log",
        3,
        9,
    ]
    browser.evaluate("document.querySelector('button.reset').click()")
    assert browser.evaluate("document.querySelector('.plot')._fullLayout.xaxis.range[1]") > 30
    x, y = browser.evaluate(
        "(() => { const b = document.querySelector('.legendtoggle').getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.evaluate("new Promise((done) => setTimeout(done, 500))")  # Plotly waits for a second click
    assert browser.evaluate("document.querySelector('.plot')._fullData[0].visible") == "legendonly"


def test_a_chart_is_saved_as_a_picture_under_the_policy_of_the_page(pages: dict[str, Path], browser: Browser) -> None:
    browser.show(1280, False)
    browser.open(pages["compare"])
    drawn = "Plotly.toImage(document.querySelector('.plot'), {format: 'png', width: 300, height: 200})"
    assert browser.evaluate(f"{drawn}.then((url) => url.slice(0, 22))") == "data:image/png;base64,"
    assert browser.complaints(pages["compare"]) == []


def test_a_menu_chooses_the_layer_whose_experts_are_shown(pages: dict[str, Path], browser: Browser) -> None:
    browser.show(1280, False)
    browser.open(pages["run"])
    shown = "document.querySelector('.shaded .plot')._fullData.map((trace) => trace.visible)"
    assert browser.evaluate(shown) == [True, False]
    browser.evaluate(
        "(() => { const menu = document.querySelector('.shaded select'); menu.value = '1';"
        " menu.dispatchEvent(new Event('change')); })()"
    )
    assert browser.evaluate(shown) == [False, True]
    browser.show(1280, True)  # another colour scheme keeps the choice
    browser.settle()
    assert browser.evaluate(shown) == [False, True]


def test_a_table_is_sorted_by_numbers(pages: dict[str, Path], browser: Browser) -> None:
    browser.show(1280, False)
    browser.open(pages["compare"])
    column = "[...document.querySelectorAll('table.sorted tbody tr')].map((row) => row.cells[2].textContent)"
    click = "document.querySelectorAll('table.sorted thead button')[2].click()"
    before = browser.evaluate(column)
    browser.evaluate(click)
    up = browser.evaluate(column)
    browser.evaluate(click)
    assert up == sorted(before, key=float) and browser.evaluate(column) == up[::-1]


def test_a_point_and_a_row_lead_to_their_plan(pages: dict[str, Path], browser: Browser) -> None:
    browser.show(1280, False)
    browser.open(pages["plans"])
    shown = "[...document.querySelectorAll('section.plan')].filter((one) => !one.hidden).map((one) => one.id)"
    assert browser.evaluate(shown) == ["plan-1"]
    browser.evaluate("document.querySelector('tr[data-plan=plan-2]').click()")
    assert browser.evaluate(shown) == ["plan-2"]
    browser.evaluate("document.querySelector('.plot').emit('plotly_click', {points: [{customdata: 'plan-3'}]})")
    browser.settle()
    assert browser.evaluate(shown) == ["plan-3"]


def test_the_probe_finds_what_it_looks_for(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><style>body{background:#fff;margin:0}</style><p style='color:#999'>pale</p>"
        "<p style='width:2000px;white-space:nowrap'>" + "wide " * 200 + "</p>"
        "<div style='width:30px;overflow:hidden;white-space:nowrap'><b>clipped text</b></div>"
        "<p style='position:absolute;top:300px'>one</p><p style='position:absolute;top:300px'>two</p>"
        "<svg><g class='scatterlayer'><path class='js-line' d='M0 9L90 40' style='stroke:#eee;fill:none'/></g></svg>"
        "<img src='http://127.0.0.1:9/a.png'><script>nothing.there</script>"
    )
    browser.show(400, False)
    complaints = browser.open(page)
    assert any(one.startswith("request: http://127.0.0.1:9") for one in complaints)
    assert any("ReferenceError" in one for one in complaints)
    findings = "\n".join(browser.findings())
    expected = (
        *("contrast 2.85 of text: pale", "cut by the window: wide", "cut by its frame <DIV >: clipped text"),
        *('overlap: "one" and "two"', "of a line: scatterlayer js-line", "pixels wide, the window 400"),
    )
    for finding in expected:
        assert finding in findings
