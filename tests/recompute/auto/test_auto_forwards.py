"""recompute="auto" where more forwards come before a backward than in the first step: within the budget, or refused."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from recompute.auto.test_auto import least_of
from recompute.test_recompute import Stack, batch
from torch import Tensor

import zeroshard as zs
from zeroshard.errors import BudgetExceeded

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ROWS = 64
LATER = (1, 1, 2, 2, 1)  # forwards of each step
Found = tuple[str, list[int], dict[str, Tensor]]


def train(mesh: zs.Mesh, plan: dict[str, Any], forwards: tuple[int, ...], apart: bool) -> Found:
    """The error that ended it, the most bytes of each step, and the weights.

    Args:
        apart: whether each loss has a backward of its own, the first one first.
    """
    torch.manual_seed(0)
    engine = zs.Engine(Stack(9), SGD, zs.Plan.from_dict(plan), mesh=mesh)
    peaks: list[int] = []
    error = ""
    try:
        for step, count in enumerate(forwards):
            with engine.trace(memory=True) as trace:
                losses = [engine(batch(10 * step + n, mesh.rank, ROWS)) for n in range(count)]
                for loss in losses if apart else [sum(losses[1:], losses[0])]:
                    engine.backward(loss)
                engine.step()
            peaks.append(max(sum(event.nbytes.values()) for event in trace.memory))
    except BudgetExceeded as raised:
        return str(raised), peaks, {}
    return error, peaks, engine.state_dict() if mesh.ranks == 1 else {}


def same(found: Found, kept: Found) -> bool:
    return all(torch.equal(value, kept[2][name]) for name, value in found[2].items())


@pytest.mark.parametrize("apart", [False, True], ids=["one backward", "a backward each"])
def test_later_forwards_share_what_the_first_ones_left_or_say_what_to_do(apart: bool) -> None:
    auto = {"recompute": "auto", "device_memory": "1GiB"}
    runs = partial(train, zs.Mesh(), apart=apart)
    kept = runs({"device_memory": "1GiB"}, LATER)
    single, double = kept[1][1], kept[1][2]
    least = least_of(runs({**auto, "device_memory": single // 8}, LATER)[0])  # of one forward
    assert least < single < double
    outcomes = set()
    for n in range(7):
        budget = least + (double - least) * n // 6
        error, peaks, *_ = found = runs({**auto, "device_memory": budget}, LATER)
        assert max(peaks) <= budget and same(found, kept)
        outcomes.add(bool(error))
        if not error:
            continue
        assert "2 that now come before a backward. Let the first step run 2 before its backward" in error
        more = re.search(r"set device_memory=(\d+) or more for that", error)
        enough = int(more[1]) if more else budget
        advised = (2, *LATER[1:])
        error, peaks, *_ = found = runs({**auto, "device_memory": enough}, advised)
        assert not error and max(peaks) <= enough
        assert same(found, runs({"device_memory": "1GiB"}, advised))
    assert outcomes == {False, True}


def test_ranks_that_gather_weights_do_alike(pool: Pool) -> None:
    plan = {"zero": 3, "transport": "network"}
    kept = pool.run(train, 2, {**plan, "device_memory": "1GiB"}, LATER, False)
    highest, single = max(kept[0][1]), kept[0][1][1]
    for n in (1, 3, 5):
        budget = single + (highest - single) * n // 6
        found = pool.run(train, 2, {**plan, "recompute": "auto", "device_memory": budget}, LATER, False)
        assert all(max(peaks) <= budget for _, peaks, _ in found)
        assert len({error for error, *_ in found}) == 1
        assert not found[0][0] or "Let the first step run 2" in found[0][0]
    assert not found[0][0]
