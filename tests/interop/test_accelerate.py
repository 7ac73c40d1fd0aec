"""A loop of accelerate over an engine follows the same loop on one process, and goes on from its own checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from selection import by_default

pytest.importorskip("accelerate")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> dict[str, Any]:
    """The records of one job of two ranks."""
    folder = tmp_path_factory.mktemp("accelerate")
    run_job(ROOT / "tests" / "interop" / "accelerate_runs.py", str(folder), *(["--whole"] if whole else []))
    return dict(torch.load(folder / "found.pt", weights_only=True))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The record of accelerate's own loop in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from interop import accelerate_runs as runs

        AcceleratorState._reset_state(reset_partial_state=True)  # of other tests in this process
        GradientState._reset_state()
        return runs.loop(Accelerator(**runs.SETTINGS), range(3))


@pytest.mark.parametrize(
    "case", by_default(["zero 0", "zero 1", "zero 2", "zero 3", "resumed"], "zero 0", "zero 3", "resumed")
)
def test_losses_norms_and_weights_are_those_of_one_process(
    found: dict[str, Any], plain: dict[str, Any], case: str
) -> None:
    run = found[case]
    assert len(run["losses"]) == 24
    for name in ("losses", "norms"):
        assert run[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6)
    for name, value in plain["weights"].items():
        torch.testing.assert_close(run["weights"][name], value, rtol=1e-5, atol=1e-6)


def test_a_saved_state_has_the_engines_part_and_those_of_accelerate(found: dict[str, Any]) -> None:
    assert found["files"] == ["random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "zeroshard"]


def test_an_engine_can_be_prepared(found: dict[str, Any]) -> None:
    assert found["adopted"]
    assert found["model"] == ["model.safetensors"]


def test_calls_that_cannot_work_name_the_way_out(found: dict[str, Any]) -> None:
    for error, words in zip(
        found["errors"],
        (
            "OptimizerError: prepare() was given a model and 0 optimizers",
            "ModelError: prepare() was given 2 models",
            "OptimizerError: prepare() was given a model and 2 optimizers",
            "PlanError: save_state() needs an engine. Call prepare(model, optimizer) first.",
            "PlanError: backward() needs an engine",
            "PlanError: Clipping was asked for 1 parameters, and the engine clips all that train; 'bias' is missing.",
            "PlanError: backward(retain_graph=...) is not for an engine.",
            "PlanError: load_state() needs the folder",
            "PlanError: pipeline_parallel=1 and microbatches=2 are for engine.train_step",
        ),
        strict=True,
    ):
        assert error.startswith(words)
