"""First estimates: those for a number of ranks that split layers from those for fewer and for more."""

import pytest

import zeroshard as zs
from zeroshard.doctor.hardware import Device, Link, Machines
from zeroshard.planner.predict.estimate import Estimator
from zeroshard.planner.predict.states import sizes_of
from zeroshard.train.family import gpt_task
from zeroshard.train.sizes import GPTConfig

DEVICE = Device("a GPU", "cuda", 2**34, {"fp32": 1e13, "bf16": 1e14}, 1e12, 1e-6)
MACHINES = Machines(DEVICE, 8, 8, Link(1e11), Link(1e10))
BLOCKS = GPTConfig(vocabulary=512, context=128, width=256, heads=8, layers=6)


@pytest.mark.parametrize("together", [2, 4])
def test_estimates_between_two_numbers_of_ranks_are_near_those_of_a_rehearsal(together: int) -> None:
    task, base = gpt_task(BLOCKS, 8), zs.Plan(precision="bf16")
    sizes = sizes_of(task, base.ignored)
    alone = Estimator.of(task, base, MACHINES, sizes, 1)
    all_of_them = Estimator.of(task, base, MACHINES, sizes, 8, alone)
    rehearsed = Estimator.of(task, base, MACHINES, sizes, together, alone)
    found = alone.between(all_of_them, together)
    assert found.together == together
    plan = zs.Plan(zero=1, precision="bf16", microbatches=2, tensor_parallel=together)
    ours, theirs = (each.prediction(plan, 8) for each in (found, rehearsed))
    assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.05)
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.1)
    others = alone.prediction(plan, 8), all_of_them.prediction(plan, 8)
    for of in ("peak_bytes", "seconds"):
        assert min(getattr(one, of) for one in others) < getattr(ours, of) < max(getattr(one, of) for one in others)
