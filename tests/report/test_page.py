import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from zeroshard.errors import ReportError
from zeroshard.plan import Plan
from zeroshard.planning.settings import flat
from zeroshard.report import write_report
from zeroshard.report.page import LIBRARY

from .run_files import memory, memory_row, summary, timelines, training_line, validation_line, write_run

VOID = {"meta", "link", "br", "img", "hr", "input"}
EVENTS = [(i / 1000, f"event {i}", (2048, 100 * i, 5000 - 50 * i)) for i in range(50)]


def without_library(html: str) -> str:
    """A page without the charting library, which names addresses in its comments and never asks for them."""
    return html.replace(resources.files("zeroshard.report").joinpath(LIBRARY).read_text(encoding="utf-8"), "")


class Page(HTMLParser):
    """Checks that tags balance and keeps the text and the attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(without_library(html))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.extend((tag, name, value or "") for name, value in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.extend((tag, name, value or "") for name, value in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def _page(run: Path) -> tuple[str, Page]:
    html = without_library(write_report(run).read_text(encoding="utf-8"))
    return html, Page(html)


def _complete(folder: Path, **fields: object) -> Path:
    lines = [training_line(step, 8 / step + 2) for step in range(1, 61)]
    return write_run(folder, [*lines, validation_line(60, 2.5)], summary(**fields), memory(EVENTS))


def test_the_page_is_balanced_html_with_all_its_parts(tmp_path: Path) -> None:
    target = write_report(_complete(tmp_path))
    assert target == tmp_path / "report.html"
    _, page = _page(tmp_path)
    assert page.open == []
    assert page.texts["h1"] == ["A small run"]
    assert page.texts["h2"] == [
        "Learning",
        "Gradient norm",
        "Speed",
        "Memory over one step",
        "Bytes per rank: formula and ledger",
        "Wire volume per step: formula and measured",
        "Commands",
        "Plan",
        "Corpus",
        "Generated sample",
    ]


def test_the_header_has_the_key_facts(tmp_path: Path) -> None:
    _, page = _page(_complete(tmp_path))
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts["Parameters"] == "1.23 M"
    assert facts["Plan"] == "ZeRO-2"
    assert facts["Ranks"] == "2"
    assert facts["Validation bits/byte"] == "2.7500"
    assert facts["Wall time"] == "1 min 15 s"
    assert facts["digest"] == "abc123"


def test_the_header_names_the_ranks_that_share_layers_and_experts(tmp_path: Path) -> None:
    plan = {"zero": 1, "tensor_parallel": {"ranks": 2}, "expert_parallel": {"ranks": 4}}
    _, page = _page(_complete(tmp_path, plan=plan))
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert (facts["Tensor parallel"], facts["Expert parallel"]) == ("2 ranks", "4 ranks")
    _, plain = _page(_complete(tmp_path, plan={"zero": 1, "expert_parallel": {"ranks": 1}}))
    assert not {"Tensor parallel", "Expert parallel"} & set(plain.texts["dt"])


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    html, page = _page(_complete(tmp_path))
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert [value for _, name, value in page.attributes if name in ("src", "href")] == ["data:,"]


def test_a_policy_forbids_the_page_every_request(tmp_path: Path) -> None:
    _, page = _page(_complete(tmp_path))
    (policy,) = [value for tag, name, value in page.attributes if (tag, name) == ("meta", "content") and "src" in value]
    assert policy.startswith("default-src 'none'") and "http" not in policy and "*" not in policy


def test_every_chart_is_an_image_with_a_label_and_data_in_json(tmp_path: Path) -> None:
    html, page = _page(_complete(tmp_path))
    labels = [
        value for tag, name, value in page.attributes if (tag, name) == ("div", "aria-label") and value.endswith(".")
    ]
    blocks = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    assert len(labels) == len(blocks) == 5  # loss, gradient norm, speed, memory, traffic
    for block in map(json.loads, blocks):
        assert block["traces"] and all(len(trace["x"]) == len(trace["y"]) for trace in block["traces"])


def test_the_sample_is_shown_escaped_and_to_the_letter(tmp_path: Path) -> None:
    sample = "if a < b & c:\n\tprint('</pre><script>alert(1)</script>')\n"
    html, page = _page(_complete(tmp_path, sample=sample))
    assert "<script>alert" not in html
    assert page.texts["pre"][-1].strip() == sample.strip()


def test_control_characters_and_lone_surrogates_do_not_break_the_page(tmp_path: Path) -> None:
    _, page = _page(_complete(tmp_path, sample="a\x00\x1b[0m\ud800b"))
    assert page.texts["pre"][-1].strip() == "a\u2400\u241b[0m?b"


def test_names_in_the_run_are_escaped_everywhere(tmp_path: Path) -> None:
    evil = "</script><b>&"
    run = _complete(tmp_path, title=evil, plan={evil: evil}, memory=[memory_row(evil, 1, 0, 1)])
    (run / "memory.json").write_text(json.dumps(memory([(0, evil, (1, 2, 3)), (1, evil, (4, 5, 6))])), encoding="utf-8")
    html, page = _page(run)
    assert evil not in html
    assert "<b>" not in html
    assert page.texts["h1"] == [evil]


def test_a_dead_run_still_has_its_page(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "try-7", [training_line(1, 8.0), training_line(2, math.nan), validation_line(2, 7.5), "{"]
    )
    _, page = _page(run)
    assert page.open == []
    assert page.texts["h1"] == ["Run try-7"]
    assert page.texts["h2"] == ["Learning", "Gradient norm", "Speed", "Commands"]
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts["Validation bits/byte"] == "7.5000"
    assert facts["Wall time"] == "1.0 s"
    assert sum("no summary.json" in text for text in page.texts["p"]) == 1


def test_a_run_of_nothing_but_lost_losses_says_so(tmp_path: Path) -> None:
    _, page = _page(write_run(tmp_path, [training_line(1, math.nan)]))
    assert "No step recorded a finite training loss." in page.texts["p"]


def test_a_hundred_thousand_steps_stay_below_a_megabyte_and_a_half(tmp_path: Path) -> None:
    # a new extreme in every bucket and every category on the move: nothing thins by luck
    lines = [training_line(step, 2 + (step * 7919 % 1000) / 1000) for step in range(1, 100_001)]
    events = [
        (i / 1e5, f"backward h.{i}", (i * 7919 % 10**8, i * 104729 % 10**8, i * 31 % 10**8)) for i in range(20_000)
    ]
    target = write_report(write_run(tmp_path, lines, summary(), memory(events)))
    assert target.stat().st_size < 1_500_000


def test_a_missing_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="give the folder"):
        write_report(tmp_path / "nowhere")


PIPELINE = {"zero": 1, "stages": 2, "schedule": "1f1b", "chunks": 1}


def _pipelined(folder: Path, **fields: object) -> Path:
    run = _complete(folder, plan=PIPELINE)
    (run / "timeline.json").write_text(json.dumps(timelines(**fields)), encoding="utf-8")  # type: ignore[arg-type]
    return run


def test_a_timeline_has_its_section_with_both_times_and_the_deviation(tmp_path: Path) -> None:
    html, page = _page(_pipelined(tmp_path))
    assert page.open == []
    assert page.texts["h2"][3] == "Timeline of one step: measured and simulated"
    caption = next(text for text in page.texts["figcaption"] if text.startswith("Measured"))
    assert "Measured 5.0 ms" in caption
    assert "4.0 ms: a deviation of −20.0 %" in caption
    (drawing,) = re.findall(r'<div class="scroll timeline".*?(<svg.*?</svg>)', html, re.DOTALL)
    assert "as measured" in drawing and "as simulated" in drawing
    assert "http:" not in html
    assert "url(" not in html


def test_a_timeline_is_written_beside_the_page(tmp_path: Path) -> None:
    run = _pipelined(tmp_path)
    write_report(run)
    assert ET.parse(run / "timeline.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((run / "timeline-trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"F0.0@0", "B0.0@0", "F1.0@0", "B1.0@0"}


def test_a_run_without_a_timeline_has_no_drawings_of_it(tmp_path: Path) -> None:
    _, page = _page(_complete(tmp_path))
    assert not any("Timeline" in heading for heading in page.texts["h2"])
    assert not list(tmp_path.glob("timeline*"))


def test_the_timeline_of_a_schedule_that_never_flushes_is_of_a_few_steps(tmp_path: Path) -> None:
    _, page = _page(_pipelined(tmp_path, version=1))
    assert page.texts["h2"][3] == "Timeline of a few steps: measured and simulated"


def test_names_in_a_timeline_are_escaped(tmp_path: Path) -> None:
    evil = "</style></svg><script>alert(1)</script>"
    spans = timelines()["timelines"][0]["spans"]
    html, page = _page(_pipelined(tmp_path, timelines=[{"name": evil, "notes": [evil], "spans": spans}]))
    assert page.open == []
    assert "<script>alert" not in html
    assert "".join(page.texts["text"]).count(evil) == 2


def test_a_cut_timeline_is_said_on_the_page(tmp_path: Path) -> None:
    run = _pipelined(tmp_path)
    (run / "timeline.json").write_text('{"measured_seconds": 1', encoding="utf-8")
    _, page = _page(run)
    assert sum(text.startswith("timeline.json cannot be read") for text in page.texts["p"]) == 1
    assert not any("Timeline" in heading for heading in page.texts["h2"])


@pytest.mark.parametrize(
    "plan, words",
    [
        (PIPELINE, "2 stages, 1f1b"),
        ({"stages": 4, "schedule": "interleaved", "chunks": 2}, "4 stages × 2 chunks, interleaved"),
        ({"stages": 3}, "3 stages"),
        ({"stages": 1, "schedule": "1f1b"}, None),
        ({"stages": "many"}, None),
        ({}, None),
    ],
)
def test_the_facts_say_stages_and_schedule(tmp_path: Path, plan: dict[str, object], words: str | None) -> None:
    _, page = _page(_complete(tmp_path, plan=plan))
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts.get("Pipeline") == words


def test_the_facts_say_how_much_of_the_arena_is_in_use(tmp_path: Path) -> None:
    use = {"nbytes": 4096, "live_bytes": 4064, "checkpoints": 3, "buffers": 1, "outside": 0}
    for outside, words in ((0, ""), (2, "; 2 lay outside")):
        _, page = _page(_complete(tmp_path / str(outside), arena={**use, "outside": outside}))
        facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
        assert facts["Checkpoint arena"] == f"4.00 KiB for 3 inputs of blocks; 99.2 % in use at once{words}"
    assert "Checkpoint arena" not in _page(_complete(tmp_path / "none"))[1].texts["dt"]


def test_what_is_offloaded_has_a_section_and_other_runs_none(tmp_path: Path) -> None:
    lines = [training_line(step, 3.0, exposed_seconds={"update": step / 1000}) for step in range(1, 9)]
    rows = [memory_row("gradients", 8, 0, 8), memory_row("gradients", 8, 4088, 4096, tier="host")]
    plan = {"zero": 3, "offload": "optimizer,activations"}
    run = write_run(tmp_path / "offloaded", lines, summary(memory=rows, plan=plan), memory(EVENTS))
    html, page = _page(run)
    assert page.open == []
    assert "Waiting for offload" in page.texts["h2"]
    assert "gradients, host" in html and "optimizer, activations" in page.texts["dd"]
    html, page = _page(_complete(tmp_path / "plain"))
    assert "Waiting for offload" not in html and "Offloaded" not in page.texts["dt"] and ", device" not in html


START = {
    "date": "2026-11-29 10:00:00+01:00",
    "hosts": ["node-1", "node-2"],
    "device": "cpu",
    "command": "zeroshard train --ranks 2 --data 'my notes'",
    "resume": "zeroshard train --ranks 2 --data 'my notes' --resume auto",
    "folder": "runs/my run",
    "python": "3.11.7",
    "zeroshard": "0.1.0",
    "torch": "2.13.0",
    "git": {"commit": "0123456789abcdef", "branch": "main", "changed": 3},
    "seed": 5,
    "ranks": 2,
}


def test_the_origin_of_a_run_is_in_the_head_and_its_commands_can_be_copied(tmp_path: Path) -> None:
    run = _complete(tmp_path)
    (run / "starts.json").write_text(json.dumps({"starts": [START, {**START, "date": "2026-11-30 09:00:00+01:00"}]}))
    (run / "checkpoints").mkdir()
    _, page = _page(run)
    versions = next(text for text in page.texts["p"] if text.startswith("2026"))
    assert versions == (
        "2026-11-29 10:00:00+01:00, resumed 1 × · node-1 and 1 more hosts · cpu · git 0123456789 on main,"
        " 3 changed files · seed 5 · zeroshard 0.1.0 · torch 2.13.0 · Python 3.11.7"
    )
    assert page.texts["h2"].count("Last start") == 1 and "1 earlier start" in page.texts["summary"]
    commands = dict(zip(page.texts["h3"], page.texts["pre"], strict=False))
    assert commands == {
        "Start": START["command"],
        "Export": "zeroshard export 'runs/my run'",
        "Report": "zeroshard report 'runs/my run'",
        "Compare": "zeroshard compare 'runs/my run' OTHER_RUN",
    }


def test_a_run_that_died_says_how_to_resume_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, [training_line(1, 8.0)])
    (run / "starts.json").write_text(json.dumps({"starts": [{**START, "git": None}]}))
    _, page = _page(run)
    assert START["resume"] in page.texts["pre"] and not any("git" in text for text in page.texts["p"])


def test_the_plan_shows_settings_that_differ_from_the_defaults_and_folds_the_rest(tmp_path: Path) -> None:
    plan = Plan(zero=3, clip_norm=1.0, offload="optimizer").as_dict()
    html, page = _page(_complete(tmp_path, plan=plan))
    shown = html.partition("<h2>Plan</h2>")[2].partition("<details>")[0]
    assert set(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown)) == {
        ("zero", "3"), ("clip norm", "1"), ("offload: parts", "optimizer"),
    }  # fmt: skip
    assert page.texts["summary"] == [f"All {len(dict(flat(plan)))} settings"]
    assert "Every setting has its default." in _page(_complete(tmp_path, plan=Plan().as_dict()))[0]


def test_memory_has_the_budget_and_all_ranks(tmp_path: Path) -> None:
    run = _complete(tmp_path, plan={"device_memory": "6KiB"}, capacity_bytes=2**34)
    (run / "memory-rank1.json").write_text(json.dumps({**memory(EVENTS), "rank": 1}))
    html, page = _page(run)
    assert "budget, 6.00 KiB" in html and "capacity of the device, 16.00 GiB" in html
    assert "All ranks" in page.texts["h3"] and '"rank 1"' in html


def test_ranks_have_a_table(tmp_path: Path) -> None:
    rank = {"host": "node-1", "peak_bytes": 2**20, "rss_bytes": 2**30, "exposed_seconds": 0.0}
    _, page = _page(_complete(tmp_path, ranks=[{**rank, "rank": n} for n in range(2)]))
    assert "Ranks" in page.texts["h2"] and page.texts["td"].count("node-1") == 2 and "1.00 MiB" in page.texts["td"]
