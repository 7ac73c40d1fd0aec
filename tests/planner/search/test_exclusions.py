"""Plans that arithmetic excludes, against rehearsals of the same plans."""

from dataclasses import replace

import pytest
from planner.rehearsed import SHAPE, task

from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.memory.ledger import Category
from zeroshard.offload.policy import Offload
from zeroshard.plan import Plan
from zeroshard.planner.predict.predict import predict
from zeroshard.planner.predict.rehearse import TrainingTask
from zeroshard.planner.predict.states import sizes_of
from zeroshard.planner.search.exclusions import Exclusions
from zeroshard.planner.search.search import search
from zeroshard.train.family import gpt_task

MACHINES = Machines(Device("a GPU", "cuda", 2**30, {"fp32": 1e9}, 1e9, 1e-6), 2, 2, Link(1e8), Link(1e8))
BF16 = Plan(precision="bf16", zero=0)


def excluding(job: TrainingTask, memory: int) -> Exclusions:
    return Exclusions(sizes_of(job), replace(MACHINES, device=replace(MACHINES.device, memory_bytes=memory)), BF16)


@pytest.mark.parametrize(
    "zero", [0, pytest.param(1, marks=pytest.mark.whole), 2, pytest.param(3, marks=pytest.mark.whole)]
)
def test_sums_of_several_backwards_take_fp32_as_in_a_rehearsal(zero: int) -> None:
    """Gradients and their sums, of one microbatch and of two: as many bytes as the ledger had, or less by units."""
    job, plan = task(), BF16.with_settings({"zero": zero})
    found = excluding(job, 2**30)
    held, least = [], []
    for count in (1, 2):
        counted = replace(plan, microbatches=count)
        phases = predict(job, counted, MACHINES, 4).phases.values()
        held.append(max(each.get(Category.GRADIENTS, 0) for each in phases))
        least.append(found.least_bytes(counted))
    assert least[1] - least[0] == pytest.approx(found.sizes.trainable * {0: 2, 1: 2, 2: 1, 3: 1}[zero], rel=0.01)
    if zero == 0:
        assert held[1] - held[0] == pytest.approx(least[1] - least[0], rel=0.02)  # buffers are padded
    assert held[1] >= found.sizes.trainable * {0: 4, 1: 4, 2: 2, 3: 2}[zero]


def test_where_sums_do_not_fit_a_single_microbatch_is_left() -> None:
    job = task()
    whole = 16 * sizes_of(job).trainable
    assert excluding(job, 17 * whole // 16).possible(BF16, (1, 2, 4)) == [1]
    assert excluding(job, 20 * whole // 16).possible(BF16, (1, 2, 4)) == [1, 2, 4]
    assert excluding(job, whole // 2).possible(BF16, (1, 2, 4)) == (1, 2, 4)  # for the search to refuse one


def test_states_that_leave_less_than_the_margin_are_excluded() -> None:
    job = task()
    tight = excluding(job, 16 * sizes_of(job).trainable * 102 // 100)
    why, way_out = tight.why(BF16) or ("", "")
    assert "states alone take" in why and why.endswith(", of which 3% stay free.")
    assert way_out == "zero=1 would bring the states down to fit."
    assert not predict(job, BF16, tight.machines, 4).fits


def test_the_least_of_a_share_is_less_than_its_rehearsal_and_near() -> None:
    job = gpt_task(replace(SHAPE, layers=5, width=128), 2)
    found, plan = excluding(job, 2**30), BF16.with_settings({"zero": 3, "offload": "optimizer"})
    whole = predict(job, plan, MACHINES, 2)
    for share in (0.25, 0.75):
        part = plan.with_settings({"offload.fraction": share})
        least, rehearsed = found.at_least(part, whole), predict(job, part, MACHINES, 2)
        assert 0.8 * rehearsed.peak_bytes < least.peak_bytes <= rehearsed.peak_bytes
        assert least.mode == "estimate" and least.host_bytes == 0 and least.plan == part


@pytest.mark.whole
def test_shares_of_a_deep_model_that_cannot_fit_are_not_rehearsed() -> None:
    """40 layers: a device that holds no more than a quarter of the states beside the rest."""
    job = gpt_task(replace(SHAPE, layers=40), 1)
    alone = replace(MACHINES, count=1, per_node=1)
    plan = BF16.with_settings({"zero": 2, "offload": Offload("optimizer")})
    whole, quarter = (
        predict(job, plan.with_settings({"offload.fraction": share}), alone, 1).peak_bytes for share in (1.0, 0.75)
    )
    small = replace(alone, device=replace(alone.device, memory_bytes=int((whole + quarter) / 2 / 0.97)))
    said: list[str] = []
    found = search(job, small, BF16, say=said.append)
    assert found.best and not any("offload optimizer 25%" in line and "recompute" not in line for line in said)
    refused = {one.plan.offloading.fraction: one.prediction for one in found.refused if one.prediction is not None}
    assert any(one.mode == "estimate" for one in refused.values())


def test_last_resorts_with_activations_that_exceed_a_device_alone_are_not_rehearsed() -> None:
    """Of two plans without recomputation the first alone; the second is refused by a number below its own."""
    job, rows = gpt_task(replace(SHAPE, layers=6, width=256, heads=4), 8), 4
    first = BF16.with_settings({"zero": 2, "offload": "optimizer"})
    other = BF16.with_settings({"zero": 3, "offload": "optimizer,parameters"})
    known, rehearsed = (predict(job, plan, MACHINES, rows) for plan in (first, other))
    held = known.memory[Category.ACTIVATIONS]
    tight = excluding(job, int(held / 0.97))
    seen = {(first, rows): replace(known, capacity_bytes=tight.machines.device.capacity_bytes)}
    least = tight.crowded(other, rows, seen)
    assert least is not None and held <= least.peak_bytes <= rehearsed.peak_bytes
    assert least.full == ["device"] and least.mode == "estimate" and least.plan == other
    assert excluding(job, int(held / 0.96)).crowded(other, rows, seen) is None
    changes: list[dict[str, object]] = [
        {"activations.recompute": "blocks"},
        {"microbatches": 2},
        {"loss_chunk": 8},
        {"offload": "optimizer,parameters,activations"},
        {"offload": Offload()},  # no last resort
    ]
    assert not any(tight.crowded(other.with_settings(each), rows, seen) for each in changes)
    assert tight.crowded(other, 2, seen) is None
    said: list[str] = []
    found = search(job, tight.machines, BF16, plans=[(first, rows), (other, rows)], say=said.append)
    assert len(said) == 1 and not found.best
    assert [one.prediction.mode for one in found.refused if one.prediction] == ["fake", "estimate"]
