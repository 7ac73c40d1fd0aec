"""The main job as a person starts it, shortened: launcher, run folder, report, resume, wrong input, a failing rank."""

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pool import Pool
from selection import by_default
from torch import nn

from zeroshard.cli import main as cli
from zeroshard.cli.rank import WRONG_INPUT, present
from zeroshard.comm.mesh import Mesh
from zeroshard.errors import ModelError, ZeroshardError
from zeroshard.train.config import OptimizerName, TrainConfig
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.options import parse
from zeroshard.train.run import run as run_job

ROOT = Path(__file__).parents[2]
SHORT = ["--sequence", "32", "--batch-per-rank", "2", "--validation-rows", "4"]
SHORT += ["--sample-tokens", "8", "--warmup-steps", "2"]


def zeroshard(*words: str, cwd: Path, ranks: int | None = 2, code: int = 0) -> str:
    """The output of one command, which must end with `code`."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    start = [sys.executable, "-m", "zeroshard", *words] + (["--ranks", str(ranks)] if ranks else [])
    done = subprocess.run(start, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text("".join(f"line {n} of file {number}: {n * n}\n" for n in range(400)))
    return folder


def job_on(mesh: Mesh, words: list[str]) -> str:
    """What one rank of a job prints, which the pool starts in the place of the launcher."""
    with contextlib.redirect_stdout(io.StringIO()) as heard:
        config = parse(TrainConfig, words, "zeroshard train")
        done = run_job(config, mesh)
        if done is not None:
            present(*done, config)
    return heard.getvalue()


def job_of(pool: Pool, ranks: int, text: Path, out: Path, *words: str) -> tuple[str, Path]:
    """The output of a job of several ranks, and its run folder."""
    output = "".join(pool.run(job_on, ranks, ["--data", str(text), *SHORT, "--out", str(out), *words]))
    (run,) = out.iterdir()
    return output, run


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_default_run_on_two_ranks_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    """The built-in corpus and model, fewer steps."""
    words = ("--steps", "12", "--sample-tokens", "8", "--validation-rows", "8", "--tables")
    output = zeroshard("train", *words, cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    files = {path.name for path in run.iterdir()}
    written = {"config.toml", "run.json", "run.lock", "metrics.jsonl", "memory.json", "summary.json", "report.html"}
    assert files == {*written, "starts.json", "memory-rank1.json", "checkpoints"}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["plan"]["zero"] == 2
    (start,) = json.loads((run / "starts.json").read_text())["starts"]
    assert shlex.split(start["command"]) == ["zeroshard", "train", *words, "--ranks", "2"]
    assert (start["ranks"], start["seed"], start["git"]) == (2, 0, None)
    for rank, name in enumerate(("memory.json", "memory-rank1.json")):
        memory_of = json.loads((run / name).read_text())
        layers = {(event["phase"], event["layer"]) for event in memory_of["events"] if "layer" in event}
        assert memory_of["rank"] == rank
        assert layers == {(phase, f"blocks.{n}") for phase in ("forward", "backward") for n in range(5)}
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1] and summary["ranks"][1]["peak_bytes"] > 2**20
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {name: len(values) for name, values in lines[-1]["ranks"].items()} == {
        "busy_seconds": 2, "rss_bytes": 2, "memory_bytes": 2,
    }  # fmt: skip
    assert all(seconds > 0 for line in lines for seconds in line["ranks"]["busy_seconds"])
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert summary["validation_bits_per_byte"] < 6
    memory = {row["category"]: row for row in summary["memory"]}
    psi = summary["parameters"]
    assert memory["parameters"]["measured_bytes"] == 4 * psi // 2  # there once for both ranks
    assert memory["gradients"]["measured_bytes"] == 4 * psi // 2
    assert memory["optimizer states"]["measured_bytes"] == 8 * psi // 2
    traffic = {row["purpose"]: row["measured_elements"] for row in summary["traffic"]}
    assert (traffic["gather parameters"], traffic["reduce gradients"]) == (0, psi)
    for shown in (
        "validation",
        "planned by the formula",
        "elements by the formula",
        "report.html",
        "sample",
        "parameters are there once",
    ):
        assert shown in output


def job(text: Path, out: Path, *words: str) -> Path:
    """The run folder of a job on one rank, in this process."""
    done = run_job(parse(TrainConfig, ["--data", str(text), *SHORT, "--out", str(out), *words], "train"), Mesh())
    assert done is not None
    return done[1]


def test_resume_goes_on_bit_for_bit_and_options_come_from_toml(text: Path, tmp_path: Path) -> None:
    """From another folder's checkpoint; test_keeping.py goes on in the same folder."""
    whole = job(text, tmp_path / "whole", "--steps", "8", "--zero", "3", "--final-learning-rate", "1")
    half = job(text, tmp_path / "half", "--steps", "4", "--zero", "3", "--final-learning-rate", "1")
    options = tmp_path / "options.toml"
    for path in (half, half / "checkpoints" / "step-00000004"):
        options.write_text(f'resume = "{path}"\nsteps = 8\nzero = 3\nfinal-learning-rate = 1.0\n')
        rest = job(text, tmp_path / "rest", "--config", str(options))
        losses = {line["step"]: line["loss"] for line in metrics(whole) if "loss" in line}
        resumed = {line["step"]: line["loss"] for line in metrics(rest) if "loss" in line}
        assert resumed == {step: losses[step] for step in range(5, 9)}


