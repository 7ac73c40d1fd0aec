"""The page of all plans: every plan in chart, table and section, told apart by shape, with its lines to copy."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from predictions import AT_PEAK, GIB, later, piped, prediction

from zeroshard.errors import ReportError
from zeroshard.plan import Plan
from zeroshard.planner.predict.result import Found, Refusal
from zeroshard.report.plans_page import ListedPlan, plans_page, write_plans

from .test_page import Page, without_library

PHASES = {"build": {"parameters": GIB}, "forward": AT_PEAK, "backward": AT_PEAK, "update": {"parameters": 2 * GIB}}
FIRST = prediction(Plan(zero=3, precision="bf16", microbatches=2))
STAGED = replace(later(piped(), 1), events=(), phases=PHASES)
OTHER = replace(later(prediction(Plan(zero=1)), 2), optimizer="adamw8bit")
LARGE = prediction(Plan(zero=0), memory={"activations": 30 * GIB})
STATES = Refusal(Plan(zero=2), 4, "Its model states alone take 90 GiB.", "Use <zero=3>.")
FOUND = Found((FIRST, STAGED), (Refusal(LARGE.plan, 4, "a", "b", LARGE), STATES), 42, 3.2, (), (OTHER,))


def plans() -> list[ListedPlan]:
    return [
        ListedPlan(FIRST, "zeroshard train --zero 3", "zs.Plan(zero=3)", 0.34),
        ListedPlan(STAGED, "", "zs.Plan(pipeline_parallel=zs.Pipeline(2))"),
        ListedPlan(OTHER, "zeroshard train --optimizer adamw8bit", "zs.Plan(zero=1)", 0.2),
        ListedPlan(LARGE, "zeroshard train", "zs.Plan(zero=0)", 0.4, "It needs 30 GiB & more."),
    ]


@pytest.fixture(scope="module")
def html() -> str:
    return plans_page(plans(), FOUND, "net <1>, on 8 x A100-80", ("Rates: of a sheet.",))


def test_every_plan_is_in_chart_table_and_a_section_of_its_own(html: str) -> None:
    page = Page(html)
    assert page.open == []
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = [f"#plan-{number}" for number in range(1, 5)]
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert all(links.count(link) == 1 for link in wanted)
    assert all(f'"{link[1:]}"' in html for link in wanted)  # a point of the chart
    assert set(wanted) <= {f"#{one}" for one in ids}
    assert "zeroshard train --optimizer adamw8bit" in page.texts["pre"]
    assert any(text.startswith("Its model states alone take 90 GiB. Use <zero=3>.") for text in page.texts["td"])
    notes = page.texts["p"]
    assert (
        "It needs 30 GiB & more." in notes and "Rates: of a sheet." in notes and "Looked at 42 plans in 3 s." in notes
    )
    assert any(note.startswith("Plan 1 is first because it has the most tokens/s") for note in notes)


def test_the_page_loads_nothing(html: str) -> None:
    loaded = {"src", "srcset", "data", "action", "poster"}
    assert not [attribute for attribute in Page(html).attributes if attribute[1] in loaded]
    assert not re.findall(r"https?://(?!www\.w3\.org)|@import|url\(", without_library(html))


def test_columns_are_sorted_by_numbers_in_bytes_and_seconds(html: str) -> None:
    body = html.partition('<table class="plans sorted">')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [re.findall(r'data-value="([^"]*)"', row) for row in body.split("</tr>")[:-1]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert [row[1] for row in rows] == ["0", "0", "0", "1"]  # fits first
    assert [float(row[2]) for row in rows] == [one.prediction.peak_bytes for one in plans()]
    assert [float(row[4]) for row in rows] == [one.prediction.seconds for one in plans()]
    assert [len(row) for row in rows] == [8, 7, 8, 8]  # the second has no utilization
    results = [re.findall(r"<td>([^<]*)</td>", row)[-1] for row in body.split("</tr>")[:-1]]
    assert results == ["unchanged", "unchanged", "adamw8bit", "unchanged"]  # sorted by their text
    heads = html.partition('<table class="plans sorted">')[2].partition("</thead>")[0]
    assert heads.count('aria-sort="ascending"') == 1 and heads.count("<th ") == 10


def test_a_section_has_the_curve_or_the_phases_and_the_timeline_of_stages(html: str) -> None:
    first, staged, *_ = html.split('<section class="plan"')[1:]
    assert "Memory over one step" in first and "Timeline of one step" not in first
    assert "Memory by phase of the step" in staged and "Timeline of one step" in staged
    assert "--explain 2" in staged and "--explain" not in first
    assert json.dumps([*PHASES]) in staged
    assert "34%" in first and "MFU" not in staged and "3.6" in first


def test_without_a_plan_that_fits_there_are_ways() -> None:
    found = Found((), (Refusal(LARGE.plan, 4, "a", "b", LARGE), STATES), 2, 1.0, ("192 GiB of host memory.",))
    html = plans_page(plans()[3:], found, "net")
    assert "No plan fits." in html and "A way: 192 GiB of host memory." in html
    assert "recommended" not in without_library(html) and 'class="first"' not in html
    nothing = plans_page([], Found((), (STATES,), 1, 1.0), "net")
    assert Page(nothing).open == [] and "Memory against time" not in nothing and "Refused without" in nothing


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_plans(tmp_path / "plans.html", plans(), FOUND, "net")
    assert (tmp_path / "plans.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ReportError, match="cannot be written"):
        write_plans(tmp_path / "none" / "plans.html", plans(), FOUND, "net")
