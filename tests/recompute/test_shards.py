"""P_a of ZeRO-R: inputs of blocks divided among tensor ranks, bit for bit, with bytes and wire by formula."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from selection import by_default
from torch import Tensor

import zeroshard as zs
from zeroshard.comm.collectives import Comm
from zeroshard.memory.ledger import Category
from zeroshard.recompute.shards import CheckpointPartition
from zeroshard.traffic import Purpose
from zeroshard.train.gpt import GPT
from zeroshard.train.sizes import GPTConfig

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


MICROBATCHES, LARGE = 4, 64  # rows of a microbatch whose parts are large enough to go to the host
CUT = {"pipeline_parallel": 2, "pipeline_parallel.split": ("blocks.2",), "microbatches": MICROBATCHES}
QUARTERS = {"pipeline_parallel.virtual_stages": 2, "pipeline_parallel.split": ("blocks.1", "blocks.2", "blocks.3")}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "zb-h1": {"activations.recompute": "blocks"},
    "interleaved": {**QUARTERS, "activations.recompute": "blocks"},
}
CASES = {
    "gpipe": ("gpipe", {}),
    "gpipe, cpu": ("gpipe", {"offload": "activations"}),
    "gpipe, arena": ("gpipe", {"activations.arena": True}),
    "gpipe, zero 1": ("gpipe", {"zero": 1}),
    "segments": ("gpipe", {"activations.recompute": "sqrt"}),
    "segments, cpu": ("gpipe", {"activations.recompute": "sqrt", "offload": "activations"}),
    "zb-h1": ("zb-h1", {}),
    "interleaved": ("interleaved", {}),
    "interleaved, cpu": ("interleaved", {"offload": "activations"}),
}


def train_stages(mesh: zs.Mesh, plan: dict[str, Any], rows: int) -> Any:
    """Under a plan, with microbatches of so many rows: weights; elements planned, gathered, padded; and bytes of
    activations on the device and the host, and of buffers, as microbatches of a step enter the last block, without
    those that graphs hold."""
    settings, sgd = zs.Plan.from_dict({"device_memory": "1GiB", **plan}), partial(torch.optim.SGD, lr=0.1)
    engine = zs.Engine(model(), sgd, settings, mesh=mesh, example=tuple(each[:1] for each in batch(0)))
    for step in range(2):
        engine.train_step(batch(step, rows * MICROBATCHES))
    seen: list[tuple[int, ...]] = []

    def see(*_: Any) -> None:
        tiers = (Category.ACTIVATIONS, "device"), (Category.ACTIVATIONS, "host"), (Category.BUFFERS, "device")
        seen.append(tuple(engine.ledger.account(*each).current for each in tiers))

    engine.model.get_submodule("blocks.3").register_forward_pre_hook(see)
    engine.train_step(batch(2, rows * MICROBATCHES))
    row = next((row for row in engine.traffic() if row.purpose == Purpose.GATHER_CHECKPOINTS), None)
    counts = None if row is None else (row.planned_elements, row.measured_elements, row.padding_elements)
    return engine.state_dict(), counts, seen[:MICROBATCHES]


@pytest.mark.parametrize("case", by_default(list(CASES), "gpipe, arena", "segments", "interleaved, cpu"))
def test_each_rank_keeps_its_part_of_the_inputs_of_chunks(pool: Pool, case: str) -> None:
    schedule, more = CASES[case]
    plain = {**SPLIT, **CUT, "pipeline_parallel.schedule": schedule, **SCHEDULES[schedule]}
    plain["activations.recompute"] = more.get("activations.recompute", plain.get("activations.recompute", "schedule"))
    runs = [plain, {**plain, **more}, {**plain, **more, "activations.partition": True}]
    rows = LARGE if "offload" in more else 4
    seen = [pool.run(train_stages, 4, run, rows) for run in runs[runs[0] == runs[1] :]]
    inputs = rows * TOKENS * WIDTH  # elements of what enters a chunk with a microbatch
    for rank, (kept, whole, parts) in enumerate(zip(seen[0], *seen[-2:], strict=True)):
        for other in (whole, parts):
            assert all(torch.equal(kept[0][key], other[0][key]) for key in kept[0])
        of_chunks = {"gpipe": rank >= 2, "zb-h1": False, "interleaved": True}[schedule]  # others are at once, or first
        elements = MICROBATCHES * inputs
        gathers = of_chunks or "segments" in case  # each stage has one
        assert parts[1] == ((elements, elements, 0) if gathers else None) and whole[1] is None
        if schedule != "gpipe" or rank < 2 or "segments" in case:
            continue
        device, host, scratch = zip(*parts[2], strict=True)
        mine, before = 4 * inputs // 2, [4 * inputs // 2 * n for n in range(MICROBATCHES)]  # bytes
        assert len(set(scratch)) == 1  # nothing is left among the messages
        if "offload" in more:
            assert list(host) == before and max(device) <= 2 * mine  # on their way
            assert [each[1] for each in whole[2]] == [2 * nbytes for nbytes in before]  # and whole inputs go there
        else:
            assert list(device) == ([MICROBATCHES * mine] * MICROBATCHES if "activations.arena" in more else before)


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
        ({**SPLIT, "pipeline_parallel": 2, "microbatches": 2}, "with stages"),
    ],
)
def test_what_has_nothing_to_divide_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(zs.PlanError, match=r"activations\.partition=True") as error:
        zs.Plan.from_dict({**settings, "activations.partition": True})
    assert words in str(error.value)
