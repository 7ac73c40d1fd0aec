"""Errors that the loop of one rank of a pipeline catches: every rank ends with the rank, its stage and the error."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.models import OPTIMIZERS, build
from pipeline.pipelines import data
from pool import TIMEOUT, Pool, impatient
from torch import Tensor

import zeroshard as zs
from zeroshard.comm.mesh import mesh_of

TWO = {"pipeline_parallel": 2, "microbatches": 2, "pipeline_parallel.split": ("blocks.2",)}
# Ranks, model, plan.
PLANS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1f1b": (2, "Five", {}),
    "gpipe-tied": (2, "TiedFive", {"pipeline_parallel.schedule": "gpipe"}),
    "interleaved": (
        2,
        "Five",
        {
            "pipeline_parallel.schedule": "interleaved",
            "pipeline_parallel.virtual_stages": 2,
            "pipeline_parallel.split": ("blocks.1", "blocks.2", "blocks.3"),
        },
    ),
    "pipedream": (2, "Five", {"pipeline_parallel.schedule": "pipedream"}),
    "replicas": (4, "Five", {"zero": 1}),
    "sliced-replicas": (4, "Five", {"zero": 3}),
}
STEPS, HIT = 4, 1  # the step of the error


class Refused(ValueError):
    """The error of a bad sample."""


def refuse() -> None:
    raise Refused("sample 17 is empty")


class Trouble:
    """Raises at one place of a step of one rank while it is `on`."""

    def __init__(self, place: str) -> None:
        self.on, self.place = False, place

    def watch(self, engine: zs.Engine) -> None:
        block = engine.model.blocks[0 if "blocks.0" in engine.layers else 4]
        block.register_forward_pre_hook(lambda module, args: self.at("forward"))
        block.register_forward_hook(self._watched)

    def _watched(self, module: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.at("backward"))

    def at(self, place: str) -> None:
        if self.on and place == self.place:
            refuse()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.at("loss")
        return output


@impatient()
def swallow(mesh: zs.Mesh, names: list[str], place: str, culprit: int) -> dict[str, tuple[str, int, int]]:
    """A loop that catches the errors of its own batches; on groups of its own, since it may hang."""
    found = {}
    for name in names:
        ranks, model, plan = PLANS[name]
        own = mesh_of(list(range(ranks)), torch.device("cpu"), TIMEOUT)
        if mesh.rank >= ranks:
            continue
        assert own.store is not None
        store = dist.PrefixStore(f"swallow/{name}/{place}/{culprit}", own.store)
        trouble = Trouble(place)
        engine = zs.Engine(
            build(model), OPTIMIZERS["adamw"], zs.Plan.from_dict({**TWO, **plan}),
            mesh=replace(own, store=store, failures=store), example=(data(0, 0, 1, 2), 0),
            loss=trouble.loss,
        )  # fmt: skip
        trouble.watch(engine)
        told, times = "", 0
        for step in range(STEPS):
            trouble.on = hit = own.rank == culprit and step == HIT
            rows = data(step, engine.data_rank, engine.data_ranks, 8)
            try:
                engine.train_step((rows[: 1 if hit and place == "batch" else None], step))
                if place == "evaluation" and step >= HIT:
                    trouble.place = "forward"
                    with torch.no_grad():
                        engine(rows, step)
                    trouble.place = place
            except Refused:
                times += 1
            except zs.BatchError:
                times += hit
            except zs.CommError as error:
                told = str(error)
                break
        found[name] = (told, times, engine.steps)
    return found


# By the place of the error: the rank that it is on, and plans.
CASES: dict[str, tuple[int, list[str]]] = {
    "forward": (0, list(PLANS)),
    "loss": (1, ["1f1b", "gpipe-tied", "interleaved", "pipedream"]),
    "backward": (1, ["1f1b", "interleaved", "pipedream"]),
    "batch": (1, ["1f1b", "replicas"]),
    "evaluation": (1, ["1f1b", "pipedream", "replicas"]),
}


@pytest.mark.parametrize("place", CASES)
def test_an_error_that_one_rank_catches_ends_all(pool: Pool, place: str) -> None:
    """No rank waits until the timeout, none takes another step, and each is told of the cause."""
    culprit, names = CASES[place]
    answers = pool.run(swallow, 4, names, place, culprit)
    steps = HIT + (place == "evaluation")
    error = "BatchError: A batch of 1 does not make" if place == "batch" else "Refused: sample 17 is empty"
    for name in names:
        ranks = PLANS[name][0]
        for rank, answer in enumerate(answers[:ranks]):
            told, times, taken = answer[name]
            stage = "" if place == "batch" else f" of stage {culprit * 2 // ranks} left engine"
            assert told and "gave up" not in told, (name, rank, told)
            assert rank == culprit or (f"ank {culprit}{stage}" in told and error in told), (name, rank, told)
            assert (times, taken) == (rank == culprit, steps), (name, rank)
