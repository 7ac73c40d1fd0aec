"""Runs of pipelined engines on the pool's workers, and plain loops to compare with."""

import functools
import math
from functools import partial
from typing import Any

import torch
from engine.models import OPTIMIZERS, batch, build
from torch import Tensor

import zeroshard as zs
from zeroshard.data.corpus import Batches, standard_library_corpus
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig


def data(step: int, data_rank: int, data_ranks: int, rows: int) -> Tensor:
    """Lane `data_rank`'s part of the global batch [rows, 6] of a step."""
    return batch(step, data_rank, data_ranks, rows)


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], steps: int, rows: int, optimizer: str = "adamw") -> Any:
    """Losses [steps] and final weights of `steps` steps on global batches of `rows` rows."""
    model = build(name, seed=mesh.rank)  # other ranks start elsewhere, so rank 0's weights must win
    plan = {"pipeline_parallel.balance": "parameters", **plan}
    engine = zs.Engine(model, OPTIMIZERS[optimizer], zs.Plan.from_dict(plan), mesh=mesh, example=(data(0, 0, 1, 2), 0))
    losses = []
    for step in range(steps):
        result = engine.train_step((data(step, engine.data_rank, engine.data_ranks, rows), step))
        losses.append(None if result.loss is None else result.loss.item())
    engine.flush()
    return losses, engine.state_dict()


def follow(mesh: zs.Mesh, name: str, plan: dict[str, Any], script: str, rows: int, optimizer: str) -> dict[str, Any]:
    """What one rank saw of a run on global batches of `rows` rows, which is recorded action by action.

    Args:
        script: a letter for each event: s a step, f a flush, e an evaluation of the next step's batch.
    """
    model = build(name, seed=mesh.rank)
    engine = zs.Engine(model, OPTIMIZERS[optimizer], zs.Plan.from_dict(plan), mesh=mesh, example=(data(0, 0, 1, 2), 0))
    seen: dict[str, Any] = {"data_rank": engine.data_rank, "layers": engine.layers}
    seen |= {"losses": [], "norms": [], "skipped": [], "evaluations": []}
    with engine.trace() as trace:
        for event in script:
            batch = (data(engine.steps, engine.data_rank, engine.data_ranks, rows), engine.steps)
            if event == "s":
                result = engine.train_step(batch)
                seen["losses"].append(None if result.loss is None else result.loss.item())
                seen["norms"].append(result.grad_norm)
                seen["skipped"].append(result.skipped)
            elif event == "e":
                with torch.no_grad():
                    seen["evaluations"].append(engine(*batch).item())
            else:
                engine.flush()
        row = engine.memory()["parameters"]
        seen["parameter bytes"] = (row.measured_bytes, row.planned_bytes)
        seen["weights"] = engine.state_dict()
    assert engine.pipeline is not None
    seen["skips"] = [tuple(skip) for skip in engine.pipeline.skips]
    timed = {action.kind for action, _, _ in trace.actions}
    seen["promised"] = [str(a) for a in engine.pipeline.stretch(len(script))[mesh.rank] if a.kind in timed]
    seen["actions"] = [str(action) for action, _, _ in trace.actions]
    return seen


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """The bytes of the built-in corpus, for training and for validation."""
    corpus = standard_library_corpus()
    train, validation = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (corpus.train, corpus.validation)
    )
    return train, validation


def train_gpt(mesh: zs.Mesh, plan: dict[str, Any], updates: int, rows: int, rate: float) -> float:
    """Validation loss of a small GPT of four blocks after `updates` updates on the built-in corpus.

    Args:
        rows: of 32 tokens in one update, over all replicas.
        rate: the largest learning rate, after a tenth of the updates; it falls to a twentieth.
    """
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocabulary=256, context=32, width=32, heads=2, layers=4))
    plan = {"pipeline_parallel.split": ("blocks.2",), "pipeline_parallel": 2, **plan}
    train, validation = (Batches(part, 32, seed=0) for part in text())
    example = (train.rows([0])[:, :-1],) * 2
    engine = zs.Engine(model, partial(torch.optim.AdamW, lr=rate), zs.Plan.from_dict(plan), mesh=mesh, example=example)
    each = engine.plan.microbatches // engine.plan.microbatches_per_update
    for step in range(updates // each):
        done = step * each / updates
        factor = min(1.0, 10 * done + 0.05) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in engine.optimizer.param_groups:
            group["lr"] = rate * factor
        tokens = train.rows(range(step * rows * each, (step + 1) * rows * each), engine.data_rank, engine.data_ranks)
        engine.train_step((tokens[:, :-1], tokens[:, 1:]))
    with torch.no_grad():
        tokens = validation.rows(range(256))
        return engine(tokens[:, :-1], tokens[:, 1:]).item()
