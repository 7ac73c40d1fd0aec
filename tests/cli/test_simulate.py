"""`zeroshard simulate`: figures, files, and what it refuses."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zeroshard.cli.main import main
from zeroshard.pipeline.partition.profile import LayerCost, Profile


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def simulated(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["simulate", *words.split(), "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *words.split()])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert list(Path().iterdir()) == []
    return captured.err


def layer(forward: float, backward: float, nbytes: int) -> LayerCost:
    return LayerCost("layer", forward, backward, nbytes, 10 * nbytes, 100 * nbytes)


def profile(*layers: LayerCost) -> str:
    Profile("a model", "a machine", 4, layers).save(Path("profile.json"))
    return "--profile profile.json"


def test_interleaved_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = simulated("--schedule interleaved --stages 4 --virtual-stages 2 --microbatches 8", capsys)
    assert facts["bubble_over_ideal"] == pytest.approx(3 / (2 * 8))
    assert facts["bubble_fraction"] == pytest.approx(3 / 19)
    assert facts["step_seconds"] == facts["makespan_seconds"] == pytest.approx(28.5e-3)
    assert facts["peak_in_flight"] == [5.5, 4.5, 3.5, 2.5]  # (2(d - 1 - s) + (v - 1)d + 1) / v
    assert facts["weight_versions"] == [1, 1, 1, 1]
    assert facts["busy_seconds"] == pytest.approx([24e-3] * 4)
    assert facts["idle_seconds"] == pytest.approx([4.5e-3] * 4)
    assert facts["window_idle_seconds"] == pytest.approx([4.5e-3, 3e-3, 1.5e-3, 0], abs=1e-9)
    assert "steady_bubble_fraction" not in facts


@pytest.mark.parametrize("name", ["1f1b", "pipedream-flush"])
def test_both_names_of_1f1b(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = simulated(f"--schedule {name} --microbatches 6 --forward-ms 3 --backward-ms 3", capsys)
    assert facts["schedule"] == name
    assert facts["bubble_fraction"] == pytest.approx(3 / 9)
    assert facts["peak_in_flight"] == [4, 3, 2, 1]
    assert facts["step_seconds"] == pytest.approx(9 * 6e-3)


def test_a_stream_says_what_it_does_between_fill_and_drain(capsys: pytest.CaptureFixture[str]) -> None:
    facts = simulated("--schedule pipedream", capsys)
    assert facts["steps"] == 4
    assert facts["weight_versions"] == [4, 3, 2, 1]
    assert facts["step_seconds"] == pytest.approx(8 * 3e-3)
    assert facts["steady_microbatch_seconds"] == pytest.approx(3e-3)
    assert facts["steady_bubble_fraction"] == pytest.approx(0, abs=1e-9)
    assert facts["makespan_seconds"] == pytest.approx((4 * 8 + 3) * 3e-3)
    assert simulated("--schedule pipedream --vertical-sync", capsys)["weight_versions"] == [4, 4, 4, 4]
    assert simulated("--schedule 2bw --steps 3", capsys)["weight_versions"] == [2, 2, 2, 2]


def test_replicas_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    facts = simulated("--schedule pipedream --replicas 2,1", capsys)
    assert facts["stages"] == 2
    assert facts["stage"] == [0, 0, 1]
    assert facts["replicas"] == [2, 1]
    facts = simulated("--stages 2 --replicas 2", capsys)
    assert facts["stage"] == [0, 0, 1, 1]
    assert facts["bubble_fraction"] == pytest.approx(1 / 9)


def test_parts_of_the_backward_may_be_given_in_any_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    # idle (d - 1)(tF + tI - tW) = 1 + 2 - 1
    for words in (
        "--backward-ms 3 --input-gradient-ms 2",
        "--backward-ms 3 --weight-gradient-ms 1",
        "--input-gradient-ms 2 --weight-gradient-ms 1",
    ):
        facts = simulated(f"--schedule zb-h1 --stages 2 {words}", capsys)
        assert facts["idle_seconds"] == pytest.approx([2e-3] * 2)


def test_links(capsys: pytest.CaptureFixture[str]) -> None:
    # 1 MB at 8 gigabits per second is 1 ms, and half a millisecond on the way; twice
    facts = simulated("--stages 2 --microbatches 1 --link-gbps 8 --boundary-mb 1 --latency-us 500", capsys)
    assert facts["step_seconds"] == pytest.approx(6e-3 + 2 * 1.5e-3)


def test_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    facts = simulated("--schedule gpipe --stages 2 --microbatches 2 --recompute", capsys)
    assert facts["busy_seconds"] == pytest.approx([8e-3] * 2)


def test_a_profile_is_cut_into_chunks_of_equal_time(capsys: pytest.CaptureFixture[str]) -> None:
    layers = [layer(1.0, 2.0, 1), layer(1.0, 2.0, 2), layer(2.0, 4.0, 4), layer(1.0, 1.0, 8)]
    facts = simulated(f"--stages 2 --microbatches 4 {profile(*layers)}", capsys)
    assert facts["first_layers"] == [0, 2]
    assert facts["busy_seconds"] == [4 * 6, 4 * 8]
    assert facts["peak_in_flight"] == [2, 1]
    assert facts["activation_bytes"] == [2 * 30, 120]
    assert facts["weight_bytes"] == [300, 1200]
    again = simulated(f"--stages 2 --microbatches 4 --recompute {profile(*layers)}", capsys)
    # the first layers' input is not a boundary; the second stage keeps one of 2 bytes
    assert again["activation_bytes"] == [30, 2 + 120]
    stashed = simulated(f"--schedule pipedream --stages 2 {profile(*layers)}", capsys)
    assert stashed["weight_bytes"] == [2 * 300, 1200]
    main(["simulate", "--stages", "2", *profile(*layers).split()])
    table = capsys.readouterr().out
    assert "300 B" in table
    assert "1.17 KiB" in table


def test_files_are_written_where_an_option_asks_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated("", capsys)["files"] == {}
    main(["simulate"])
    assert "add --svg FILE" in capsys.readouterr().out
    assert list(Path().iterdir()) == []
    facts = simulated("--out .", capsys)
    assert facts["files"] == {"svg": "timeline-1f1b.svg", "trace": "timeline-1f1b.json"}
    assert sorted(path.name for path in Path().iterdir()) == ["timeline-1f1b.json", "timeline-1f1b.svg"]
    assert ET.parse("timeline-1f1b.svg").getroot().tag.endswith("svg")
    assert len(json.loads(Path("timeline-1f1b.json").read_text())["traceEvents"]) > 64


def test_only_the_named_files_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated("--png a.png", capsys)["files"] == {"png": "a.png"}
    assert [path.name for path in Path().iterdir()] == ["a.png"]
    with Image.open("a.png") as image:
        assert image.width > image.height
    files = simulated("--out new/folder --schedule gpipe", capsys)["files"]
    assert files == {"svg": "new/folder/timeline-gpipe.svg", "trace": "new/folder/timeline-gpipe.json"}
    assert all(Path(file).is_file() for file in files.values())


def test_the_table_has_a_line_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--schedule", "pipedream", "--stages", "3", "--svg", "timeline-pipedream.svg"])
    out = capsys.readouterr().out
    assert "pipedream: 3 stages, 8 microbatches" in out
    assert re.findall(r"^ +(\d) +\d ", out, re.MULTILINE) == ["0", "1", "2"]
    assert "24 ms in steady state, where 0.00% is bubble" in out
    assert "Wrote timeline-pipedream.svg" in out


def test_all_schedules_in_one_picture(capsys: pytest.CaptureFixture[str]) -> None:
    facts = simulated("--all --out .", capsys)
    bubbles = {one["schedule"]: one["bubble_over_ideal"] for one in facts["schedules"]}
    assert list(bubbles) == ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw"]
    assert bubbles["1f1b"] == pytest.approx(2 * bubbles["interleaved"]) == pytest.approx(3 / 8)
    names = [text.text for text in ET.parse(facts["files"]["svg"]).iter() if text.tag.endswith("text")]
    assert names[0] == "All schedules, 4 stages, 8 microbatches"
    assert {"1f1b (PipeDream-flush)", "interleaved, 2 chunks per stage"} < set(names)
    main(["simulate", "--all"])
    table = capsys.readouterr().out
    assert "interleaved, v = 2" in table
    assert "18.75%" in table


@pytest.mark.parametrize(
    "words, part",
    [
        ("--schedule interleaved --virtual-stages 2 --microbatches 6", "make --microbatches a multiple of 4"),
        ("--schedule dualpipe", "no schedule 'dualpipe'"),
        ("--schedule gpip --steps 2", "no schedule 'gpip'"),
        ("--virtual-stages 2", "use --schedule interleaved, or --virtual-stages 1"),
        ("--schedule interleaved --chunks 2", "no option --chunks here; use --virtual-stages 2."),
        ("--pipeline-parallel 4", "no option --pipeline-parallel here; use --stages 4."),
        ("--pp=4", "no option --pp here; use --stages 4."),
        ("--pipeline-parallel.schedule gpipe", "use --schedule gpipe."),
        (
            "--pipeline-parallel.replicas 2 1",
            "use --replicas, one number for all stages, or one for each, such as 2,1.",
        ),
        ("--stages 0", "stages is 0; it must be 1 or more"),
        ("--stages -1", "stages is -1; it must be 1 or more"),
        ("--virtual-stages 0", "--virtual-stages is 0; it must be 1 or more"),
        ("--microbatches 0", "--microbatches is 0"),
        ("--forward-ms -1", "--forward-ms is -1.0"),
        ("--backward-ms nan", "--backward-ms is nan"),
        ("--latency-us inf", "--latency-us is inf"),
        ("--link-gbps 0", "so no message would arrive"),
        ("--backward-ms 1 --input-gradient-ms 2", "no longer than the whole"),
        ("--backward-ms 4 --input-gradient-ms 1 --weight-gradient-ms 1", "1 and 1 ms and the whole 4 ms"),
        ("--replicas two", "replicas is 'two'"),
        ("--replicas 2,0", "each number must be 1 or more"),
        ("--replicas 2,1 --stages 3", "--replicas 2,1 is for 2 stages and --stages is 3"),
        ("--schedule gpipe --replicas 2,1", "equally many replicas"),
        ("--steps 2", "flushes after every step"),
        ("--schedule pipedream --steps 0", "steps is 0"),
        ("--schedule 2bw --vertical-sync", "no vertical sync"),
        ("--schedule 2bw --microbatches 3", "microbatches is 3"),
        ("--profile nowhere.json", "nowhere.json cannot be read"),
        ("--profile nowhere.json --forward-ms 1", "--forward-ms 1.0 and --profile nowhere.json both give"),
        ("--svg nowhere/a.svg", "nowhere/a.svg cannot be written"),
        ("--microbatches 1000000", "500,000 are simulated at most; set --microbatches to 62500 or less"),
        ("--schedule pipedream --steps 999999999", "set --steps to"),
        ("--schedule interleaved --virtual-stages 999999999", "set --virtual-stages to"),
        ("--stages 999999999", "--stages 999999999 with --replicas 1 make 999,999,999 ranks, and 1,024 are simulated"),
        ("--replicas 999999999", "1,024 are simulated at most"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(words, capsys)
    assert part in message
    assert message.startswith(("zeroshard: ", "zeroshard simulate: "))
    assert message.count("\n") == 1


def test_more_stages_than_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = profile(layer(1.0, 1.0, 1), layer(1.0, 1.0, 1))
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--stages", "3", *words.split()])
    assert "2 layers do not make 3 parts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "code",
    [
        "import zeroshard.cli.simulate",
        "import zeroshard.report.timeline_png, zeroshard.report.timeline_trace",
        "from zeroshard.cli.main import main; main(['simulate', '--json'])",
        "import zeroshard; dir(zeroshard); zeroshard.__version__; zeroshard.ZeroshardError",
    ],
)
def test_simulating_does_not_load_torch(code: str) -> None:
    check = "import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True, stdout=subprocess.DEVNULL)


def test_modules_can_be_named_without_an_import_of_their_own() -> None:
    subprocess.run(
        [sys.executable, "-c", "import zeroshard as zs; zs.schedule.Layout, zs.errors.PlanError"], check=True
    )


def test_the_public_names_load_torch_when_they_are_used() -> None:
    code = (
        "import sys, zeroshard as zs; assert set(zs.__all__) <= set(dir(zs)); assert 'torch' not in sys.modules; "
        "from zeroshard import Engine; assert zs.Engine is Engine; assert all(getattr(zs, n) for n in zs.__all__); "
        "assert 'torch' in sys.modules; assert not hasattr(zs, 'Motor') and not hasattr(zs, '__wrapped__')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
