"""Trainers of transformers and TRL over an engine: their losses, and the arguments that people give them."""

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interop import trainer_cases as cases
from jobs import run_job
from selection import by_default

import zeroshard as zs
from zeroshard.errors import ConfigError, ModelError

for needed in ("transformers", "accelerate", "trl"):
    pytest.importorskip(needed)
ROOT = Path(__file__).parents[2]
CASES = [(name, plan) for name in cases.NAMES for plan in cases.PLANS]
EXACT = ("loss", "learning_rate", "eval_loss", "eval_tokens", "mean_token_accuracy", "accuracy")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    """The module that makes the trainers, which takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are imported
        return importlib.import_module("interop.transformers_runs")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> dict[str, Any]:
    """The records of one job of two ranks, or with `--whole` of one for each trainer."""
    records: dict[str, Any] = {"curves": {}}
    for part in ("dear", *cases.NAMES) if whole else ("default",):
        folder = tmp_path_factory.mktemp("trainers")
        run_job(ROOT / "tests" / "interop" / "transformers_runs.py", str(folder), part)
        found = torch.load(folder / "found.pt", weights_only=True)
        records |= {**found, "curves": records["curves"] | found["curves"]}
    return records


@pytest.fixture(scope="module")
def plain(runs: ModuleType, tmp_path_factory: pytest.TempPathFactory, whole: bool) -> dict[str, Any]:
    """The records of the same trainers in this process, without an engine."""
    from accelerate.state import AcceleratorState, GradientState

    folder = tmp_path_factory.mktemp("plain")
    AcceleratorState._reset_state(reset_partial_state=True)  # of other tests in this process
    GradientState._reset_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = {name: [""] for name in (cases.NAMES if whole else cases.DEFAULT)}
        return {"curves": runs.curves(folder, trained), **runs.plain_features(folder, whole)}


@pytest.mark.parametrize("case", by_default(CASES, *cases.DEFAULT.items()), ids=", ".join)
def test_losses_are_those_of_one_process(found: dict[str, Any], plain: dict[str, Any], case: tuple[str, str]) -> None:
    trainer, plan = case
    run, alone = found["curves"][f"{trainer}, {plan}"], plain["curves"][trainer]
    assert len(run["loss"]) == 20
    compared = [name for name in EXACT if name in alone]
    for name in compared:
        assert run[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-5), name
    assert run["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert ("eval_tokens" in compared) == (trainer == "seq2seq")  # generated, at every stage


def test_sums_over_tokens_with_label_smoothing(found: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in ("loss", "grad_norm"):
        assert found["accumulates"][name] == pytest.approx(plain["accumulates"][name], rel=1e-5)


def test_batches_without_a_label_count_nothing(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """On one rank, and on all of them, where the loss is 0 and the gradients are zeros."""
    mine, alone = found["few labels"], plain["few labels"]
    for name in ("loss", "grad_norm"):
        assert mine[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)
    assert 0 in alone["loss"] and len(alone["loss"]) == 20


@pytest.mark.whole
def test_bf16_is_the_precision_of_the_plan(found: dict[str, Any], plain: dict[str, Any]) -> None:
    precision, run = found["bf16"]
    assert precision == "bf16"
    assert run["loss"] == pytest.approx(plain["bf16"]["loss"], rel=5e-3)
    assert run["loss"] != plain["curves"]["trainer"]["loss"]


def test_a_stopped_run_resumes_bit_for_bit(found: dict[str, Any]) -> None:
    run = found["resumed"]
    assert len(run["straight"]) == 12
    assert run["resumed"] == run["straight"]


@pytest.mark.whole
@pytest.mark.parametrize("trainer", cases.NAMES)
def test_each_trainer_resumes_bit_for_bit(found: dict[str, Any], trainer: str) -> None:
    for stop in cases.stops_of(trainer):
        run = found[f"{trainer} at {stop}"]
        assert len(run["straight"]) == 12
        assert run["resumed"] == run["straight"], stop


def test_a_run_goes_on_on_another_number_of_ranks(
    found: dict[str, Any], plain: dict[str, Any], runs: ModuleType, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = runs.on_one_rank(tmp_path, runs.causal, found["kept"], few_labels=True)
    assert len(losses) == 20
    assert losses == pytest.approx(found["few labels"]["loss"], rel=1e-6, abs=1e-7)


@pytest.mark.whole
@pytest.mark.parametrize("trainer", cases.NAMES)
def test_each_trainer_goes_on_on_another_number_of_ranks(
    found: dict[str, Any], plain: dict[str, Any], runs: ModuleType, tmp_path: Path, trainer: str
) -> None:
    run = found[f"{trainer} at {cases.stops_of(trainer)[3]}"]  # of stage 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = runs.on_one_rank(tmp_path, runs.TRAINERS[trainer], run["kept"], max_steps=12)
    assert losses == pytest.approx(run["straight"], rel=1e-6, abs=1e-6)


@pytest.mark.whole
def test_a_run_goes_on_under_another_plan(found: dict[str, Any]) -> None:
    run = found["other plan"]
    assert run["resumed"] == pytest.approx(run["straight"], rel=1e-6)


@pytest.mark.whole
def test_compiled_blocks_give_the_same_losses(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert "graph" in found["layers"]
    assert found["compiled"]["loss"] == pytest.approx(plain["curves"]["trainer"]["loss"], rel=1e-5)


@pytest.mark.whole
def test_groups_by_length_are_those_of_ddp(found: dict[str, Any]) -> None:
    assert found["groups"]["loss"] == pytest.approx(found["groups, ddp"]["loss"], rel=1e-5)


@pytest.mark.parametrize("case", by_default(["best", "best of models"], "best"))
def test_the_best_weights_are_there_at_the_end(found: dict[str, Any], case: str) -> None:
    run = found[case]
    assert run["steps"] < 20  # early stopping
    assert run["loss"] == pytest.approx(run["best"], rel=1e-6)
    assert len(run["folders"]) == 2  # save_total_limit
    assert run["saved"]  # save_model writes them for from_pretrained


def test_a_resume_without_states_is_refused_unless_asked_for(found: dict[str, Any]) -> None:
    without, nothing, optimizer, elsewhere = found["errors"]
    assert without.startswith("CheckpointError") and "resume_without_states=True" in without
    assert nothing.startswith("CheckpointError") and "Leave resume_from_checkpoint out" in nothing
    assert optimizer.startswith("OptimizerError: The optimizer's states are in slices")
    assert elsewhere.startswith("CheckpointError: The ranks save into different folders")


@pytest.mark.whole
def test_a_resume_without_states_that_is_asked_for(found: dict[str, Any]) -> None:
    assert found["without states"][-1] == 12


def test_models_that_transformers_divided_are_refused(
    runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runs.llama()
    monkeypatch.setattr(type(model), "is_distributed_loading_by_transformers", True)
    arguments = runs.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ModelError, match="Load it without distributed_config"):
        runs.over(runs.Trainer, zs.Plan())(model, arguments)


def test_the_mixin_comes_before_the_trainer(runs: ModuleType) -> None:
    with pytest.raises(ConfigError, match="Write `class Wrong\\(ZeroshardMixin, Seq2SeqTrainer\\)`"):
        type("Wrong", (runs.Seq2SeqTrainer, runs.ZeroshardMixin), {})
