"""`zs.verify`: the run under a plan beside the same run in one process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ModelError, PlanError, ZeroshardError
from zeroshard.plan import Plan
from zeroshard.planning.settings import flat
from zeroshard.verification.bisect import Bisection
from zeroshard.verification.compare import Side, tensors
from zeroshard.verification.job import LossOf, OptimizerOf, VerificationJob, default_ranks
from zeroshard.verification.narrow import (
    config_of,
    difference,
    language_factory,
    narrowed,
    shallow_factory,
    token_batch,
)
from zeroshard.verification.observe import RankRecord
from zeroshard.verification.plain import Plain, one_thread
from zeroshard.verification.processes import run_ranks
from zeroshard.verification.result import Verification

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
ROWS = 2  # of each microbatch, where there is no batch


def verify(
    model: Callable[[], nn.Module] | str | Path | Any,
    plan: Plan,
    batch: Any = None,
    *,
    optimizer: OptimizerOf | None = None,
    loss: LossOf | None = None,
    ranks: int | None = None,
    steps: int = 3,
    exact: bool = True,
) -> Verification:
    """Train a few steps under a plan and in one process, and compare losses, norms, gradients and updates.

    The ranks are processes of this machine that compute on its CPUs. In a script, call this below
    `if __name__ == "__main__":`, since those processes import the script.

    Args:
        model: a function without arguments that makes the model; or a Hugging Face configuration, or the path of a
            config.json, which is narrowed. Of other models with many like blocks, the fewest that the plan can cut are
            kept.
        plan: to be verified.
        batch: the whole batch of a step, tensors [B, ...], whose rows are rotated from step to step; or a function of
            the step's number. Needed for models other than causal language models of Hugging Face.
        optimizer: of the parameters; AdamW by default.
        loss: of (output, microbatch): a mean over its rows, or (sum, count); by default the output or its loss.
        ranks: how many; by default two for each stage, or two shard groups.
        exact: compute in fp32 throughout, whatever dtypes and codes the plan names, so that differences are no
            rounding; otherwise as the plan says, with tolerances of its dtypes and codes.

    Raises:
        PlanError: a plan whose run is not that of a plain loop by design.
        ModelError, BatchError: a model of which two forwards of the same rows differ, or a batch that does not divide.
        ZeroshardError: the engine refuses the plan or the model.
    """
    began = time.monotonic()
    count = default_ranks(plan) if ranks is None else ranks
    config, notes = config_of(model), []
    if config is not None:
        small = narrowed(config, plan, tokens=batch is None)
        factory = language_factory(small)
        if changed := difference(config, small):
            notes.append(f"narrowed: {changed}")
    elif callable(model):
        factory, changed = shallow_factory(model, plan)
        if changed:
            notes.append(f"narrowed: {changed}")
    else:
        raise ModelError(f"The model is a {type(model).__name__}; give a function that makes it, or a configuration.")
    job = VerificationJob(factory, plan, batch, optimizer or ADAMW, loss, count, steps, cast=exact)
    if batch is None and config is None:
        raise ModelError("Only for causal language models of Hugging Face a batch is known; give batch=...")
    if batch is None:
        job = replace(job, batch=token_batch(small.vocab_size, ROWS * job.parts))
    made = job.exact() if exact else job
    notes += left_out(plan, made.plan)
    (found,) = verify_jobs([made])
    if isinstance(found, Exception):
        raise found
    seconds = time.monotonic() - began
    return replace(found, notes=(*notes, *found.notes), seconds=seconds)


def verify_jobs(jobs: Sequence[VerificationJob]) -> list[Verification | ZeroshardError]:
    """The verdict or the error of each job; jobs of equally many ranks share their processes.

    Raises:
        ModelError: see `verify`.
    """
    for job in jobs:
        check_job(job)
    return [
        found if isinstance(found, Exception) else compared(job, found)
        for job, found in zip(jobs, run_ranks(jobs), strict=True)
    ]


def left_out(before: Plan, after: Plan) -> list[str]:
    """A note on the settings of a plan that another lacks, if there are any."""
    given, kept = (dict(flat(plan.as_dict())) for plan in (before, after))
    changed = ", ".join(f"{name}={value!r}" for name, value in given.items() if kept[name] != value)
    return [f"compared without what rounds: {changed}"] if changed else []


def check_job(job: VerificationJob) -> None:
    """Refuse jobs that cannot be compared with a plain loop.

    Raises:
        PlanError: weights that are late by design. BatchError: a batch that does not divide.
    """
    if job.plan.streams:
        raise PlanError(
            f"schedule={job.plan.pipeline.schedule!r} never flushes: its updates are late by design, and its run is "
            f"not that of a plain loop. Verify the same cut with schedule='1f1b'."
        )
    if job.steps < 1:
        raise PlanError(f"steps is {job.steps}; it must be 1 or more.")
    job.microbatches(0, 0)


def compared(job: VerificationJob, records: Sequence[RankRecord]) -> Verification:
    """The verdict on the records of all ranks.

    Raises:
        ModelError: two forwards of the same rows differ.
    """
    began = time.monotonic()
    with one_thread():
        side = Side(job, records)
        plain = Plain(job, tensors(records[0].start))
        plain.refuse_unlike_calls()
        bisection = Bisection(side, Plain(job, tensors(records[0].start)))
        first = bisection.run()
        apart, note = bisection.whole_batches(plain)
    return Verification(
        f"{type(plain.model).__name__}, {sum(p.numel() for p in plain.model.parameters()):,} parameters, under "
        f"{job.plan!r} on {job.ranks} rank{'s' * (job.ranks > 1)}, {job.steps} steps",
        first or apart,
        bisection.table.rows(),
        (note,) if note else (),
        time.monotonic() - began,
    )
