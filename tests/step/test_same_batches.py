"""Tensor and stage ranks that are given different batches: an error on every rank in that step, with the way out."""

from functools import partial
from typing import Any

import pytest
import torch
from jobs import error_of
from pool import Pool

import zeroshard as zs
from zeroshard.step.same_batches import SameBatches
from zeroshard.train.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocabulary=20, context=8, width=8, heads=2, layers=2)

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_parallel": 2}),
    "tensor-and-data": (4, {"tensor_parallel": 2, "zero": 1}),
    "stages": (2, {"pipeline_parallel": 2, "microbatches": 2}),
    "stages-without-flush": (
        2,
        {"pipeline_parallel": 2, "pipeline_parallel.schedule": "pipedream", "microbatches": 2},
    ),
    "stages-and-tensor": (4, {"pipeline_parallel": 2, "tensor_parallel": 2, "microbatches": 2}),
}


def train(mesh: zs.Mesh, settings: dict[str, Any], by_rank: bool, by_call: bool) -> list[str]:
    """The error of each of three steps; batches differ from the second on, in their order of rows alone."""
    plan = zs.Plan.from_dict(settings)
    make = partial(torch.optim.SGD, lr=0.1)
    engine = zs.Engine(GPT(SMALL), make, plan, example=(torch.zeros(2, 8, dtype=torch.int64),) * 2, mesh=mesh)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + engine.data_rank)
        given = torch.randint(20, (4, 9), generator=generator)
        if by_rank and step and mesh.rank % 2:
            given = given.flip(0)
        found.append(error_of(partial(call if by_call else train_step, engine, given)))
    if engine.plan.streams:
        found.append(error_of(engine.flush))
    return found


def train_step(engine: zs.Engine, given: torch.Tensor) -> None:
    engine.train_step((given[:, :-1], given[:, 1:]))


def call(engine: zs.Engine, given: torch.Tensor) -> None:
    engine.backward(engine(given[:, :-1], given[:, 1:]))
    engine.step()


@pytest.mark.parametrize("kind", list(KINDS))
def test_different_batches_on_ranks_that_share_a_model_are_an_error_on_all(pool: Pool, kind: str) -> None:
    ranks, settings = KINDS[kind]
    for errors in pool.run(train, ranks, settings, True, kind == "tensor"):
        assert errors[0] == "nothing"
        late = errors[3:] if kind == "stages-without-flush" else errors[1:3]
        for error in late:
            assert "BatchError" in error
            assert "given different batches" in error
            assert "rank=engine.data_rank" in error


def test_equal_batches_pass(pool: Pool) -> None:
    for kind in ("tensor-and-data", "stages-and-tensor"):
        ranks, settings = KINDS[kind]
        assert pool.run(train, ranks, settings, False, False) == [["nothing"] * 3] * ranks


def test_nothing_is_read_where_no_ranks_share_a_batch() -> None:
    alone = SameBatches([[0], [1]])
    alone.add(torch.ones(3))
    assert alone.read() == ()
    alone.check([], 0)


def test_every_kind_of_tensor_has_a_checksum() -> None:
    tensors = [torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.complex64)]
    tensors += [
        torch.tensor(2.5),
        torch.ones(2, 2, dtype=torch.bool),
        torch.ones(0, 4),
        torch.ones(4, dtype=torch.uint8),
    ]
    seen = set()
    for tensor in tensors:
        for value in (tensor, tensor * 0):
            batches = SameBatches([[0, 1]])
            batches.add({"x": value, "n": 3})
            seen.add(batches.read())
    assert len(seen) == 2 * len(tensors) - 1  # without elements there is no other value