def test_one_process_and_other_precisions(text: Path, tmp_path: Path) -> None:
    bf16 = ["--precision", "bf16", "--fp32-modules", "LayerNorm"]
    for words in (bf16, ["--precision", "fp16", "--microbatches", "2"]):
        run = job(text, tmp_path, "--steps", "6", *words)
        losses = [line["loss"] for line in metrics(run) if "loss" in line]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", by_default(["adafactor", "muon"], "adafactor"))
def test_optimizers_over_whole_tensors_train_and_resume(name: str, text: Path, tmp_path: Path, pool: Pool) -> None:
    """The first lines say what owners cost, and a checkpoint of two ranks goes on bit for bit under another stage."""
    words = ["--optimizer", name, "--final-learning-rate", "1"]
    output, whole = job_of(pool, 2, text, tmp_path / "whole", "--steps", "6", "--zero", "2", *words)
    assert "owners " in output and "one owner among 2 ranks" in output and "times the mean" in output
    _, half = job_of(pool, 2, text, tmp_path / "half", "--steps", "3", "--zero", "1", *words)
    resume = ["--resume", str(half), "--steps", "6", "--zero", "3"]
    _, rest = job_of(pool, 2, text, tmp_path / "rest", *resume, *words)
    losses, resumed = ({m["step"]: m["loss"] for m in metrics(run) if "loss" in m} for run in (whole, rest))
    assert losses[6] < losses[1]
    assert resumed == {step: losses[step] for step in range(4, 7)}


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_of_the_options_is_made(name: Any) -> None:
    """With vectors that do not decay, and under Muon embeddings that are not orthogonalised."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    optimizer = make_optimizer(TrainConfig(optimizer=name, learning_rate=0.25), model)
    assert type(optimizer).__name__.lower() == name
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())
    for group in optimizer.param_groups:
        assert group["lr"] == 0.25
        assert all((p.dim() > 1) == (group["weight_decay"] > 0) for p in group["params"])
    orthogonal = [group["params"] for group in optimizer.param_groups if group.get("orthogonalize")]
    assert name != "muon" or all(p is not model[0].weight for params in orthogonal for p in params)


def test_tensorboard_events(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = job(text, tmp_path, "--steps", "3", "--loggers", "tensorboard")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    written = [event.value for event in events.Scalars("loss")]
    assert written == pytest.approx([line["loss"] for line in metrics(run) if "loss" in line])


WRONG = [
    (["--zeroo", "2"], "no option --zeroo", 2),
    (["--zero", "7"], "7", 2),
    (["--ranks", "0"], "ranks is 0; it must be 1 or more", 2),
    (
        ["--batch-per-rank", "3", "--microbatches", "2"],
        "--batch-per-rank is 3 and --microbatches is 2, which does not divide it",
        2,
    ),
    (["--data", "nowhere"], "nowhere, which does not exist", 2),
    (["--data", "empty"], "no text was found", 2),
    (["--model", "smal"], "did you mean small", 2),
    (["--model", "gpt.json"], "gpt.json, which does not exist", 2),
    (["--resume", "nowhere"], "nowhere is no checkpoint", 1),
    (["--config", "misspelt.toml"], "did you mean learning_rate", 2),
    (["--config", "nothing.toml"], "nothing.toml", 2),
    pytest.param(
        *(["--device-memory", "1MiB"], "device_memory is 1,048,576 bytes, and the weights take", 1),
        marks=pytest.mark.whole,
    ),
    (["--learning-rate", "1e30", "--optimizer", "sgd", "--warmup-steps", "0", "--clip-norm", "None"], "not finite", 1),
    (["--trace"], "set --pipeline-parallel to 2 or more", 2),
    (
        [
            "--pp",
            "2",
            "--pipeline-parallel.schedule",
            "interleaved",
            "--pipeline-parallel.virtual-stages",
            "2",
            "--microbatches",
            "1",
        ],
        "multiple of 2",
        2,
    ),
]


@pytest.mark.parametrize(
    "words, message, code", WRONG, ids=lambda value: "-".join(value) if isinstance(value, list) else ""
)
def test_wrong_input_gives_one_clear_sentence(
    words: list[str],
    message: str,
    code: int,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process; what ends a rank is tested by itself below."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "empty").mkdir()
    (tmp_path / "misspelt.toml").write_text("learning_rat = 1.0\n")
    base = ["--steps", "4", *SHORT] + ([] if "--data" in words else ["--data", str(text)])
    with pytest.raises((ZeroshardError, SystemExit)) as raised:
        run_job(parse(TrainConfig, [*base, *words], "zeroshard train"), Mesh())
    found = capsys.readouterr()
    assert message == "not finite" or not (tmp_path / "runs").exists()
    if isinstance(raised.value, SystemExit):
        assert (raised.value.code, message in found.out + found.err) == (code, True)
    else:
        assert (2 if isinstance(raised.value, WRONG_INPUT) else 1, message in str(raised.value)) == (code, True)


LAST_LINES = [
    (["--data", "nowhere"], "DataError: --data names nowhere, which does not exist", 2),
    (["--resume", "nowhere"], "CheckpointError: --resume names nowhere, which is no checkpoint", 2),
]


@pytest.mark.whole
def test_a_rank_that_fails_leaves_with_its_code_and_one_line(text: Path, tmp_path: Path) -> None:
    for words, message, code in LAST_LINES:
        base = ["train", "--steps", "4", *SHORT] + ([] if "--data" in words else ["--data", str(text)])
        output = zeroshard(*base, *words, cwd=tmp_path, ranks=None, code=code)
        assert output.strip().splitlines()[-1].startswith("zeroshard: " + message)
        assert "Traceback" not in output


def test_vocabulary_smaller_than_the_tokens(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "vocab_size": 100, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="vocabulary of 100 and the tokenizer one of 256"):
        job(text, tmp_path, "--model", str(tmp_path / "config.json"))


def test_hugging_face_model_unmodified(pool: Pool, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "bos_token_id": None, "eos_token_id": None}))
    _, run = job_of(pool, 2, text, tmp_path / "runs", "--model", str(path), "--steps", "10", "--zero", "3")
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[-1] < losses[0]


FAILING = """
import zeroshard.train.run as run
step = run.Run._step
def failing(self, number, samples):
    if number == 2 and self.engine.mesh.rank == 1:
        raise RuntimeError("the disk of rank 1 is on fire")
    return step(self, number, samples)
