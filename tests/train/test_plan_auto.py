"""zeroshard train --plan auto: the plan is chosen, kept, predicted and compared."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from planner.rehearsed import OPTIMIZERS, gpt, peak_of, tokens
from predictions import GIB, prediction
from torch.profiler import ProfilerActivity, profile

from zeroshard.comm.mesh import Mesh
from zeroshard.engine import Engine
from zeroshard.errors import ConfigError, PlanError
from zeroshard.pipeline.policy import Pipeline
from zeroshard.plan import SEARCHED, Plan
from zeroshard.planner.predict.rehearse import by_cause
from zeroshard.planner.predict.result import Found
from zeroshard.platform.rehearsed import Rehearsal
from zeroshard.report import write_report
from zeroshard.traffic import UPDATE, Purpose
from zeroshard.train import planning
from zeroshard.train.config import TrainConfig
from zeroshard.train.forecast import Forecast, ForecastComparison, Measured
from zeroshard.train.options import parse
from zeroshard.train.planning import plan_ahead
from zeroshard.train.run import run
from zeroshard.train.sizes import SIZES, GPTConfig
from zeroshard.train.toml_config import dump_toml, load_toml

JOB = Path(__file__).parent / "auto_job.py"
SHORT = "--model mini --sequence 16 --batch-per-rank 1 --steps 20 --validation-rows 2 --sample-tokens 0"
SHORT += " --warmup-steps 2"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a short run on a small text."""
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / "text" / f"{number}.txt").write_text("".join(f"{number}: {n * n}\n" for n in range(200)))
    monkeypatch.setitem(SIZES, "mini", GPTConfig(vocabulary=256, context=16, width=16, heads=2, layers=1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [*SHORT.split(), "--data", str(tmp_path / "text"), "--out", str(tmp_path / "runs")]


def content(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def check_compared(folder: Path, rank: int) -> None:
    """Raise unless memory came out as predicted, and the wire to the byte."""
    kept = content(folder, "prediction.json")
    rows = {(row["part"], row["name"]): (row["predicted"], row["measured"]) for row in kept["rows"]}
    assert (kept["rank"], kept["step"]) == (rank, 20)
    predicted, measured = rows["memory", "peak"]
    assert measured == pytest.approx(predicted, rel=1e-3)
    assert [pair for (part, _), pair in rows.items() if part == "wire" and pair[0] != pair[1]] == []
    assert not [warning for warning in kept["warnings"] if not warning.startswith("a step takes")]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "measured_peak_bytes" in line] == [20]


def test_one_process_keeps_its_plan(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    done = run(parse(TrainConfig, [*words, "--plan", "auto", "--steps", "22"], "train"), Mesh())
    assert done is not None
    shown, folder = capsys.readouterr().out, done[1]
    assert "zero 0, fp32; 1 rank, 1 row per rank and step." in shown
    assert "predicted against measured after 20 steps, rank 0:" in shown
    check_compared(folder, 0)
    assert "Predicted and measured" in write_report(folder).read_text()
    kept = load_toml(folder / "config.toml", TrainConfig)
    assert (kept.planning, kept.plan.zero, kept.batch_per_rank) == ("given", 0, 1)

    monkeypatch.setattr(planning, "best_plans", None)
    for path in (folder, folder / "checkpoints" / "step-00000022"):
        given = parse(TrainConfig, [*words, "--plan", "auto", "--resume", str(path)], "train")
        assert plan_ahead(given, Mesh())[0].plan == kept.plan
        with pytest.raises(TypeError, match="not callable"):  # other rows, so it is chosen anew
            plan_ahead(replace(given, batch_per_rank=2), Mesh())
    (folder / "summary.json").unlink()  # as if it had been cut off
    more = ["--plan", "auto", "--steps", "24", "--resume", "auto", "--precision", "bf16"]
    again = run(parse(TrainConfig, [*words, *more], "train"), Mesh())
    shown = capsys.readouterr().out
    assert again is not None and again[1] == folder
    assert f"going on with the plan of {folder}, which is not chosen anew: zero 0, bf16" in shown
    assert "going on from step 22" in shown


@pytest.mark.parametrize("plan", ["optimizer --zero 1", "optimizer,parameters,activations --zero 3", "disk", "adagrad"])
def test_what_is_offloaded_counts_where_it_is(words: list[str], plan: str, tmp_path: Path) -> None:
    on_disk = f"optimizer,parameters --zero 3 --offload.disk {tmp_path / 'disk'} --offload.disk-parameters"
    plan = {"disk": on_disk, "adagrad": "optimizer --zero 2 --optimizer adagrad"}.get(plan, plan)
    given = [*words, "--steps", "8", "--predict", "--no-checkpoint", "--offload", *plan.split()]
    done = run(parse(TrainConfig, given, "train"), Mesh())
    assert done is not None
    kept = content(done[1], "prediction.json")
    rows = {(row["part"], row["name"]): (row["predicted"], row["measured"]) for row in kept["rows"]}
    assert rows["memory", "peak"][1] == pytest.approx(rows["memory", "peak"][0], rel=1e-3)
    lower = {key: pair for key, pair in rows.items() if key[0] in ("host", "disk")}
    assert lower and all(predicted == measured > 0 for predicted, measured in lower.values())
    assert {("disk", "all")} == {key for key in lower if key[0] == "disk"} or "disk" not in plan
    exposed = {name: pair for (part, name), pair in rows.items() if part == "exposed"}
    assert "host link" in exposed and all(predicted > 0 and measured > 0 for predicted, measured in exposed.values())
    assert not [warning for warning in kept["warnings"] if warning.startswith("memory")]
    assert "exposed: host link" in write_report(done[1]).read_text()


def test_two_ranks_get_the_plan_of_rank_zero(words: list[str], tmp_path: Path) -> None:
    folder = Path(json.loads(run_job(JOB, *words, "--plan", "auto", "--no-checkpoint").splitlines()[-1]))
    plan = load_toml(folder / "config.toml", TrainConfig).plan
    kept = content(folder, "prediction.json")
    assert replace(Plan.from_dict(kept["predicted"]["plan"]), transport="auto") == plan
    assert content(folder, "summary.json")["plan"]["zero"] == plan.zero
    check_compared(folder, kept["predicted"]["rank"])


def test_stages_leave_the_rows_of_a_step_as_they_are(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(zero=1, pipeline_parallel=Pipeline(2, split=("blocks.1",)), microbatches=4, clip_norm=1.0)
    found = Found((prediction(plan, ranks=4, batch=6),), (), 1, 0.1)
    tasks = []
    monkeypatch.setattr(planning, "best_plans", lambda task, *rest: tasks.append(task) or found)
    mesh = Mesh(0, 4, platform=Rehearsal(range(4)))
    config = parse(TrainConfig, [*words, "--plan", "auto", "--batch-per-rank", "4", "--transport", "network"], "train")
    chosen, outlook = plan_ahead(config, mesh)
    assert tasks[0].rows == 16 == 8 * 2  # two data ranks of two stages each
    assert (chosen.batch_per_rank, chosen.planning, chosen.plan) == (8, "given", replace(plan, transport="network"))
    assert outlook.prediction == replace(found.best[0], events=())
    assert "2 stages 1f1b x 2, zero 1, fp32, 4 microbatches" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_ranks_of_experts_that_were_chosen(words: list[str], tmp_path: Path) -> None:
    mesh, auto = Mesh(0, 2, platform=Rehearsal(range(2))), [*words, "--plan", "auto", "--resume", str(tmp_path)]
    given = parse(TrainConfig, auto, "train")
    chosen = Plan(zero=1, expert_parallel=2)
    dump_toml(replace(given, planning="given", plan=chosen, resume=None), tmp_path / "config.toml")
    (tmp_path / "run.json").write_text(json.dumps({"ranks": 2}))
    assert plan_ahead(given, mesh)[0].plan.experts.ranks == 2
    two_level = parse(TrainConfig, [*auto, "--expert-parallel", "2", "--expert-parallel.two-level"], "train")
    assert plan_ahead(two_level, mesh)[0].plan.experts == two_level.plan.experts


FIRSTS = {"offload": "parts", "pipeline_parallel": "stages", "tensor_parallel": "ranks", "activations": "recompute"}


def test_what_a_search_chooses_cannot_be_given(words: list[str]) -> None:
    with pytest.raises(PlanError, match="zero is 3, and the search for a plan chooses it"):
        run(parse(TrainConfig, [*words, "--plan", "auto", "--zero", "3"], "train"), Mesh())
    with pytest.raises(ConfigError, match="trace needs stages or offload, and --plan auto chooses"):
        TrainConfig(planning="auto", trace=True)
    page = (Path(__file__).parents[2] / "docs" / "auto_plan.md").read_text()
    named = re.findall(r"`--([a-z.-]+)`", page.partition("| chosen |")[2].partition("\n")[0])
    said = {f"{group}.{first}": group for group, first in FIRSTS.items()}
    assert {name.replace("-", "_") for name in named} == {said.get(name, name) for name in SEARCHED}
    assert all(name.rpartition(".")[2] in str(Plan.auto.__doc__) for name in SEARCHED)


def test_the_option_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.toml"
    file.write_text('plan = "auto"\nprecision = "bf16"\n')
    config = load_toml(file, TrainConfig)
    assert (config.planning, config.plan.precision) == ("auto", "bf16")
    assert parse(TrainConfig, ["--config", str(file), "--plan", "given"], "train").planning == "given"
    dump_toml(config, file)
    assert load_toml(file, TrainConfig) == config
    file.write_text("[plan]\nzero = 3\n")
    assert load_toml(file, TrainConfig).plan.zero == 3
    for text, found in (('plan = "best"', '"best", str'), ("plan = 3", "3, int")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f'gives the option plan as {found}; it needs one of "given", "auto"'):
            load_toml(file, TrainConfig)


def test_the_measured_peak_is_what_the_profiler_sees() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        batch = tokens(4)
        model = gpt()
        engine = Engine(model, OPTIMIZERS["fused"], Plan(zero=0), mesh=Mesh())
        forecast = Forecast(prediction(ranks=1), "", engine, 8)
        for _ in range(8):
            with forecast.step(batch):
                engine.train_step(batch)
    assert forecast.due
    measured = forecast.compare().measured
    assert measured.peak_bytes == pytest.approx(peak_of(watched), rel=1e-3)
    assert measured.memory["parameters"] == 4 * sum(p.numel() for p in model.parameters())
    assert 0 < measured.causes["optimizer"] < measured.wall
    assert Forecast(prediction(ranks=1), "", engine, 7).last == 0


def measured(**given: Any) -> Measured:
    """What the prediction made by hand says, unless told otherwise."""
    p = prediction()
    causes = {"compute": 0.3, "optimizer": 0.02, "wire": 0.1}
    values = {"memory": p.memory, "allocated": None, "wire": p.wire_bytes, "wall": 0.42, "cpu": 0.32, "causes": causes}
    return Measured(**values | given)


def test_stalls_are_shown_beside_the_prediction() -> None:
    planned = prediction(causes={"compute": 0.3, "host link": 0.1, "host update": 0.02}, host={"gradients": GIB})
    stalls = by_cause({Purpose.GRADIENTS_DOWN: 0.03, Purpose.PARAMETERS_UP: 0.04, UPDATE: 0.05})
    assert stalls == {"host link": pytest.approx(0.07), "host update": 0.05}
    for causes in ({}, {"compute": 0.3, **stalls}):  # on a GPU other causes cannot be told apart
        found = ForecastComparison(planned, measured(causes=causes, stalls=stalls, host={"gradients": GIB}), "", 20)
        rows = {(row["part"], row["name"]): (row["predicted"], row["measured"]) for row in found.rows}
        assert rows["exposed", "host link"] == (0.1, stalls["host link"]) and ("time", "host link") not in rows
        assert rows["exposed", "host update"] == (0.02, 0.05) and rows["host", "gradients"] == (GIB, GIB)
        assert "  exposed host link: predicted 100 ms per step, measured 70.0 ms" in found.lines
        assert found.metrics()["predicted_exposed_seconds"] == pytest.approx(0.12)
    staged = replace(planned, causes={"compute": 0.3, "bubble": 0.1})
    assert not [
        row for row in ForecastComparison(staged, measured(stalls=stalls), "", 20).rows if row["part"] == "exposed"
    ]


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({}, None),
        ({"wire": {**prediction().wire_bytes, "agreement": 5, "set-up": 7}}, None),
        (
            {"memory": {**prediction().memory, "activations": 7 * GIB}},
            r"memory is \+6.7 % off .* in activations: predicted 6.00 GiB, measured 7.00 GiB\.",
        ),
        ({"host": {"gradients": GIB}}, r"memory below the device is .* in gradients: predicted 0 B, measured 1.00 GiB"),
        ({"allocated": int(15.4 * GIB)}, None),
        (
            {"wire": {"gather parameters": 4 * GIB, "reduce gradients": 2 * GIB + 4}},
            "the bytes on the wire to reduce gradients differ: 2,147,483,648 predicted, 2,147,483,652 measured",
        ),
        ({"wire": {"gather parameters": 4 * GIB}}, "to reduce gradients differ: 2,147,483,648 predicted, 0 measured"),
        ({"wall": 0.6, "cpu": 0.33}, r"takes 600 ms \(\+42.9 %\), .* other load or waiting took the rest"),
        (
            {"wall": 0.6, "cpu": 0.5, "causes": {"compute": 0.45, "optimizer": 0.05, "wire": 0.1}},
            "most of that is compute: predicted 300 ms, measured 450 ms. Rates: made up.",
        ),
        ({"wall": 0.1, "cpu": 0.1, "causes": {}}, "cannot be told apart on this device. Rates: made up."),
    ],
)
def test_a_missed_bar_names_its_cause(given: dict[str, Any], sentence: str | None) -> None:
    found = ForecastComparison(prediction(), measured(**given), "Rates: made up.", 20).warnings
    assert [bool(re.search(sentence or "$^", text)) for text in found] == ([True] if sentence else []), found
