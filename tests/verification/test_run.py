"""`zs.verify` in processes of its own: equal runs, refusals, notes, and errors of the ranks."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from verification.jobs import ADAMW, build, data, job, padded

import zeroshard as zs
from zeroshard.errors import BatchError, CommError, ModelError, PlanError
from zeroshard.verification.processes import run_ranks
from zeroshard.verification.run import verify_jobs


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


def test_means_over_unlike_numbers_of_tokens_are_noted() -> None:
    (found,) = verify_jobs([replace(job("Padded", 1, microbatches=2), batch=padded)])
    assert not isinstance(found, Exception) and found.ok
    assert "parts count alike although they hold unlike numbers of tokens" in found.notes[0]


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
