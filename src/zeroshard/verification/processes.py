"""The ranks of the run under the plan, as processes of this machine that compute on its CPUs."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from zeroshard import errors
from zeroshard.comm.mesh import SETTLE, Mesh, keep_freed_memory, mesh_of, stay_inside
from zeroshard.errors import CommError, ModelError, ZeroshardError
from zeroshard.verification.job import VerificationJob
from zeroshard.verification.observe import RankRecord, observe
from zeroshard.verification.plain import one_thread

IMPORTED = ["torch", "torch.distributed", "torch._dynamo", "zeroshard.engine", "zeroshard.verification.observe"]
TIMEOUT = 60.0  # seconds that a collective may wait
GRACE = 3.0  # seconds for the other ranks to report their errors, once one has failed
PATIENCE = 600.0  # longest seconds of a job


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str
    text: str


def run_ranks(jobs: Sequence[VerificationJob]) -> list[list[RankRecord] | ZeroshardError]:
    """The observations of every rank for each job, or its error; jobs of equally many ranks share their processes.

    Jobs that follow one in which only some ranks failed are not run; their error says so.
    """
    ranks = jobs[0].ranks
    if ranks == 1:
        return [_alone(job) for job in jobs]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    found: list[list[RankRecord] | ZeroshardError] = []
    with tempfile.TemporaryDirectory(prefix="zeroshard-verify-") as folder:
        pipes: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(ranks):
                own, other = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(rank, ranks, folder, list(jobs), other), daemon=True)
                try:
                    process.start()
                except (AttributeError, TypeError, ValueError) as error:
                    raise ModelError(
                        f"What is verified cannot be sent to other processes ({error}). Give functions of a module, or "
                        f"partials of them, as the model's factory, the optimizer, the loss and the batch."
                    ) from error
                other.close()
                pipes.append(own)
                processes.append(process)
            for _ in jobs:
                answers = _answers(pipes)
                found.append(_joined(answers))
                if any(isinstance(answer, _Failure) for answer in answers) and found[-1].__class__ is CommError:
                    break
        finally:
            for process in processes:
                process.join(SETTLE * 20 if len(found) == len(jobs) else 0)
                process.kill()
                process.join()
    last = found[-1] if found else CommError("No rank answered.")
    return found + [CommError(f"An earlier job left the ranks apart: {last}")] * (len(jobs) - len(found))


def _alone(job: VerificationJob) -> list[RankRecord] | ZeroshardError:
    """A job of one rank, in this process."""
    with one_thread():
        try:
            return [observe(Mesh(timeout=TIMEOUT), job)]
        except ZeroshardError as error:
            return error


def _work(rank: int, ranks: int, folder: str, jobs: list[VerificationJob], pipe: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    stay_inside()
    patience = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=patience)
    mesh = mesh_of(list(range(ranks)), torch.device("cpu"), TIMEOUT)
    for job in jobs:
        try:
            pipe.send(observe(mesh, replace(job, ranks=ranks)))
        except ZeroshardError as error:
            pipe.send(_Failure(type(error).__name__, str(error)))
        except Exception as error:
            place = traceback.format_exc(limit=-1).strip().splitlines()
            pipe.send(_Failure("", f"{type(error).__name__}: {error} ({' '.join(map(str.strip, place[1:2]))})"))
    time.sleep(SETTLE)  # gloo's threads free their tensors a little after a result arrives
    with suppress(Exception):
        dist.destroy_process_group()


def _answers(pipes: Sequence[Connection]) -> list[RankRecord | _Failure | None]:
    """The answer of each rank for a job; None for a rank without one in time, once another has failed."""
    found: dict[int, RankRecord | _Failure] = {}
    end = time.monotonic() + PATIENCE
    while len(found) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(left, max(0.0, end - time.monotonic()))
        if not ready:
            break
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    found[rank] = _Failure("CommError", "the process of this rank ended")
                if isinstance(found[rank], _Failure):
                    end = min(end, time.monotonic() + GRACE)
    return [found.get(rank) for rank in range(len(pipes))]


def _joined(answers: Sequence[RankRecord | _Failure | None]) -> list[RankRecord] | ZeroshardError:
    """All ranks' records, or one error for all."""
    records = [answer for answer in answers if isinstance(answer, RankRecord)]
    if len(records) == len(answers):
        return records
    failures = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, _Failure)]
    if len(failures) < len(answers):
        rank, failure = failures[0] if failures else (answers.index(None), _Failure("", "it did not answer"))
        return CommError(f"Under the plan, rank {rank} failed alone: {failure.text}")
    rank, failure = next((item for item in failures if item[1].kind != "CommError"), failures[0])
    kind = getattr(errors, failure.kind, ModelError)
    return kind(failure.text) if failure.kind else ModelError(f"Under the plan, rank {rank} failed: {failure.text}")
