"""Trainers of transformers and TRL over an engine: their losses, and the arguments that people give them."""

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jobs
import pytest
import torch
from interop import trainer_cases as cases
from selection import by_default

import zeroshard as zs
from zeroshard.errors import ConfigError, ModelError, PlanError

for needed in ("transformers", "accelerate", "trl"):
    pytest.importorskip(needed)
ROOT = Path(__file__).parents[2]
CASES = [(name, plan) for name in cases.NAMES for plan in cases.PLANS]
HABITS = [(name, plan) for name in cases.HABITS for plan in ("zero 3", "offload")]
PATIENCE = 8 * jobs.PATIENCE  # seconds of a job with `--whole`, which has ten times the runs
Records = Callable[[str], dict[str, Any]]
EXACT = ("loss", "learning_rate", "eval_loss", "eval_tokens", "mean_token_accuracy", "accuracy")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    """The module that makes the trainers, which takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are imported
        return importlib.import_module("interop.transformers_runs")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> Records:
    """The records of one job of two ranks, or with `--whole` of one for each trainer and one for the rest."""

    done: dict[str, dict[str, Any] | AssertionError] = {}

    def of_job(part: str) -> dict[str, Any]:
        if part not in done:
            folder, script = tmp_path_factory.mktemp("trainers"), ROOT / "tests" / "interop" / "transformers_runs.py"
            try:
                jobs.run_job(script, str(folder), part, patience=PATIENCE if whole else jobs.PATIENCE)
                done[part] = torch.load(folder / "found.pt", weights_only=True)
            except AssertionError as error:  # of a rank; the tests of a job fail together
                done[part] = error
        if isinstance(found := done[part], AssertionError):
            raise found
        return found

    return lambda part: of_job(part if whole else "default")


@pytest.fixture(scope="module")
def plain(runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """The records of a trainer or a feature in this process, without an engine."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of other tests in this process
    GradientState._reset_state()

    @functools.cache
    def alone(name: str) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(runs.plain(tmp_path_factory.mktemp("plain"), name))

    return alone


