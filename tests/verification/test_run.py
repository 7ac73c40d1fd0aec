"""`zs.verify` in processes of its own: equal runs, refusals, notes, and errors of the ranks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from verification import stateful
from verification.jobs import ADAMW, build, data, job, padded, summed

import zeroshard as zs
from zeroshard.cli.verify import build_gpt, gpt_batch
from zeroshard.errors import BatchError, CommError, ModelError, PlanError
from zeroshard.recompute.policy import LOSSY
from zeroshard.train.sizes import GPTConfig
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.narrow import language_model, token_batch
from zeroshard.verification.processes import run_ranks
from zeroshard.verification.run import compared, verify_jobs


class FailsOnRankOne(nn.Module):
    """Fails on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            raise RuntimeError("no luck")
        result: torch.Tensor = self.layer(x).square().mean()
        return result


def test_a_sound_run_is_equal_and_fits_a_screen() -> None:
    found = zs.verify(partial(build, "TiedFive"), zs.Plan(zero=3, transport="network"), data, optimizer=ADAMW)
    assert found.ok and found.first is None and isinstance(found, zs.Verification)
    rows = {row.what: row for row in found.table}
    assert {"losses", "gradients", "gradient norm", "updates", "module outputs", "copies"} <= rows.keys()
    assert all(row.count > 0 and row.worst <= row.tolerance for row in found.table)
    screen = str(found).splitlines()
    assert len(screen) <= 24 and max(map(len, screen)) <= 100
    assert "The run under the plan is that of the plain loop in one process." in screen
    assert found.as_dict()["ok"] is True


def test_one_rank_needs_no_other_process() -> None:
    assert zs.verify(partial(build, "Five"), zs.Plan(zero=0, microbatches=2), data, ranks=1, steps=1).ok


def test_dtypes_of_the_plan_are_kept_on_request() -> None:
    found = zs.verify(partial(build, "Five"), zs.Plan(precision="bf16"), data, ranks=1, steps=2, exact=False)
    worst = {row.what: row.worst for row in found.table}
    assert found.ok and 1e-4 < worst["gradients"] < 0.125
    assert zs.verify(partial(build, "Five"), zs.Plan(precision="bf16"), data, ranks=1, steps=2).table[2].worst < 1e-6


def test_means_over_unlike_numbers_of_tokens_fail() -> None:
    (found,) = verify_jobs([replace(job("Padded", 1, microbatches=2), batch=padded)])
    assert not isinstance(found, Exception) and not found.ok and found.first is not None
    assert found.first.what == "whole batch" and found.first.module == "Padded (its loss)"
    assert "unlike numbers of tokens" in found.first.cause
    row = found.table[0]
    assert row.what == "whole batch" and row.worst > row.tolerance
    (sound,) = verify_jobs([replace(job("Words", 1, microbatches=2), batch=padded, loss=summed)])
    assert not isinstance(sound, Exception) and sound.ok and not sound.notes


def test_rows_that_act_on_each_other_are_noted() -> None:
    (found,) = verify_jobs([replace(job("Five", 1, microbatches=2), factory=stateful.Normalized)])
    assert not isinstance(found, Exception) and found.ok and "act on each other" in found.notes[0]


@pytest.mark.parametrize("kind", [stateful.Counts, stateful.CountsInTensor, stateful.CountsInBuffer, stateful.Averages])
def test_counters_and_averages_are_state(kind: type[nn.Module]) -> None:
    (found,) = verify_jobs([replace(job("Five", 1, microbatches=2, recompute="blocks"), factory=kind)])
    assert not isinstance(found, Exception) and found.ok


@pytest.mark.parametrize("code", LOSSY)
def test_codes_of_saved_tensors_are_left_out_or_held_to_their_rounding(code: str) -> None:
    factory = partial(build_gpt, GPTConfig(192, 16, 32, 2, 1))
    plan = zs.Plan(activations=zs.Activations(compress=("binarize", code)))
    for exact in (True, False):
        found = zs.verify(factory, plan, gpt_batch(4), ranks=1, steps=1, exact=exact)
        worst = {row.what: row for row in found.table}
        assert found.ok and worst["module outputs"].worst == 0.0 and worst["losses"].tolerance < 1e-4
        assert (worst["gradients"].worst < 1e-6) == exact
        assert found.notes == (f"compared without what rounds: activations.compress={('binarize', code)}",) * exact


