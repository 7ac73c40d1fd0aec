"""`zeroshard plan` as a person calls it."""

import ast
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from predictions import GIB, later, piped, prediction, refusal
from rich.console import Console
from rich.spinner import Spinner

from zeroshard.cli import plan as plan_command
from zeroshard.cli.plan import described_task, run_plan
from zeroshard.cli.plan_options import PlanOptions, described_machines, read_question
from zeroshard.errors import ConfigError, ModelError, PlanError, ReportError, ZeroshardError
from zeroshard.plan import Plan
from zeroshard.planner.predict.result import Found, Refusal
from zeroshard.planner.search.largest import Largest, Member
from zeroshard.report.plan_page import write_plan
from zeroshard.report.plan_text import memory_picture, timeline_picture
from zeroshard.train.config import TrainConfig
from zeroshard.train.planning import beside_spinner
from zeroshard.train.toml_config import load_toml
from zeroshard.zero.byte_formulas import state_bytes

MINE = """
import torch
from torch import nn
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import SIZES

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 1)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.b(torch.relu(self.a(x))), y)

def asks():
    net = Net()
    assert float(net.a.weight.sum()) < 1e6
    return net

def batch(rows):
    return {"x": torch.zeros(rows, 64), "y": torch.zeros(rows, 1)}

def gpt():
    return GPT(SIZES["tiny"])

def three():
    return 3

def fails():
    raise KeyError("what")

def broken(rows):
    return {"x": None, "y": None}

def frozen():
    return nn.Linear(1, 1).requires_grad_(False)

class Lossless(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
    def forward(self, x, y):
        return super().forward(x)

number = 3
made = nn.Linear(1, 1)

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
"""
BEST = (
    prediction(Plan(zero=3, precision="bf16", microbatches=2, clip_norm=1.0)),
    later(piped(), 1),
    later(prediction(Plan(zero=1, units=("Block",)), mode="shallow-real", time_mode="shallow-real"), 2),
)
REFUSED = (
    *(refusal(Plan(zero=zero), needs) for zero, needs in ((0, "80.12 GiB"), (1, "70.00 GiB"))),
    Refusal(Plan(pipeline_parallel=4), 4, "12 rows [of a step] do not divide among 5 lanes.", "Use 15."),
)
FOUND = Found(BEST, REFUSED, 42, 3.2)
ON_A100 = ("--gpu", "A100-80", "--gpus", "8")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's."""
    name = "mine_" + "".join(c for c in tmp_path.name if c.isalnum())
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints when the search finds what was made by hand."""

    def run(*words: str, found: Found = FOUND) -> str:
        monkeypatch.setattr(plan_command, "search_once", lambda *_, **__: found)
        run_plan(*read_question([*ON_A100, *words], {}))
        return capsys.readouterr().out

    return run


def test_configurations_of_frozen_weights_in_few_bits_are_planned_as_qlora_alone(tmp_path: Path) -> None:
    table = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(table))
    words = ["--gpu", "A100-80", "--model", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"quantised by bitsandbytes.*--adapters qlora"):
        read_question(words, {})
    options, _ = read_question([*words, "--adapters", "qlora"], {})
    assert options.adapters == "qlora"


def test_the_table_names_plans_numbers_and_ways(read: Callable[..., str]) -> None:
    text = read()
    lines = text.splitlines()
    assert lines[0] == "tiny, 32 rows of 256 tokens per step, on 8 x A100-80 (80.00 GiB)"
    cells = next(line for line in lines if line.startswith("1  zero 3"))
    assert cells.split("  ")[1] == "zero 3, bf16, 2 microbatches, 4 rows"
    assert cells.split()[-7:] == ["yes", "15.00", "420", "ms", "78,019", "compute", "rates"]
    row = ["1", "0", "3.00", "2.00", "1.00", "2.00", "6.00", "0.50", "0.50", "15.00", "engine"]
    assert row in [line.split() for line in lines]
    assert "Memory, engine: " in text and "Memory, layers: " in text and "Time, rates: " in text
    assert not any(word in text for word in ("fake", "roofline", "temp."))
    assert "of 20.00: GiB of a device that tensors can use" in text
    assert "Plan 1 is first because it has the most tokens/s: 78,019, " in text
    assert "Rates: NVIDIA A100 datasheet" in text and "are assumed" in text
    assert "Looked at 42 plans in 3 s." in text


def test_refusals_stand_together_with_reason_and_way_out(read: Callable[..., str]) -> None:
    text = " ".join(read().split())
    assert "Refused: 3 of 42 plans" in text
    assert "zero 0, fp32 For the first: Rank 0 needs 80.12 GiB of 20.00 GiB." in text
    assert "70.00 GiB" not in text
    assert "12 rows [of a step] do not divide among 5 lanes. Use 15." in text


def test_without_a_plan_that_fits_it_says_so_and_fails(
    read: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(found=Found((), REFUSED, 3, 1.0))
    assert ended.value.code == 1
    assert "No plan fits." in capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_no_width_cuts_anything(columns: int, read: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "FILE_COLUMNS", columns)
    text = read("--explain", "2")
    assert "…" not in text
    assert all(len(line) <= columns for line in text.splitlines() if not line.startswith(("Wrote", "  z")))


def test_json_holds_everything(read: Callable[..., str]) -> None:
    content: dict[str, Any] = json.loads(read("--json", "--explain", "2", "--out", "best.toml"))
    assert [plan["peak_bytes"] for plan in content["plans"]] == [15 * GIB] * 3
    assert content["plans"][0]["plan"]["zero"] == 3
    assert Plan.from_dict(content["plans"][1]["plan"]) == BEST[1].plan
    assert [refused["why"] for refused in content["refused"]] == [refused.why for refused in REFUSED]
    assert (content["looked_at"], content["global_batch"], content["sequence"]) == (42, 32, 256)
    assert all(Path(file).exists() for file in content["files"]) and len(content["files"]) == 5


@pytest.mark.parametrize("number", [1, 2, 3])
def test_train_takes_the_file_of_a_plan(read: Callable[..., str], number: int) -> None:
    assert "Wrote plan.toml" in read("--write", str(number), "plan.toml", "--optimizer", "sgd")
    config = load_toml(Path("plan.toml"), TrainConfig)
    assert config.plan == BEST[number - 1].plan
    assert (config.model, config.sequence, config.batch_per_rank, config.optimizer) == ("tiny", 256, 4, "sgd")
    assert config.ranks == BEST[number - 1].ranks


def test_explained_is_memory_timeline_wire_and_time(read: Callable[..., str]) -> None:
    text = read("--explain", "2", "--pictures", "drawn")
    for words in ("Memory over one step of rank 0", "rank 1  ·", "gather parameters  4.00 GiB  67%", "bubble"):
        assert words in text
    files = [Path(line.removeprefix("Wrote ")) for line in text.splitlines() if line.startswith("Wrote")]
    assert {file.name for file in files} == {
        "tiny-2.html",
        *(f"tiny-2-timeline.{end}" for end in ("svg", "png", "json")),
    }
    page = (Path("drawn") / "tiny-2.html").read_text()
    for words in (
        "Memory over one step",
        "Timeline of one step",
        "reduce gradients",
        "Bytes on this rank",
        "activations",
    ):
        assert words in page
    assert "default-src 'none'" in page  # a policy that forbids every request


def test_explained_is_how_layers_are_split(read: Callable[..., str]) -> None:
    split = Found((replace(BEST[0], plan=Plan(tensor_parallel=2, precision="bf16")),), (), 1, 1.0)
    text = " ".join(read("--explain", "1", found=split).split())
    assert "Layers on 2 ranks of tensor parallelism" in text
    assert "blocks.*.attention.query_key_value 5x Linear column 192 of 384 1 of 2 heads" in text
    assert "blocks.0 to blocks.4 work on parts of sequences between their split layers." in text
    content: dict[str, Any] = json.loads(read("--json", "--explain", "1", found=split))
    rows = {row["name"]: row for row in content["layers"]}
    assert (rows["head"]["style"], rows["norm"]["reason"]) == ("output", "a norm, which needs all features")
    assert content["sequences"] == ["blocks.0 to blocks.4 work on parts of sequences between their split layers."]
    assert json.loads(read("--json", "--explain", "1"))["layers"] is None


def test_a_plan_of_few_blocks_is_rehearsed_whole_to_be_explained(
    read: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(plan_command, "predict", lambda *given, **more: asked.append((given, more)) or BEST[0])
    bare = replace(BEST[0], events=())
    assert "Memory over one step" in read("--explain", "2", found=Found((BEST[1], bare), (), 2, 1.0))
    (((_, plan, machines, rows), more),) = asked
    assert (plan, machines.count, rows, more) == (bare.plan, 8, 4, {"deep": True})


def test_the_page_has_all_plans_and_curves_of_the_first(
    read: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Plan] = []
    whole = replace(BEST[0], causes={"compute": 9.0})
    monkeypatch.setattr(plan_command, "predict", lambda task, plan, *_, **__: asked.append(plan) or whole)
    monkeypatch.setattr(plan_command, "CURVES", 11)  # the model has 5 blocks
    bare = [replace(one, events=()) for one in BEST]
    large = prediction(Plan(), memory={"activations": 30 * GIB})
    refused = (Refusal(large.plan, 4, "It needs more.", "Buy more.", large), *REFUSED)
    found = Found((*bare[:2], BEST[2]), refused, 9, 1.0, (), (BEST[2],))
    assert "Wrote plans.html" in read("--html", "plans.html", found=found)
    page = Path("plans.html").read_text()
    assert asked == [bare[0].plan]  # the second is too large beside it, the third has its curve
    assert [f'id="plan-{n}"' in page for n in range(1, 7)] == [True] * 5 + [False]
    assert "420 ms" in page and "9.00 s" not in page  # the time is that of the search
    assert "zeroshard train --model tiny" in page and "zs.Plan(zero=3" in page and "It needs more. Buy more." in page


def test_the_picture_of_memory_has_its_shape() -> None:
    p = prediction(capacity_bytes=100 * GIB)
    rows = memory_picture(p, 61, colour=False).plain.splitlines()
    heights = [sum(row[column] not in " ▔" for row in rows[:12]) for column in range(11, 61)]
    # 8, 6 + 3, 15 and 9 GiB of 15, as twelve rows, a quarter of the step each
    assert [heights[i] for i in (2, 14, 30, 45)] == [6, 7, 12, 7]
    assert rows[0].startswith("15.00 GiB") and rows[13].endswith("400 ms")
    assert "capacity of the device" not in "".join(rows)
    near = memory_picture(prediction(), 61, colour=False).plain.splitlines()
    assert near[0].count("▔") == 51 and near[-1].endswith("capacity of the device for tensors, 20.00 GiB")


def test_colours_draw_parts_of_a_row() -> None:
    console = Console(color_system="truecolor", width=61, force_terminal=True)
    with console.capture() as captured:
        console.print(memory_picture(prediction(capacity_bytes=100 * GIB), 61, colour=True))
    assert "\x1b[" in captured.get() and any(part in captured.get() for part in "▁▂▃▄▅▆▇")


def test_the_picture_of_time_says_who_does_what() -> None:
    first, second, *_ = timeline_picture(piped().spans, 68).plain.splitlines()
    assert first.startswith("rank 0  F0──F1──········B0──────") and second.startswith("rank 1  ····F0──B0──────")
    assert len(first) == len(second) == 68
    many = timeline_picture(piped().spans * 10, 68).plain
    assert "rank 15" in many and "rank 16" not in many and "and 4 more ranks" in many


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        write_plan(prediction(), tmp_path / "file" / "plan", "title")


def test_a_plan_of_an_own_model_is_found_by_rehearsal(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", f"{mine}:Net", "--batch-of", f"{mine}:batch", "--gpu", "A100-80", "--global-batch", "1"]
    run_plan(*read_question([*words, "--json", "--out", "own.toml"], {}))
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    parameters = 64 * 256 + 256 + 256 + 1
    assert found["fits"] and found["memory"]["parameters"] >= 2 * parameters
    assert found["memory"]["optimizer states"] >= 8 * parameters
    assert found["capacity_bytes"] == 79 * GIB
    assert Plan.from_dict(tomllib.loads(Path("own.toml").read_text())) == Plan.from_dict(found["plan"])


def test_an_own_language_model_needs_no_batches(mine: str) -> None:
    task, _ = described_task(PlanOptions(model=f"{mine}:gpt", global_batch=2, sequence=7), 1)
    shapes = {name: tuple(part.shape) for name, part in task.batch(2).items()}
    assert shapes == {"tokens": (2, 7), "targets": (2, 7)}
    assert next(task.build().parameters()).is_meta


@pytest.mark.parametrize(
    "function, complaint",
    [
        ("three", "returned int; it must return an nn.Module"),
        ("fails", "KeyError: 'what'"),
        ("asks", "it must build the model without asking for values"),
        ("number", "is int; it must be a class or a function"),
        ("nothing", "has no attribute 'nothing'"),
        ("Wide", "needs the arguments width; name a function without"),
        ("made", "is a module that is already made"),
        ("frozen", "has no parameter to train"),
    ],
)
def test_own_models_that_cannot_be(mine: str, function: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        described_task(PlanOptions(model=f"{mine}:{function}"), 1)


def test_own_models_whose_steps_fail_end_in_a_sentence(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "A100-80", "--fresh", "--batch-of"]
    with pytest.raises(ModelError, match=r"a step of mine.*:Net failed in a rehearsal \(TypeError: .*; else mend"):
        run_plan(*read_question(["--model", f"{mine}:Net", *words, f"{mine}:broken"], {}))
    with pytest.raises(SystemExit):
        run_plan(*read_question(["--model", f"{mine}:Lossless", *words, f"{mine}:batch"], {}))
    shown = " ".join(capsys.readouterr().out.split())
    assert "The model returned a Tensor of shape" in shown and "nearest ways" not in shown


def test_a_file_is_a_model_and_its_batches(mine: str) -> None:
    batch = MINE.partition("    return net\n")[2].partition("def gpt")[0]
    Path("one.py").write_text(MINE.partition("def asks")[0] + batch)
    for spelt in ("one.py", "one.py:Net", "one:Net", "./one.py"):
        task, _ = described_task(PlanOptions(model=spelt, global_batch=2), 1)
        assert {name: tuple(part.shape) for name, part in task.batch(3).items()} == {"x": (3, 64), "y": (3, 1)}
        assert sum(p.numel() for p in task.build().parameters()) == 64 * 256 + 256 + 256 + 1
    Path("alone.py").write_text("from torch import nn\n\ndef model():\n    return nn.Linear(1, 1)\n")
    with pytest.raises(ModelError, match=r"a Linear, whose batches are not known; .* --batch-of alone.py:batch"):
        described_task(PlanOptions(model="alone.py"), 1)


def test_questions_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    Path("net.py").write_text("class Net: ...")
    asked = (
        ("--model llama-7b", "--model llama-7b names no model; the sizes are tiny"),
        ("--model net", "did you mean net.py?"),
        ("--model net.py:Nett", "did you mean Net? It defines Net"),
        ("--gpu a100", "did you mean A100-40 or"),
        ("--gpu A100-80 --out missing/plan.toml", "missing/plan.toml cannot be written"),
        ("--gpus 0", "--gpus is 0"),
        ("", "was not measured"),
    )
    code = (
        "import sys\nfrom zeroshard.cli.main import main\nimport contextlib, io\n"
        "for words in eval(sys.argv[1]):\n    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):\n"
        "        main(['plan', *words.split()])\n"
        "    print(ascii(said.getvalue()))\n    assert 'torch' not in sys.modules, words\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, "-c", code, repr([words for words, _ in asked])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, (_, complaint) in zip(done.stdout.splitlines(), asked, strict=True):
        assert complaint in ast.literal_eval(line)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"nowhere:model cannot be imported: .*package.module:function"):
        described_task(PlanOptions(model="nowhere:model"), 1)


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"top": 3, "explain": 4}, "explain names plan 4 and top is 3"),
        ({"write": (6, Path("x"))}, "write names plan 6"),
        ({"gpu_memory": "32 apples"}, "gpu_memory: memory is '32 apples'"),
        ({"host_memory": "0GiB"}, "host_memory: .* more than 0"),
        ({"cluster": Path("c.toml"), "gpus": 4}, "leave out gpus, or cluster"),
        ({"per_node": 4}, "name them with gpu"),
        ({"profile": Path("x"), "gpu": "H200"}, "profile is of this machine and gpu is H200"),
        ({"ranks": 4}, "add params"),
        ({"largest": True, "model": "small"}, "takes no model; leave it out"),
        ({"largest": True, "explain": 1}, "takes no explain; leave it out"),
        ({"largest": True, "html": Path("x")}, "takes no html; leave it out"),
        ({"largest": True, "tensor_parallel": 2}, "takes no tensor.parallel; leave it out"),
        ({"tensor_parallel": 1}, "tensor_parallel is 1; it must be 2 or more, or left out"),
        ({"adapter_rank": 8}, "adapter_rank is 8 and no adapters are asked for; add adapters=lora"),
        ({"params": 1e9}, "say ranks, or gpus"),
        ({"params": 0.5, "gpus": 1}, "params is 0.5"),
        ({"params": 1e9, "gpus": 1, "gpu": "A100-80"}, "leave out gpu, or params"),
        ({"params": 1e9, "gpus": 1, "gpu_memory": "16GiB"}, "leave out gpu_memory, or params"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PlanOptions(**given)


@pytest.mark.parametrize(
    "given, kind, complaint",
    [
        (
            {},
            ConfigError,
            "was not measured .machine.json is missing.: name one with --gpu.*or measure .*`zeroshard doctor`",
        ),
        ({"gpu": "A100"}, PlanError, "did you mean A100-40 or A100-80"),
        ({"gpu": "A100-80", "gpu_memory": "1GiB"}, ConfigError, "some memory must be left"),
        ({"cluster": Path("none.toml")}, ConfigError, "none.toml cannot be read"),
    ],
)
def test_machines_that_cannot_be(given: dict[str, Any], kind: type[ZeroshardError], complaint: str) -> None:
    with pytest.raises(kind, match=complaint):
        described_machines(PlanOptions(**given), Path("machine.json"))


@pytest.mark.parametrize(
    "given, node, way",
    [
        (("--tensor-parallel", "2"), 1, "leave it out"),
        (("--gpus", "8", "--tensor-parallel", "3"), 8, "set it to 2 or 4 or 8"),
        (("--gpus", "6", "--per-node", "4", "--tensor-parallel", "4"), 4, "set it to 2"),
    ],
)
def test_layers_are_split_among_equal_groups_of_a_node(given: tuple[str, ...], node: int, way: str) -> None:
    with pytest.raises(ConfigError, match=rf"of one node, of which there are {node}, in equal groups; {way}\."):
        read_question(["--gpu", "A100-80", *given], {})


def test_machines_are_as_the_options_say() -> None:
    options = PlanOptions(gpu="V100-32", gpus=16, per_node=4, gpu_memory="16GiB", host_memory="64GiB")
    machines = described_machines(options, Path("machine.json"))
    assert (machines.count, machines.nodes, machines.host_memory) == (16, 4, 64 * GIB)
    assert machines.device.memory_bytes == 16 * GIB
    Path("c.toml").write_text('device = "V100-16"\nnodes = 2\nper_node = 2\n')
    assert described_machines(PlanOptions(cluster=Path("c.toml")), Path("machine.json")).count == 4


def test_first_estimates_are_shown_apart_from_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    def searched(*_: Any, first: Callable[[Found], None], **__: Any) -> Found:
        first(Found((prediction(mode="estimate", time_mode="estimate"),), (), 1, 0.5))
        read = capsys.readouterr()
        assert not read.out
        lines.extend(read.err.splitlines())
        first(Found(BEST[:1], (), 1, 0.0))
        lines.extend(capsys.readouterr().err.splitlines())
        return Found(BEST, REFUSED, 42, 3.2)

    monkeypatch.setattr(plan_command, "search_once", searched)
    run_plan(*read_question([*ON_A100, "--json"], {}))
    (fits,) = [line for line in lines if line.startswith("Fits: zero ")]
    assert " tokens/s. The search goes on." in " ".join(lines) and "; peak " in fits
    assert "First estimates, best first; every plan is rehearsed now" in map(str.strip, lines)
    assert any(line.startswith("1  zero 3") and line.rstrip().endswith("estimate") for line in lines)
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 3


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 3.0, 11.0, 11.0, 12.0, 25.0, 25.0])
    with plan_command._status(lambda: next(clock)) as say:
        for number in range(1, 5):
            say(f"{number}/31 plans, about 40 s left: zero 3")
    read = capsys.readouterr()
    lines = [f"Rehearsing {number}/31 plans, about 40 s left: zero 3" for number in (2, 4)]
    assert read.err.splitlines() == lines and not read.out


def test_the_status_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Console(file=io.StringIO(), width=60, force_terminal=True)
    monkeypatch.setattr(plan_command, "Console", lambda **_: narrow)
    with plan_command._status() as say:
        say(f"12/31 plans, about 40 s left: tensor 2, {'zero 3, ' * 9}8 rows per data rank")
        (status,) = narrow._live_stack
        lines = narrow.render_lines(status.get_renderable(), pad=False)
    shown = ["".join(part.text for part in line) for line in lines]
    assert len(shown) == 1 and "Rehearsing 12/31 plans, about 40 s left: tensor 2, " in shown[0]


def test_explain_beyond_what_fits(read: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="explain names plan 4 and 3 plans fit"):
        read("--explain", "4")
    with pytest.raises(ConfigError, match="write names plan 1 and no plan fits"):
        read("--out", "x.toml", found=Found((), REFUSED, 3, 1.0))


def test_ranks_in_a_layer_are_those_of_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []
    monkeypatch.setattr(plan_command, "search_once", lambda task, machines, base, *_, **__: asked.append(base) or FOUND)
    run_plan(*read_question([*ON_A100, "--tensor-parallel", "4"], {}))
    assert asked[0].tensor.ranks == 4


def test_a_batch_of_is_for_own_models() -> None:
    with pytest.raises(ConfigError, match="tiny makes its own"):
        read_question(["--batch-of", "mine:batch"], {})


def test_the_largest_model_under_each_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    member = Member("7.46 B: 36 x 4096", 36, 7_460_000_000, 30 * GIB, prediction())
    next_one = Member("7.66 B: 37 x 4096", 37, 7_660_000_000, 31 * GIB)
    how: dict[str, Any] = {"ranks": 8, "rows": 2, "room_bytes": int(30.5 * GIB)}
    found = [
        Largest(plan=Plan(zero=3), counts="step", member=member, beyond=next_one, **how),
        Largest(plan=Plan(zero=0), counts="states", member=None, beyond=member, **how),
    ]
    asked: list[Any] = []
    monkeypatch.setattr(plan_command, "largest_table", lambda *given, **_: asked.append(given) or found)
    run_plan(
        *read_question([*ON_A100, "--largest", "--global-batch", "16", "--sequence", "512", "--precision", "fp16"], {})
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The largest GPT on 8 x A100-80 (80.00 GiB), 2 rows of 512 tokens per device"
    row = next(line for line in lines if line.startswith("zero 3"))
    assert " ".join(row.split()) == "zero 3, fp32 step 7.46 B: 36 x 4096 30.00 30.50 7.66 B: 37 x 4096"
    assert any(line.split()[:5] == ["zero", "0,", "fp32", "states", "none"] for line in lines)
    (machines, rows, sequence, plans), *_ = asked
    assert (machines.count, rows, sequence) == (8, 2, 512)
    assert [(plan.zero, plan.precision, plan.microbatches) for plan in plans] == [(z, "fp16", 2) for z in range(4)]
    run_plan(*read_question([*ON_A100, "--largest", "--json"], {}))
    first, second = json.loads(capsys.readouterr().out)
    assert first["member"]["parameters"] == 7_460_000_000 and second["member"] is None


@pytest.mark.parametrize("option", ["--ranks", "--gpus"])
def test_formulas_are_those_of_the_paper(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_plan(*read_question(["--params", "7.5e9", option, "64", "--json"], {}))
    found = [row["model_state_bytes"] for row in json.loads(capsys.readouterr().out)]
    assert found == [round(state_bytes(7_500_000_000, 64, zero).total) for zero in range(4)]
    assert [f"{nbytes / 1e9:.2f}" for nbytes in found] == ["120.00", "31.41", "16.64", "1.88"]
    run_plan(*read_question(["--params", "7.5e9", option, "64"], {}))
    assert "31.41" in capsys.readouterr().out


def test_the_progress_is_one_line_of_any_terminal() -> None:
    for width in (40, 60, 140):
        console = Console(width=width, force_terminal=True, file=io.StringIO())
        spinner = Spinner(
            "dots", text=beside_spinner("Rehearsing 4/7 plans, about 9 s left: " + "2 stages, " * 20, width)
        )
        assert len(console.render_lines(spinner)) == 1
