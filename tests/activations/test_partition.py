"""P_a of ZeRO-R: inputs of blocks divided among tensor ranks, bit for bit, with bytes and wire by formula."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.activations.partition import CheckpointPartition
from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Category
from zeroshard.traffic import Purpose
from zeroshard.train.gpt import GPT, GPTConfig

ROWS, TOKENS, WIDTH, LAYERS = 2, 15, 32, 4
STEPS = 2


def model() -> GPT:
    torch.manual_seed(3)
    return GPT(GPTConfig(vocabulary=64, context=TOKENS, width=WIDTH, layers=LAYERS, heads=4))


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(64, (2, rows, TOKENS), generator=torch.Generator().manual_seed(step))
    return x, y


def kept_bytes(engine: zs.Engine, x: Tensor, y: Tensor) -> int:
    """Bytes that the ledger counts between a forward and its backward."""
    loss = engine(x, y)
    held = engine.ledger.account(Category.ACTIVATIONS).current
    engine.backward(loss)
    engine.step()
    return held


def train(mesh: zs.Mesh, plans: list[dict[str, Any]], replicas: int = 1) -> list[Any]:
    """Under each plan: weights; bytes of activations in one stage; elements planned, gathered, padded; and summed."""
    found = []
    for plan in plans:
        settings, sgd = zs.Plan.from_dict({"device_memory": "1GiB", **plan}), partial(torch.optim.SGD, lr=0.1)
        engine = zs.Engine(model(), sgd, settings, mesh=mesh, example=tuple(each[:1] for each in batch(0)))
        data_rank = mesh.rank // 2 % replicas
        for step in range(STEPS):
            engine.train_step(tuple(each[data_rank::replicas] for each in batch(step, ROWS * replicas)))
        held = 0 if settings.pipelined else kept_bytes(engine, *batch(STEPS))
        rows = {row.purpose: row for row in engine.traffic()}
        gathers = rows.get(Purpose.GATHER_CHECKPOINTS)
        counts = (
            None if gathers is None else (gathers.planned_elements, gathers.measured_elements, gathers.padding_elements)
        )
        found.append((engine.state_dict(), held, counts, rows[Purpose.SUM_ACTIVATIONS].measured_elements))
    return found


SPLIT = {"tensor_parallel": 2, "tensor_parallel.sequence": False}
INPUT = ROWS * TOKENS * WIDTH  # elements of the input of a block


@pytest.mark.parametrize("plan", [{}, {"zero": 3}, {"offload": "activations"}], ids=["plain", "zero 3", "P_a+cpu"])
@pytest.mark.parametrize("recompute", ["blocks", "sqrt"])
def test_each_rank_keeps_its_part_of_the_inputs_of_blocks(pool: Pool, recompute: str, plan: dict[str, Any]) -> None:
    plan = {**SPLIT, **plan, "activations.recompute": recompute, "activations.save_sums": False}
    for whole, parts in pool.run(train, 2, [plan, {**plan, "activations.partition": True}]):
        weights, held, none, sums = whole
        weights_again, held_again, counts, sums_again = parts
        assert none is None and sums_again == sums
        assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
        checkpoints = {"blocks": LAYERS, "sqrt": 1}[recompute]  # "sqrt" keeps the last segment
        assert counts == (checkpoints * INPUT, checkpoints * INPUT, 0)
        if "offload" not in plan:  # there inputs and parts are on the host
            assert held - held_again == checkpoints * 4 * INPUT // 2
        assert counts[1] <= sums_again / 10 if recompute == "blocks" else True


OTHERS = [
    {"microbatches": 2, "zero": 2, "activations.recompute": "blocks"},
    {"microbatches": 2, "activations.recompute": "blocks", "transport": "network"},
    {"microbatches": 2, "activations.recompute": "sqrt", "pipeline_parallel": 2},
]


@pytest.mark.parametrize("plan", by_default(OTHERS, OTHERS[0], OTHERS[2]), ids=["accumulated", "network", "stages"])
def test_several_microbatches_are_in_flight(pool: Pool, plan: dict[str, Any]) -> None:
    replicas = 1 if "pipeline_parallel" in plan else 2
    plans = [{**SPLIT, **plan}, {**SPLIT, **plan, "activations.partition": True}]
    for whole, parts in pool.run(train, 4, plans, replicas):
        assert all(torch.equal(whole[0][key], parts[0][key]) for key in whole[0])
        assert parts[2][0] == parts[2][1] > 0


def divided(mesh: zs.Mesh, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Elements of a part, and whether the parts make up the tensor."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).requires_grad_()
    partition = CheckpointPartition(Comm(mesh))
    part = partition.part(tensor)
    return part.numel(), torch.equal(partition.whole(part, tensor.shape), tensor)


@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 2, 2)])
def test_parts_of_any_size_make_up_the_whole(pool: Pool, shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    assert pool.run(divided, 4, shape) == [(-(-numel // 4), True)] * 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recompute": "blocks"}, "tensor_parallel is 1"),
        ({"recompute": "blocks", "tensor_parallel": 2}, "divided the inputs of blocks already"),
        (SPLIT, "has none"),
        ({**SPLIT, "recompute": "blocks", "pipeline_parallel": 2, "microbatches": 2}, "with stages"),
    ],
)
def test_what_has_nothing_to_divide_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(zs.PlanError, match=r"activations\.partition=True") as error:
        zs.Plan.from_dict({**settings, "activations.partition": True})
    assert words in str(error.value)
