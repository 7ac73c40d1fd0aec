"""Batches as a job cuts them, its ranks, and its tolerances."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from verification.jobs import build, job

import zeroshard as zs
from zeroshard.errors import BatchError, ModelError
from zeroshard.verification.job import default_ranks, name_parts, rows_between, rows_of


@pytest.mark.parametrize("ranks, plan, data_ranks", [
    (4, {"zero": 2}, 4), (4, {"zero": 1, "shard_group": 2}, 4), (4, {"pipeline_parallel": 2}, 2),
    (3, {"pipeline_parallel": 2, "pipeline_parallel.replicas": (2, 1), "microbatches": 2}, 1), (1, {}, 1),
])  # fmt: skip
def test_data_ranks(ranks: int, plan: dict[str, object], data_ranks: int) -> None:
    assert replace(job("Five", ranks), plan=zs.Plan.from_dict(plan)).data_ranks == data_ranks


def test_microbatches_hold_each_row_once() -> None:
    made = job("Five", 2, zero=2, microbatches=4)
    parts = [part for rank in range(2) for part in made.microbatches(1, rank)]
    assert len(parts) == made.parts == 8 and sum(share for _, share in parts) == pytest.approx(1)
    whole = made.batch(1)[0]
    assert torch.equal(torch.cat([batch[0] for batch, _ in parts]), whole)


def test_a_fixed_batch_is_rotated() -> None:
    made = replace(job("Five", 2), batch={"x": torch.arange(4)})
    assert made.rank_batch(0, 0)["x"].tolist() == [0, 1] and made.rank_batch(1, 0)["x"].tolist() == [1, 2]


def test_rows_that_do_not_divide_are_refused() -> None:
    made = replace(job("Five", 2, microbatches=2), batch=torch.zeros(6, 3))
    assert len(made.microbatches(0, 0)) == 2
    with pytest.raises(BatchError, match="5 rows does not make 2 microbatches on each of 2 data ranks; give a multipl"):
        replace(made, batch=torch.zeros(5, 3)).microbatches(0, 0)
    with pytest.raises(BatchError, match=r"first dimensions \[2, 3\]"):
        rows_of((torch.zeros(2), torch.zeros(3)))
    assert rows_between({"a": torch.arange(4), "b": 7}, 1, 3)["b"] == 7


def test_exact_jobs_compute_and_send_fp32() -> None:
    made = job("Five", 2, precision="bf16", reduce_dtype="fp16", offload="optimizer", **{"offload.moments": "8bit"})
    assert made.tolerance > made.exact().tolerance == 2.0**-15
    assert (made.exact().plan.precision, made.exact().plan.offloading.moments) == ("fp32", "fp32")


@pytest.mark.parametrize("plan, ranks", [
    ({}, 2), ({"shard_group": 2}, 4), ({"pipeline_parallel": 4}, 8),
    ({"pipeline_parallel": 2, "pipeline_parallel.replicas": (2, 1), "microbatches": 2}, 3),
])  # fmt: skip
def test_the_default_number_of_ranks(plan: dict[str, object], ranks: int) -> None:
    assert default_ranks(zs.Plan.from_dict(plan)) == ranks


def test_parts_are_named_by_rank_where_all_microbatches_are_among_them() -> None:
    assert name_parts([2, 3], 2) == "data rank 1"
    assert name_parts([1, 3], 2) == "microbatch 1 of data ranks 0, 1"


def test_models_have_values_in_fp32_and_are_modules() -> None:
    made = replace(job("Five", 2), factory=partial(nn.Linear, 2, 2, dtype=torch.bfloat16))
    assert {p.dtype for p in made.model(0).parameters()} == {torch.float32}
    with pytest.raises(ModelError, match="returned int"):
        replace(made, factory=int).model(0)  # type: ignore[arg-type]
    assert torch.equal(job("Five", 2).model(3).embed.weight, job("Five", 2).model(3).embed.weight)  # type: ignore[arg-type, union-attr]
    assert build("Words")(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 2, 13)