run.Run._step = failing
from zeroshard.cli.main import main
main()
"""


@pytest.mark.whole
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(text: Path, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "failing.py"]
    words = [sys.executable, *start, "train", "--data", str(text), *SHORT, "--steps", "20", "--zero", "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "CommError" not in done.stderr  # what broke on the other rank in consequence is not shown
    last = done.stderr.rindex("Traceback (most recent call last)")
    assert "RuntimeError: the disk of rank 1 is on fire" in done.stderr[last:]
    assert "rank      : 1" in done.stderr[last - 400 :]


def test_plan_prints_the_paper_s_row(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", "--params", "7.5e9", "--ranks", "64", "--json"])
    assert json.loads(capsys.readouterr().out) == [
        {"zero": 0, "model_state_bytes": 120_000_000_000},
        {"zero": 1, "model_state_bytes": 31_406_250_000},
        {"zero": 2, "model_state_bytes": 16_640_625_000},
        {"zero": 3, "model_state_bytes": 1_875_000_000},
    ]
    cli.main(["plan", "--params", "7.5e9", "--ranks", "64"])
    table = capsys.readouterr().out
    assert [figure in table for figure in ("120.00", "31.41", "16.64", "1.88")] == [True] * 4
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--params", "7.5e9", "--ranks", "0"])


def test_a_run_in_stages_leaves_its_timeline(pool: Pool, text: Path, tmp_path: Path) -> None:
    """Two stages and ZeRO 1 over two replicas of each; measured beside simulated."""
    words = [
        "--pp",
        "2",
        "--pipeline-parallel.schedule",
        "1f1b",
        "--microbatches",
        "2",
        "--zero",
        "1",
        "--recompute",
        "blocks",
        "--activations.arena",
        "--steps",
        "9",
        "--trace",
        "--tables",
    ]
    output, run = job_of(pool, 4, text, tmp_path / "runs", *words)
    content = json.loads((run / "timeline.json").read_text())
    measured, simulated = content["timelines"]
    assert content["measured_seconds"] > 0 and content["simulated_seconds"] > 0
    assert [len(rank) for rank in measured["spans"]] == [5, 5, 5, 5]  # two forwards, two backwards, an update
    order = [[action for action, _, _ in rank] for rank in measured["spans"]]
    assert order[0] == ["F0.0@0", "F0.2@0", "B0.0@0", "B0.2@0", "UPDATE0@0"]
    assert order[3] == ["F1.1@0", "B1.1@0", "F1.3@0", "B1.3@0", "UPDATE1@0"]
    assert [[action for action, _, _ in rank if "UPDATE" not in action] for rank in simulated["spans"]] == [
        [action for action in rank if "UPDATE" not in action] for rank in order
    ]
    assert {path.name for path in run.iterdir()} >= {"timeline.svg", "report.html"}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["layers"][0] == summary["layers"][1] and summary["layers"][0][0] == "prefix"
    assert summary["arena"]["checkpoints"] == 2  # inputs that come to the second stage
    assert "2 inputs of blocks; 100.0 % in use at once" in (run / "report.html").read_text()
    assert "2 stages (1f1b)" in output and "rank 3" in output
    lines = [line for line in metrics(run) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("schedule", by_default(["pipedream", "2bw"], "2bw"))
def test_a_run_that_never_flushes_reports_from_the_last_stage(
    pool: Pool, text: Path, tmp_path: Path, schedule: str
) -> None:
    words = [
        "--pp",
        "2",
        "--pipeline-parallel.schedule",
        schedule,
        "--microbatches",
        "2",
        "--steps",
        "9",
        "--trace",
    ]
    output, run = job_of(pool, 2, text, tmp_path / "runs", *words)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rank"] == 1 and "in the process of rank 1" in output
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 10))
    (measured, _) = json.loads((run / "timeline.json").read_text())["timelines"]
    versions = [action.split("@")[1] for action, _, _ in measured["spans"][1] if action.startswith("F")]
    assert versions == (["0", "1", "2", "3", "4", "5"] if schedule == "pipedream" else ["0", "0", "0", "0", "1", "1"])


def test_what_both_ranks_find_wrong_is_said_once(text: Path, tmp_path: Path) -> None:
    words = [
        "--pp",
        "2",
        "--pipeline-parallel.virtual-stages",
        "3",
        "--pipeline-parallel.schedule",
        "interleaved",
        "--batch-per-rank",
        "4",
        "--microbatches",
        "2",
    ]
    output = zeroshard("train", "--data", str(text), *SHORT, *words, cwd=tmp_path, code=2)
    assert output.count("5 blocks") == 1 and "torch" not in output and "Traceback" not in output