def test_a_rounding_of_one_rank_is_no_slice_and_no_collective() -> None:
    plan = zs.Plan(activations=zs.Activations(compress=("int4",)))
    made = VerificationJob(partial(build_gpt, GPTConfig(192, 16, 32, 2, 1)), plan, gpt_batch(4), ADAMW, None, 1, 1)
    records = run_ranks([made])[0]
    assert not isinstance(records, Exception)
    found = compared(made.exact(), records)
    assert found.first is not None and found.first.what == "gradient"
    assert found.first.collective is None and "slice" not in found.first.cause


def test_the_model_itself_is_named_by_its_class() -> None:
    made = VerificationJob(stateful.Bare, zs.Plan(), torch.randn(4, 6), ADAMW, stateful.squares, 1, 1)
    records = run_ranks([made])[0]
    assert not isinstance(records, Exception)
    step = records[0].steps[0]
    for number, share in enumerate(step.shares):
        share.values[:] = np.random.default_rng(number).normal(size=share.values.shape)
    step.calls[0]["", 0].gradients[0] = (36.0, 2.0, *range(8))
    found = compared(made, records).first
    assert found is not None and found.module == "Bare" and "the gradient of Bare's output differs" in found.cause


def test_a_count_in_the_batch_makes_the_loss_a_sum() -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 24}
    batch = dict(token_batch(24, 4, 6))
    batch["labels"] = batch["labels"].masked_fill(torch.arange(6) > torch.tensor([[1], [2], [5], [5]]), -100)
    factory = partial(language_model, json.dumps(config))
    found = zs.verify(factory, zs.Plan(microbatches=2), {**batch, "num_items_in_batch": 1}, ranks=1, steps=1)
    assert found.ok and found.notes == ()
    assert not zs.verify(factory, zs.Plan(microbatches=2), batch, ranks=1, steps=1).ok


def test_what_cannot_be_compared_is_refused() -> None:
    streams = zs.Plan(pipeline_parallel=zs.Pipeline(2, schedule="2bw"), microbatches=2)
    with pytest.raises(PlanError, match=r"never flushes.*schedule='1f1b'"):
        zs.verify(partial(build, "Five"), streams, data)
    with pytest.raises(ModelError, match=r"draws random numbers.*dropout to 0"):
        zs.verify(partial(build, "Dropped"), zs.Plan(), data, ranks=1)
    with pytest.raises(ModelError, match="give batch="):
        zs.verify(partial(build, "Five"), zs.Plan())
    with pytest.raises(ModelError, match="is a int; give a function"):
        zs.verify(7, zs.Plan(), data)
    with pytest.raises(BatchError, match="give a multiple of 4 rows"):
        zs.verify(partial(build, "Five"), zs.Plan(microbatches=2), torch.zeros(3, 5))
    with pytest.raises(PlanError, match="steps is 0"):
        zs.verify(partial(build, "Five"), zs.Plan(), data, steps=0)


def test_errors_of_ranks_are_raised_once() -> None:
    (found,) = run_ranks([job("Five", 3, pipeline_parallel=2)])
    assert isinstance(found, PlanError)
    lonely = job("Five", 2)
    (failed,) = run_ranks([replace(lonely, factory=FailsOnRankOne, batch=torch.ones(4, 2))])
    assert isinstance(failed, (CommError, ModelError)) and "no luck" in str(failed)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be sent to other processes"):
        zs.verify(lambda: build("Five"), zs.Plan(), data)


def test_a_configuration_is_narrowed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}')
    found = zs.verify(file, zs.Plan(zero=1), ranks=1, steps=1)
    assert found.ok and "hidden_size 4096 -> " in found.notes[0]
