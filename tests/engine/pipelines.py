"""Runs of pipelined engines on the pool's workers, and plain loops to compare with."""

from typing import Any

import torch
from engine.models import OPTIMIZERS, batch, build
from torch import Tensor

import zeroshard as zs


def data(step: int, lane: int, lanes: int, rows: int) -> Tensor:
    """Lane `lane`'s part of the global batch [rows, 6] of a step."""
    return batch(step, lane, lanes, rows)


def train(mesh: zs.Mesh, name: str, plan: dict[str, Any], steps: int, rows: int, optimizer: str = "adamw") -> Any:
    """Losses [steps] and final weights of `steps` steps on global batches of `rows` rows."""
    model = build(name, seed=mesh.rank)  # other ranks start elsewhere, so rank 0's weights must win
    plan = {"balance": "parameters", **plan}
    engine = zs.Engine(model, OPTIMIZERS[optimizer], zs.Plan(**plan), mesh=mesh, example=(data(0, 0, 1, 2), 0))
    losses = []
    for step in range(steps):
        result = engine.train_step((data(step, engine.lane, engine.lanes, rows), step))
        losses.append(None if result.loss is None else result.loss.item())
    engine.flush()
    return losses, engine.state_dict()
