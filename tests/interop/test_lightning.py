"""lightning's Trainer above the engine ends where a plain loop ends, in every stage and through a checkpoint."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.regression import Regression, assert_follows, batches, loss_of, plain
from jobs import TORCHRUN, run_job
from selection import by_default
from torch import Tensor

if find_spec("lightning") is None:  # to import it takes seconds, and only the job needs it
    pytest.skip("lightning is not installed", allow_module_level=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, whole: bool) -> dict[str, Any]:
    """What rank 0 of one job of two ranks saw."""
    folder = tmp_path_factory.mktemp("lightning")
    words = (str(folder), "--whole") if whole else (str(folder),)
    run_job(ROOT / "tests" / "interop" / "lightning_runs.py", *words, **TORCHRUN)
    return torch.load(folder / "found.pt")


def bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in weights.items()}


@pytest.mark.parametrize("zero", by_default(range(4), 1, 3))
def test_it_follows_a_plain_loop(found: dict[str, Any], zero: int) -> None:
    losses, weights, step, norm, metrics = found[f"zero {zero}"]
    assert_follows(losses, bare(weights), plain(8))
    assert step == 8 and 0 < norm < 100
    assert metrics["held out"] == pytest.approx(found[f"test {zero}"][0]["held out"])


@pytest.mark.parametrize("zero", by_default([0, 1, 3], 1))
def test_accumulation(found: dict[str, Any], zero: int) -> None:
    losses, weights = found[f"accumulate {zero}"]
    assert_follows(losses, bare(weights), plain(4, accumulate=2))


def test_clipping_by_value(found: dict[str, Any]) -> None:
    losses, weights = found["by value"]
    assert_follows(losses, bare(weights), plain(8, by_value=1e-3))


@pytest.mark.parametrize("zero", by_default(range(4), 2, 3))
def test_manual_optimization(found: dict[str, Any], zero: int) -> None:
    losses, weights = found[f"manual {zero}"]
    assert_follows(losses, bare(weights), plain(8, clip=None, schedule=False))


@pytest.mark.parametrize("zero", by_default(range(4), 3))
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_averages_of_weights(found: dict[str, Any], kind: str, zero: int) -> None:
    mine, wanted = found[f"{kind} {zero}"]
    assert_alike(mine, wanted)
    model = Regression()
    model.load_state_dict(bare(wanted[1]))
    with torch.no_grad():
        assert found[f"{kind} {zero} tested"]["held out"] == pytest.approx(float(model.loss(*batches())), rel=1e-4)


def test_an_average_goes_on_from_a_checkpoint(found: dict[str, Any]) -> None:
    assert_alike(*found["EMA goes on"])


def assert_alike(mine: Any, wanted: Any) -> None:
    """Metrics of the average, and its weights at the end, are those of lightning in one process."""
    assert float(mine[0]["held out"]) == pytest.approx(float(wanted[0]["held out"]), rel=1e-4)
    assert mine[1].keys() == wanted[1].keys()
    for name, values in wanted[1].items():
        torch.testing.assert_close(mine[1][name], values, rtol=1e-4, atol=1e-6)


def test_statistics_of_an_average_are_found_anew(found: dict[str, Any]) -> None:
    assert int(found["statistics"]["model.blocks.0.1.num_batches_tracked"]) == 8
    assert found["statistics"]["model.blocks.0.1.running_mean"].any()


def test_averages_under_16_bits_are_of_master_weights(found: dict[str, Any]) -> None:
    seen, ends = found["averages in bf16"]["EMA"]
    average = seen[1]
    for values in seen[2:]:
        average = 0.9 * average + 0.1 * values
    torch.testing.assert_close(ends, average, rtol=1e-6, atol=1e-7)
    assert not torch.equal(ends, ends.bfloat16().float())  # not rounded
    seen, ends = found["averages in bf16"]["SWA"]
    assert len(seen) == 1 + 3 * 8  # SWA averages at the start of each epoch
    torch.testing.assert_close(ends, (seen[0] + seen[8] + seen[16]) / 3, rtol=1e-6, atol=1e-7)


TURNS = ("zero 2", "zero 3", "zero 0", "zero 1", "offload")


@pytest.mark.parametrize("plan", by_default(TURNS, "zero 2", "zero 3"))
def test_optimizers_by_turns(found: dict[str, Any], plan: str) -> None:
    """As a GAN's, with clipping and a schedule for each, and a layer that none trains."""
    assert_same_weights(*found[f"turns, {plan}"])


def test_optimizers_by_turns_go_on_from_a_checkpoint(found: dict[str, Any]) -> None:
    assert_same_weights(*found["turns go on"])
    assert_same_weights(found["turns saved"], found["turns, zero 2"][1])