@pytest.mark.parametrize("case", by_default(CASES, *cases.DEFAULT.items()), ids=", ".join)
def test_losses_are_those_of_one_process(found: Records, plain: Records, case: tuple[str, str]) -> None:
    trainer, plan = case
    run, alone = found(trainer)["curves"][f"{trainer}, {plan}"], plain(trainer)
    assert len(run["loss"]) == 20
    compared = [name for name in EXACT if name in alone]
    for name in compared:
        assert run[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-5), name
    assert run["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert ("eval_tokens" in compared) == (trainer == "seq2seq")  # generated, at every stage


@pytest.mark.parametrize(
    "case", by_default(HABITS, *((name, "zero 3") for name in cases.HABITS_DEFAULT)), ids=", ".join
)
def test_habits_change_no_loss(found: Records, plain: Records, case: tuple[str, str]) -> None:
    """Streams, packed rows, labels of answers alone, batches without any, and trainers that generate."""
    trainer, plan = case
    run, alone = found("habits")["curves"][f"{trainer}, {plan}"], plain(trainer)
    assert len(run["loss"]) == cases.steps_of(trainer)
    for name in ("loss", "learning_rate", "reward", "completions/mean_length", "mean_token_accuracy", "kl"):
        if name in alone:
            assert run[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-5), name
    assert run["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4, abs=1e-6)
    assert ("reward" in alone) == (trainer in ("grpo", "rloo"))
    assert 0.0 in run["loss"] or trainer != "without labels"


def test_sums_over_tokens_with_label_smoothing(found: Records, plain: Records) -> None:
    for name in ("loss", "grad_norm"):
        assert found("rest")["accumulates"][name] == pytest.approx(plain("accumulates")[name], rel=1e-5)


def test_batches_without_a_label_count_nothing(found: Records, plain: Records) -> None:
    """On one rank, and on all of them, where the loss is 0 and the gradients are zeros."""
    mine, alone = found("rest")["few labels"], plain("few labels")
    for name in ("loss", "grad_norm"):
        assert mine[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)
    assert 0 in alone["loss"] and len(alone["loss"]) == 20


@pytest.mark.whole
def test_bf16_is_the_precision_of_the_plan(found: Records, plain: Records) -> None:
    precision, run = found("rest")["bf16"]
    assert precision == "bf16"
    assert run["loss"] == pytest.approx(plain("bf16")["loss"], rel=5e-3)
    assert run["loss"] != plain("trainer")["loss"]


def test_a_stopped_run_resumes_bit_for_bit(found: Records) -> None:
    run = found("rest")["resumed"]
    assert len(run["straight"]) == 12
    assert run["resumed"] == run["straight"]


@pytest.mark.whole
@pytest.mark.parametrize("trainer", cases.NAMES)
def test_each_trainer_resumes_bit_for_bit(found: Records, trainer: str) -> None:
    for stop in cases.stops_of(trainer):
        run = found(trainer)[f"{trainer} at {stop}"]
        assert len(run["straight"]) == 12
        assert run["resumed"] == run["straight"], stop


def test_a_run_goes_on_on_another_number_of_ranks(
    found: Records, plain: Records, runs: ModuleType, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = runs.on_one_rank(tmp_path, runs.causal, found("rest")["kept"], few_labels=True)
    assert len(losses) == 20
    assert losses == pytest.approx(found("rest")["few labels"]["loss"], rel=1e-6, abs=1e-7)


@pytest.mark.whole
@pytest.mark.parametrize("trainer", cases.NAMES)
def test_each_trainer_goes_on_on_another_number_of_ranks(
    found: Records, plain: Records, runs: ModuleType, tmp_path: Path, trainer: str
) -> None:
    run = found(trainer)[f"{trainer} at {cases.stops_of(trainer)[3]}"]  # of stage 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = runs.on_one_rank(tmp_path, runs.TRAINERS[trainer], run["kept"], max_steps=12)
    assert losses == pytest.approx(run["straight"], rel=1e-6, abs=1e-6)


@pytest.mark.whole
def test_a_run_goes_on_under_another_plan(found: Records) -> None:
    run = found("rest")["other plan"]
    assert run["resumed"] == pytest.approx(run["straight"], rel=1e-6)


@pytest.mark.whole
def test_compiled_blocks_give_the_same_losses(found: Records, plain: Records) -> None:
    assert "graph" in found("rest")["layers"]
    assert found("rest")["compiled"]["loss"] == pytest.approx(plain("trainer")["loss"], rel=1e-5)


@pytest.mark.whole
def test_groups_by_length_are_those_of_ddp(found: Records) -> None:
    assert found("rest")["groups"]["loss"] == pytest.approx(found("rest")["groups, ddp"]["loss"], rel=1e-5)


@pytest.mark.parametrize("case", by_default(["best", "best of models"], "best"))
def test_the_best_weights_are_there_at_the_end(found: Records, case: str) -> None:
    run = found("rest")[case]
    assert run["steps"] < 20  # early stopping
    assert run["loss"] == pytest.approx(run["best"], rel=1e-6)
    assert len(run["folders"]) == 2  # save_total_limit
    assert run["saved"]  # save_model writes them for from_pretrained


def test_a_resume_without_states_is_refused_unless_asked_for(found: Records) -> None:
    without, nothing, optimizer, elsewhere = found("rest")["errors"]
    assert without.startswith("CheckpointError") and "resume_without_states=True" in without
    assert nothing.startswith("CheckpointError") and "Leave resume_from_checkpoint out" in nothing
    assert optimizer.startswith("OptimizerError: The optimizer's states are in slices")
    assert elsewhere.startswith("CheckpointError: The ranks save into different folders")


@pytest.mark.whole
def test_a_resume_without_states_that_is_asked_for(found: Records) -> None:
    assert found("rest")["without states"][-1] == 12


def test_models_that_transformers_divided_are_refused(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runs.llama()
    monkeypatch.setattr(type(model), "is_distributed_loading_by_transformers", True)
    arguments = runs.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ModelError, match="Load it without distributed_config"):
        runs.over(runs.Trainer, zs.Plan())(model, arguments)


def test_processes_that_would_all_take_the_same_rows_are_refused(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CPUs, where transformers takes each process of torchrun for one alone unless it is told `use_cpu`."""
    arguments = runs.TrainingArguments(str(tmp_path))
    assert arguments.world_size == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=r"has 2 processes and accelerate counts 1, .* pass use_cpu=True"):
        runs.over(runs.Trainer, zs.Plan())(runs.llama(), arguments)


def test_the_mixin_comes_before_the_trainer(runs: ModuleType) -> None:
    with pytest.raises(ConfigError, match="Write `class Wrong\\(ZeroshardMixin, Seq2SeqTrainer\\)`"):
        type("Wrong", (runs.Seq2SeqTrainer, runs.ZeroshardMixin), {})
