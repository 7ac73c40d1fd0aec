"""Published bugs, put into the engine one at a time, are found, and the module is named in which each is."""

from dataclasses import replace
from typing import Any

import pytest
from pool import Pool
from selection import by_default
from verification import zoo_jobs
from verification.injected import BUGS, around
from verification.jobs import job, padded, summed

import zeroshard as zs
from zeroshard.pipeline.run.executor import Executor
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.run import compared

STREAMED: dict[str, Any] = {"zero": 3, "transport": "network"}
PIPELINED: dict[str, Any] = {"pipeline_parallel": 2, "microbatches": 4}
CASES: dict[str, tuple[VerificationJob, str, str, str]] = {  # the module, the collective, and words of the cause
    "missing_sum_over_an_axis": (
        job("Five", 4, zero=2, shard_group=2, transport="network"),
        *("blocks.1.down", "average replicas of blocks.1", "data ranks 2, 3 is missing"),
    ),
    "divided_by_the_wrong_group": (
        job("Five", 2, **STREAMED),
        *("blocks.2.down", "reduce gradients of blocks.2", "0.5 times the mean"),
    ),
    "local_token_counts": (
        replace(job("Words", 2, zero=2, microbatches=2), loss=summed, batch=padded),
        *("summed", "", "each part counts alike"),
    ),
    "dropped_microbatch": (
        job("Five", 2, zero=2, microbatches=2),
        *("blocks.3.down", "", "microbatch 0 of data ranks 0, 1 is missing"),
    ),
    "untied_head": (
        job("TiedFive", 2, **PIPELINED),
        *("head", "repay their gradients of head.weight", "its use as head.weight is missing"),
    ),
    "stale_weights": (
        job("Five", 2, **STREAMED),
        *("blocks.1.norm", "gather parameters of blocks.1", "stale: that of the start"),
    ),
    "norm_without_a_shard": (
        job("Five", 2, zero=2, clip_norm=0.1),
        *("blocks.2.", "agreement on the step", "the squares of rank 1's slice of blocks.2"),
    ),
    "reduced_dtype": (
        job("Five", 2, **STREAMED),
        *("blocks.3.down", "reduce gradients of blocks.3", "rounded to bf16 on its way"),
    ),
    "dropped_bias": (job("Five", 2, **STREAMED), *("blocks.2.up", "", "its bias is not added")),
    "swapped_shard": (
        job("Five", 2, **STREAMED),
        *("blocks.1", "gather parameters of blocks.1", "is where that of rank 0 should be"),
    ),
    "unsummed_input_gradient": (
        zoo_jobs.job("split-gpt", "tensor2-whole"),
        *("blocks.1.mlp_norm", "sum activations", "its sum over the ranks that split layers is missing"),
    ),
    "bias_of_every_rank": (
        zoo_jobs.job("split-gpt2", "tensor2-whole"),
        *("transformer.h.1.mlp.c_proj", "", "each rank adds its bias"),
    ),
    "unsummed_copies_of_heads": (
        zoo_jobs.job("split-llama-1", "tensor2"),
        *("model.layers.1.self_attn.k_proj", "reduce gradients of model.layers.1", "the sum over them is missing"),
    ),
}  # fmt: skip

OF_TRANSFORMERS = {"bias_of_every_rank", "unsummed_copies_of_heads"}  # whose models are of that package
HERE = [bug for bug in BUGS if zoo_jobs.HF or bug not in OF_TRANSFORMERS]


def observe_broken(mesh: zs.Mesh, bug: str, job: VerificationJob) -> RankRecord:
    """What a rank sees of a job while the engine has a bug."""
    with BUGS[bug](mesh.rank):
        return observe(mesh, job)


DEAR = {"bias_of_every_rank", "unsummed_copies_of_heads", "untied_head"}


@pytest.mark.parametrize("bug", by_default(HERE, *(bug for bug in HERE if bug not in DEAR)))
def test_a_bug_is_named_by_module(pool: Pool, bug: str) -> None:
    broken, module, collective, cause = CASES[bug]
    found = compared(broken, pool.run(observe_broken, broken.ranks, bug, broken))
    assert found.first is not None, str(found)
    assert found.first.module.startswith(module), str(found)
    assert (found.first.collective or "").startswith(collective) and bool(collective) == bool(found.first.collective)
    assert cause in found.first.cause, str(found)
    screen = str(found).splitlines()
    assert len(screen) <= 24 and max(map(len, screen)) <= 100
    assert found.first.module in str(found)


def observe_damaged(mesh: zs.Mesh, job: VerificationJob) -> RankRecord:
    """What a rank sees while activations change on their way to the second stage."""

    def enter(original: Any, self: Any, action: Any) -> Any:
        flight = original(self, action)
        if flight.hidden is not None:
            flight.hidden = (flight.hidden.detach() * 1.01).requires_grad_()
        return flight

    with around(Executor, "_enter", enter):
        return observe(mesh, job)


def test_a_damaged_message_is_named_by_the_modules_at_its_ends(pool: Pool) -> None:
    sound = job("Five", 2, pipeline_parallel=2, microbatches=2, **{"pipeline_parallel.split": ("blocks.2",)})
    found = compared(sound, pool.run(observe_damaged, 2, sound)).first
    assert found is not None and (found.what, found.step) == ("forward", 0)
    assert found.module.startswith("blocks.2") and found.collective == "send activations after blocks.1"
    assert found.cause == "its input is not what blocks.1 returned"


@pytest.mark.parametrize("bug", by_default(HERE, "dropped_microbatch", "norm_without_a_shard", "dropped_bias"))
def test_without_the_bug_nothing_is_found(pool: Pool, bug: str) -> None:
    sound = CASES[bug][0]
    found = compared(sound, pool.run(observe, sound.ranks, sound))
    assert found.ok, str(found)
    assert found.notes == ()