def assert_same_weights(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert mine.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(mine[name], values, rtol=1e-5, atol=1e-6, msg=name)


def test_optimizers_of_parameters_of_the_same_layers(found: dict[str, Any]) -> None:
    """Whose values arrive from the host in the same operation."""
    assert_same_weights(*found["turns of halves"])


def test_optimizers_by_turns_in_bf16(found: dict[str, Any]) -> None:
    losses = found["turns in bf16"]
    assert len(losses) == 8 and all(0 < loss < 2 for loss in losses) and losses[0] != losses[-1]


def test_optimizers_that_are_refused(found: dict[str, Any]) -> None:
    shared, halves, own, scaled, one = found["turns refused"]
    assert shared.startswith("OptimizerError: 'judge.bias' is in the optimizers 0 and 1 of configure_optimizers")
    assert halves.startswith("OptimizerError: 'generator.0.bias' belongs to a Linear that has parameters of several")
    assert own.startswith("OptimizerError: 'heat' belongs to a Gan") and "take zero=2" in own
    assert scaled.startswith("PlanError: precision='fp16' scales the losses of one optimizer") and "bf16" in scaled
    assert one.startswith("PlanError: There are ") and "strategy.engines" in one


def test_precision_is_taken_over_or_refused(found: dict[str, Any]) -> None:
    said = found["precisions"]
    assert said["default"] == "fp32 32-true" and said["of the plan"] == "bf16 bf16-mixed"
    assert said["bf16-mixed"] == said["bf16"] == "bf16 bf16-mixed"
    for name in ("bf16-true", "64", "other", "plugin"):
        assert said[name].startswith("PlanError: The Trainer has precision="), said[name]
    assert "sync_batchnorm=True converts layers" in said["sync_batchnorm"]
    assert "find_unused_parameters=...) is a setting of DDP" in said["DDP"]
    precision, losses = found["bf16"]
    assert precision == "bf16" and losses == pytest.approx(plain(8)[0][0], rel=0.05)


TAKEN = (
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "callbacks",
    "strategy",
)
REFUSED = ("sync_batchnorm",)  # and precisions without fp32 masters, as `test_precision_is_taken_over_or_refused` shows


def test_every_argument_of_the_trainer_is_taken_passed_or_refused(found: dict[str, Any]) -> None:
    arguments, passed = found["arguments"]
    devices = ("accelerator", "devices", "default_root_dir")  # which every run here passes
    assert sorted([*TAKEN, *REFUSED, *devices, *passed]) == sorted(arguments)
    steps, losses, weights = found["passed"]
    assert steps == losses == 6 and all(values.isfinite().all() for values in weights.values())


def test_groups_hold_the_modules_parameters(found: dict[str, Any]) -> None:
    assert found["groups"] == (True, True)


def test_losses_are_scaled(found: dict[str, Any]) -> None:
    losses, scale, skipped = found["fp16"]
    assert scale == 1024.0 and not skipped
    assert losses == pytest.approx(plain(8)[0][0], rel=0.02)


def test_a_run_goes_on_under_another_plan(found: dict[str, Any]) -> None:
    losses, weights = found["resumed"]
    assert_follows(losses, bare(weights), plain(16))
    loaded, saved = found["loaded"]
    assert all(torch.equal(loaded[name], value) for name, value in saved.items()) and set(loaded) == set(saved)
    assert found["files"] == ["run.ckpt"]


@pytest.mark.whole
@pytest.mark.parametrize("stop", [5, 7, 10, 14, 19])
def test_a_stopped_run_goes_on_bit_for_bit(found: dict[str, Any], stop: int) -> None:
    """Under another plan each; from the last checkpoint, also in the middle of an epoch."""
    straight, losses, _ = found[f"stop {stop}"]
    assert straight == pytest.approx(plain(20)[0][0], rel=1e-5)
    assert losses == straight[stop // 3 * 3 :]


@pytest.mark.whole
def test_a_run_goes_on_on_another_number_of_ranks(found: dict[str, Any], tmp_path: Path) -> None:
    kept = found["stop 10"][2]
    run_job(ROOT / "tests" / "interop" / "lightning_runs.py", str(tmp_path), "--one", kept, ranks=1, **TORCHRUN)
    model = Regression()
    losses, (x, y) = torch.load(tmp_path / "one.pt"), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    wanted = []
    for number in range(20):
        loss = loss_of(model, x, y, number, rows=8)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted[9:], rel=1e-6, abs=1e-7)


def test_what_is_refused(found: dict[str, Any]) -> None:
    microbatches, optimizers, second, none = found["errors"]
    assert none.startswith("OptimizerError: configure_optimizers gave no optimizer")
    assert microbatches.startswith("PlanError: pipeline_parallel=1 and microbatches=2 are for engine.train_step")
    assert optimizers.startswith("OptimizerError: 'model.first.weight' is in the optimizers 0 and 1")
    assert second.startswith("PlanError: The engine of the first fit still holds the module")


def test_a_callback_unfreezes_a_backbone(found: dict[str, Any]) -> None:
    """BackboneFinetuning adds a group of parameters that the engine has frozen, at a tenth of the rate."""
    weights, wanted = found["unfrozen"]
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)
